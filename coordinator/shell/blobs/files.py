"""The few file operations on which durability rests."""

import ctypes
import os
from pathlib import Path

_SYNC_FILE_RANGE_WRITE = 2
_range_writer = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _range_writer is not None:
    _range_writer.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Let the disk take bytes while more arrive, so that the sync at the end finds little to do.

    Nothing is promised by it: it returns at once, and is nothing where there is no such call.
    """
    if _range_writer is not None:
        _range_writer(descriptor, start, stop - start, _SYNC_FILE_RANGE_WRITE)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Make a folder's names durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def write_whole(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset``, or cut the file back to ``offset`` and raise.

    Raises:
        OSError: the disk is full, or worse.
    """
    try:
        write_over(descriptor, content, offset)
    except OSError:
        os.ftruncate(descriptor, offset)
        raise


def write_over(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset``, leaving what lies behind it as it is.

    Raises:
        OSError: the disk is full, or worse; some of it may be written.
    """
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
