"""Durable writes: after a power failure a file is there whole or not at all.

The bytes go into a file beside it, which is synced and takes its place; then the folder is synced,
so that the name is there too. What a crash leaves beside it, the next write takes away.
"""

import os
from collections.abc import Callable
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
    with os.fdopen(os.open(beside, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _take_place(beside, path)


def fill_durably(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` make a file, which then takes the place of any other at ``path``.

    Raises:
        OSError: as `write_durably`.
    """
    beside = path.with_name(f".{path.name}.partial")
    fill(beside)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    _take_place(beside, path)


def _take_place(beside: Path, path: Path) -> None:
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
