"""Files that are on disk whole or not at all, whenever the process or the machine stops."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

PRIVATE = 0o600
"""Readable by its owner alone."""
SHARED = 0o666
"""Permissions as the user's umask sets them."""


def write_durably(path: Path, content: bytes, *, mode: int = PRIVATE) -> None:
    """Write a file, replacing any other.

    Args:
        path: Its folder is there.
        content: All of it.
        mode: Who may read and write it, from its first byte on.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with _naming(path), os.fdopen(os.open(beside, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _take_place(beside, path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the system, which tells none of those of a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _umask() -> int:
    """Permissions that this process's new files do not get."""
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except OSError:
        # Reading it changes it for a moment, for all threads.
        current = os.umask(0o077)
        os.umask(current)
        return current
    return int(status.partition("Umask:")[2].split(maxsplit=1)[0], 8)


def fill_durably(path: Path, fill: Callable[[Path], None], *, mode: int = PRIVATE) -> None:
    """Let ``fill`` make a file, which then takes the place of any other at ``path``.

    Args:
        path: Its folder is there.
        fill: Writes the file that it is given.
        mode: Who may read and write it in the end, as far as the user's umask allows.

    Raises:
        OSError: as `write_durably`.
    """
    beside = path.with_name(f".{path.name}.partial")
    # A link that somebody left there would have the content go elsewhere.
    beside.unlink(missing_ok=True)
    fill(beside)
    # Libraries make files with permissions of their own choice.
    beside.chmod(mode & ~_umask())
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    _take_place(beside, path)


def _take_place(beside: Path, path: Path) -> None:
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make durable which names are in a folder.

    Raises:
        OSError: The folder cannot be read.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
