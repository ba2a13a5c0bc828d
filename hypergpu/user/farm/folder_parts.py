"""The files of a folder as a farm job sends them: small ones in an index, large ones alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.folder_index import FolderIndex, index_bytes, large_names
from hypergpu.farm.map_request import FILES_MOST

_SMALL_BYTES = 32 << 20
"""Files up to this size travel together, in the index; a large tokenizer takes 35 MB."""
_LARGE_FILES_MOST = FILES_MOST - 1


class FolderParts(NamedTuple):
    """A folder as it is sent."""

    index_content: bytes
    large_files: Mapping[str, Path]
    """By their names among the request's files."""


class FolderNames(NamedTuple):
    """How a folder is named, for people and among the request's files."""

    title: str
    """For people: ``the base models/minilm``."""
    prefix: str
    """What names of its large files begin with."""
    fix: str
    """What helps where it has too many large files."""


def folder_files(
    folder: Path, takes: Callable[[str], bool] = lambda _name: True
) -> dict[str, Path]:
    """Files of a folder by their paths within it, in order; hidden ones stay.

    Args:
        folder: That exists.
        takes: Whether a file is taken, by its name.

    Raises:
        OSError: The folder cannot be read.
    """
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and takes(path.name) and not _is_hidden(path, folder)
    }


def folder_parts(files: Mapping[str, Path], names: FolderNames) -> FolderParts:
    """Read the small files of a folder; large ones are not read.

    Args:
        files: By their paths within the folder.
        names: How the folder is named.

    Raises:
        HyperGPUError: FILE_UNUSABLE, a file cannot be read, or too many are large.
    """
    try:
        sizes = {name: path.stat().st_size for name, path in files.items()}
        large_files = large_names(sizes, _SMALL_BYTES, names.prefix)
        if len(large_files) > _LARGE_FILES_MOST:
            detail = (
                f"{names.title} has {len(large_files)} large files, and {_LARGE_FILES_MOST} at most"
            )
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=names.fix)
        small_files = {
            name: path.read_bytes() for name, path in files.items() if name not in large_files
        }
    except OSError as error:
        detail = f"{names.title}: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    index = FolderIndex(small_files=small_files, large_files=large_files)
    return FolderParts(
        index_bytes(index), {name: files[path] for path, name in large_files.items()}
    )


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
