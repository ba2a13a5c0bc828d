"""How bytes get onto the disk: what fits, and which calls make them durable."""

import ctypes
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason

KEEP_S = 60
"""A fresh blob outlives every collection for this long: its owner needs time to journal it."""
KEEP_FREE_BYTES = 64 << 20
"""Left to the journal: it must be able to say that the disk is full."""
_SPARE_PART = 8
"""Users' files leave this part of all space to jobs under way: else anybody with a token could
stop them all by declaring a file that never comes.
"""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Space:
    """Counts what is stored or promised. Threads may share it."""

    def __init__(
        self, folder: Path, quota_bytes: int = 0, *, keep_free_bytes: int = KEEP_FREE_BYTES
    ) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._keep_free_bytes = keep_free_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self.reclaim: Callable[[], bool] = lambda: False
        """Makes space by deleting what can be missed; tells whether there was anything."""

    def take(self, size_bytes: int) -> None:
        """Promise space for ``size_bytes`` that are still to be written.

        Raises:
            HyperGPUError: DISK_FULL, with the figures; nothing was promised.
        """
        self._insist(size_bytes, self._check_disk)

    def take_data(self, size_bytes: int) -> None:
        """Promise space for a user's file, beside which an eighth of all space stays free.

        Raises:
            HyperGPUError: DISK_FULL, with the figures; nothing was promised.
        """
        self._insist(size_bytes, self._check_disk, self._check_spare)

    def take_written(self, size_bytes: int) -> None:
        """Promise space for ``size_bytes`` that lie on the disk already: only the quota can refuse.

        Raises:
            HyperGPUError: DISK_FULL, with the figures; nothing was promised.
        """
        self._insist(size_bytes)

    def _insist(self, size_bytes: int, *checks: Callable[[int], None]) -> None:
        try:
            self._take(size_bytes, *checks)
        except HyperGPUError:
            if not self.reclaim():
                raise
            self._take(size_bytes, *checks)

    def _take(self, size_bytes: int, *checks: Callable[[int], None]) -> None:
        with self._lock:
            for check in (self._check_quota, *checks):
                check(size_bytes)
            self._used_bytes += size_bytes

    def count(self, size_bytes: int) -> None:
        """Note what lies there already, whatever the quota says."""
        with self._lock:
            self._used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Take a promise back."""
        with self._lock:
            self._used_bytes -= size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all blobs, and the declared sizes of the uploads under way."""
        with self._lock:
            return self._used_bytes

    def _check_spare(self, size_bytes: int) -> None:
        free_bytes = self._disk_free_bytes() - self._keep_free_bytes
        if self._quota_bytes:
            free_bytes = min(free_bytes, self._quota_bytes - self._used_bytes)
        spare_bytes = (self._used_bytes + free_bytes) // _SPARE_PART
        if free_bytes < size_bytes + spare_bytes:
            raise HyperGPUError(
                Reason.DISK_FULL,
                f"{size_bytes} more bytes of users' files do not fit: {free_bytes} bytes are free,"
                f" {spare_bytes} of them are kept for jobs under way",
            )

    def _disk_free_bytes(self) -> int:
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize

    def _check_disk(self, size_bytes: int) -> None:
        free_bytes = self._disk_free_bytes()
        if free_bytes < size_bytes + self._keep_free_bytes:
            raise HyperGPUError(
                Reason.DISK_FULL,
                f"{size_bytes} more bytes do not fit: {free_bytes} bytes are free at "
                f"{self._folder}, {self._keep_free_bytes} of them are kept free",
            )

    def _check_quota(self, size_bytes: int) -> None:
        if 0 < self._quota_bytes < self._used_bytes + size_bytes:
            raise HyperGPUError(
                Reason.DISK_FULL,
                f"{size_bytes} more bytes do not fit: {self._used_bytes} of the quota of "
                f"{self._quota_bytes} bytes are used",
            )


@contextmanager
def reject_when_full(what: str) -> Iterator[None]:
    """Raise the system's error for a full disk as DISK_FULL, which begins with ``what``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise HyperGPUError(Reason.DISK_FULL, f"{what}: {error.strerror}") from error
        raise


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


def kept_secret(path: Path) -> bytes:
    """The secret of 32 bytes in a file, which is made when it is not there. Not for two at once."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        secret = secrets.token_bytes(32)
        write_durably(path, secret)
        return secret


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
    left_view, at = memoryview(content), offset
    try:
        while left_view:
            written_bytes = os.pwrite(descriptor, left_view, at)
            left_view, at = left_view[written_bytes:], at + written_bytes
    except OSError:
        os.ftruncate(descriptor, offset)
        raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
