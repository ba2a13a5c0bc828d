"""The folder that a run keeps its things in: emptied of an earlier run's, never of anybody else's.

A mark says whose it is. The run holds the mark's lock, which the kernel lets go however it ends.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from hypergpu.errors import HyperGPUError, Reason


class RunFolder(NamedTuple):
    """What lies in the folder of a run."""

    path: Path
    mark: str
    """Name of the file that only runs of this kind leave."""
    left: tuple[str, ...]
    """Names of what a run leaves and the next one removes."""


def require_own(folder: RunFolder) -> None:
    """Change nothing; refuse a folder that a run could not have for itself.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it has such names without the mark, or a run goes on in it.
    """
    with _explain_errors(folder):
        _require_marked(folder)
        if (folder.path / folder.mark).exists():
            with (folder.path / folder.mark).open("ab") as mark:
                _lock(folder, mark)


@contextmanager
def run_folder(folder: RunFolder) -> Iterator[None]:
    """Make the folder, empty of what an earlier run left, and have it alone while the block runs.

    Raises:
        HyperGPUError: FILE_UNUSABLE, as above, or it cannot be written.
    """
    with _explain_errors(folder):
        _require_marked(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        mark = (folder.path / folder.mark).open("ab")
    with mark:
        with _explain_errors(folder):
            _lock(folder, mark)
            _clear(folder)
        yield


def _require_marked(folder: RunFolder) -> None:
    if folder.path.exists() and not folder.path.is_dir():
        raise _refusal(f"nothing can be kept in {folder.path}: it is a file")
    existing_names = [name for name in folder.left if (folder.path / name).exists()]
    if existing_names and not (folder.path / folder.mark).exists():
        raise _refusal(f"{folder.path / existing_names[0]} is there and is not of a run")


def _lock(folder: RunFolder, mark: IO[bytes]) -> None:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(f"a run is going on in {folder.path}") from None


def _clear(folder: RunFolder) -> None:
    """A coordinator would go on with the job of the state that it finds."""
    for name in folder.left:
        path = folder.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _explain_errors(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refusal(f"nothing can be kept in {folder.path}: {error.strerror}") from error


def _refusal(detail: str) -> HyperGPUError:
    fix = "choose a folder that you may write and that is a run's alone: --out FOLDER"
    return HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
