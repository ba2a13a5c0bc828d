"""The files of a folder as blobs of a farm job: nodes have no network to fetch them.

Small files travel together in one blob, which also names the large ones: a request names 16 blobs
at most.
"""

from collections.abc import Mapping

import msgspec

from hypergpu.data_paths import checked_paths
from hypergpu.errors import HyperGPUError, Reason

INDEX_BYTES_MOST = 256 << 20


class FolderIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a folder by their paths within it, with forward slashes."""

    small_files: dict[str, bytes]
    """Contents."""
    large_files: dict[str, str]
    """Names among the request's files."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files."""
        return (*self.small_files, *self.large_files)


def index_bytes(index: FolderIndex) -> bytes:
    """An index as the blob that a request names.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is none that `read_folder_index` would take.
    """
    content = msgspec.msgpack.encode(index)
    read_folder_index(content)
    return content


def read_folder_index(content: bytes) -> FolderIndex:
    """Read an index, trusting nothing in it. Its paths are safe to create in any folder.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is too large or malformed, or names a path that no
            folder may have.
    """
    if len(content) > INDEX_BYTES_MOST:
        detail = f"the small files of the folder have {len(content)} bytes"
        fix = "pack them into fewer, larger files"
        raise HyperGPUError(
            Reason.MANIFEST_INVALID, f"{detail}, and {INDEX_BYTES_MOST} at most", fix=fix
        )
    try:
        index = msgspec.msgpack.decode(content, type=FolderIndex)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"the index of the folder's files is malformed: {error}"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail) from error
    checked_paths(index.paths)
    return index


def large_names(sizes: Mapping[str, int], small_bytes: int, prefix: str) -> dict[str, str]:
    """Names that large files get among a request's files, by path.

    Args:
        sizes: Sizes of all files of the folder, by path.
        small_bytes: Size up to which a file lies in the index.
        prefix: What the names begin with.
    """
    large = [path for path in sorted(sizes) if sizes[path] > small_bytes]
    return {path: f"{prefix}-{number}" for number, path in enumerate(large)}
