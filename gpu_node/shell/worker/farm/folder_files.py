"""Folders of a bundle's files, laid out from their blobs."""

from pathlib import Path

from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.folder_index import INDEX_BYTES_MOST, FolderIndex


def index_content(request: DoWork, bundle: Bundle, name: str, title: str) -> bytes:
    """The content of a folder's index, not parsed.

    Args:
        request: The bundle's.
        bundle: Names the index among its files.
        name: Name of the index.
        title: What the folder is, for people.

    Raises:
        ShardError: The bundle has no such index, or one that is too large.
    """
    if name not in bundle.files:
        raise ShardError(f"the job has no file {name!r}, which names its {title}")
    blob = bundle.files[name]
    if blob.size_bytes > INDEX_BYTES_MOST:
        raise ShardError(f"the index of the {title} has {blob.size_bytes} bytes")
    return request.input_path(blob).read_bytes()


def lay_out_folder(request: DoWork, bundle: Bundle, index: FolderIndex, folder: Path) -> None:
    """Make a folder of the files that an index names. Large files are linked, not copied.

    Raises:
        ShardError: The bundle lacks one of them.
    """
    for path, content in index.small_files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    for path, name in index.large_files.items():
        if name not in bundle.files:
            raise ShardError(f"the job has no file {name!r}, which is its {path}")
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(request.input_path(bundle.files[name]).resolve())
