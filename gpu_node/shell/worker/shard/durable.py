"""Writing a file so that it is there whole or not at all, whenever the power goes."""

import os
from collections.abc import Callable
from pathlib import Path


def write_durably(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a file beside ``path``, sync it and rename it into place."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
