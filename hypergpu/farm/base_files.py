"""The files of a model that items are done with, as blobs: nodes have no network to fetch them.

Small files travel together in one blob, which also names the large ones: a request names 16 blobs
at most. No file whose format may hold code is taken: neither pickles nor modules of Python.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath

import msgspec

from hypergpu.data_paths import checked_paths
from hypergpu.errors import HyperGPUError, Reason

BASE_INDEX = "base"
"""Name of the index among a request's files."""
INDEX_BYTES_MOST = 256 << 20
SMALL_BYTES_MOST = 64 << 20
"""Size of a file that the index may hold; a large tokenizer takes 35 MB."""
WEIGHTS_SUFFIX = ".safetensors"
SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", WEIGHTS_SUFFIX})
"""Endings of the files of a base that travel; others, such as other formats of weights, do not."""


class BaseIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a base by their paths within it, with forward slashes."""

    small_files: dict[str, bytes]
    """Contents."""
    large_files: dict[str, str]
    """Names among the request's files."""


def index_bytes(index: BaseIndex) -> bytes:
    """An index as the blob that a request names.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is none that `read_base_index` would take.
    """
    content = msgspec.msgpack.encode(index)
    read_base_index(content)
    return content


def read_base_index(content: bytes) -> BaseIndex:
    """Read an index, trusting nothing in it.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is too large or malformed, or names a file that may not
            be part of a base.
    """
    if len(content) > INDEX_BYTES_MOST:
        detail = f"the small files of the base have {len(content)} bytes"
        raise HyperGPUError(Reason.MANIFEST_INVALID, f"{detail}, and {INDEX_BYTES_MOST} at most")
    try:
        index = msgspec.msgpack.decode(content, type=BaseIndex)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"the index of the base's files is malformed: {error}"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail) from error
    paths = [*index.small_files, *index.large_files]
    checked_paths(paths)
    for path in paths:
        if not is_base_file(path):
            detail = f"{path} is no file of a base: these end in {', '.join(sorted(SUFFIXES))}"
            raise HyperGPUError(Reason.MANIFEST_INVALID, detail, fix="leave it out")
    return index


def is_base_file(path: str) -> bool:
    """Whether a file may be part of a base, by its name."""
    return PurePosixPath(path).suffix.lower() in SUFFIXES


def weights_names(paths: Mapping[str, int], small_bytes: int) -> dict[str, str]:
    """Names that large files get among a request's files.

    Args:
        paths: Sizes of all files of the base, by path.
        small_bytes: Size up to which a file lies in the index.
    """
    large = [path for path in sorted(paths) if paths[path] > small_bytes]
    return {path: f"weights-{number}" for number, path in enumerate(large)}
