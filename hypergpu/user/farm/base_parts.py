"""The folder of a base as the files that a farm job sends."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import (
    WEIGHTS_SUFFIX,
    BaseIndex,
    index_bytes,
    is_base_file,
    weights_names,
)
from hypergpu.farm.map_request import FILES_MOST

_SMALL_BYTES = 32 << 20
"""Files up to this size travel together, in the index."""
_LARGE_FILES_MOST = FILES_MOST - 1


class BaseParts(NamedTuple):
    """A base as it is sent."""

    index_content: bytes
    large_files: Mapping[str, Path]
    """By their names among the request's files."""


def base_parts(folder: Path) -> BaseParts:
    """Read a base's folder; weights are not read.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it holds no base, or one in too many files.
    """
    try:
        paths = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and is_base_file(path.name) and not _is_hidden(path, folder)
        }
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        if not any(name.endswith(WEIGHTS_SUFFIX) for name in paths):
            detail = f"the base {folder} holds no *{WEIGHTS_SUFFIX}"
            fix = "save it with save_pretrained(folder), which writes them"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
        names = weights_names(sizes, _SMALL_BYTES)
        if len(names) > _LARGE_FILES_MOST:
            detail = (
                f"the base {folder} has {len(names)} large files, and {_LARGE_FILES_MOST} at most"
            )
            fix = "save it in fewer: save_pretrained(folder, max_shard_size='50GB')"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
        small_files = {name: path.read_bytes() for name, path in paths.items() if name not in names}
    except OSError as error:
        detail = f"the base {folder}: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    index = BaseIndex(small_files=small_files, large_files=names)
    return BaseParts(index_bytes(index), {name: paths[path] for path, name in names.items()})


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
