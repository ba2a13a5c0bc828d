"""Paths of files in users' data, checked before a folder is made of them."""

from collections.abc import Iterable
from pathlib import PurePosixPath

from hypergpu.errors import HyperGPUError, Reason

ENTRIES_MAX = 100_000
PATH_BYTES_MAX = 1024
_NAME_BYTES_MAX = 255
"""Longest name of a file or folder that file systems accept."""


def checked_paths(texts: Iterable[str]) -> tuple[PurePosixPath, ...]:
    """Return the paths of a manifest's entries in order, safe to create in any folder.

    Raises:
        HyperGPUError: MANIFEST_INVALID, a path is none, leads elsewhere, occurs twice or lies below
            another one's file; or there are too many.
    """
    paths = tuple(_checked_path(text) for text in texts)
    if len(paths) > ENTRIES_MAX:
        detail = f"{len(paths)} files are over the limit of {ENTRIES_MAX}"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
    files: set[PurePosixPath] = set()
    for path in paths:
        if path in files:
            raise _invalid(str(path), "occurs twice")
        files.add(path)
    folders: set[PurePosixPath] = set()
    for path in paths:
        for folder in path.parents:
            if folder in folders:
                break
            if folder in files:
                raise _invalid(str(path), "lies below another file")
            folders.add(folder)
    return paths


def _checked_path(text: str) -> PurePosixPath:
    parts = text.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        raise _invalid(text, "is not relative with forward slashes and no '.' or '..'")
    if any(letter == "\\" or ord(letter) < 0x20 or ord(letter) == 0x7F for letter in text):
        raise _invalid(text, "holds a backslash or a control character")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise _invalid(text, "is not Unicode") from None
    if max(sizes) > _NAME_BYTES_MAX or sum(sizes) + len(sizes) > PATH_BYTES_MAX:
        raise _invalid(text, "is too long")
    return PurePosixPath(text)


def _invalid(path: str, why: str) -> HyperGPUError:
    return HyperGPUError(Reason.MANIFEST_INVALID, f"path {path[:80]!r} {why}")
