"""How bytes get onto the disk: what fits, which calls make them durable, and one attempt at an
upload, appended to its file. Which uploads there are is `upload_store`'s.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from hypergpu.crypto import FILE_STEP_BYTES, RunningDigest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements import BlobRef
from hypergpu.units import Bytes

KEEP_S = 60
"""A fresh blob outlives every collection for this long: its owner needs time to journal it."""
KEEP_FREE_BYTES = 64 << 20
"""Left to the journal: it must be able to say that the disk is full."""
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

    def _check_disk(self, size_bytes: int) -> None:
        disk = os.statvfs(self._folder)
        free_bytes = disk.f_bavail * disk.f_frsize
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


class Attempt(Protocol):
    """An upload's file in the hands of one attempt."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def blob(self) -> BlobRef:
        """What was declared."""
        ...


class Keeper(Protocol):
    """Has the last word over every file: an older attempt cannot touch a newer one's."""

    def discard(self, attempt: Attempt) -> None:
        """Throw an attempt's file away, unless a newer attempt has taken it over."""
        ...

    def shrink(self, attempt: Attempt, stored_bytes: Bytes) -> None:
        """Reserve for an attempt that ended no more than what it stored."""
        ...

    def release(self, attempt: Attempt, keep_s: int) -> None:
        """Hand a checked file to the blobs."""
        ...


GAUGE = ".gauge"
"""Ends the name of the small file beside the upload's."""
_BYTES = 8


class Gauge:
    """A number that survives the process. A power cut may put it ahead of the bytes that it counts:
    the upload's digest tells.
    """

    def __init__(self, upload: Path) -> None:
        """Begin at 0."""
        self._path = upload.with_name(upload.name + GAUGE)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)

    def write(self, committed_bytes: int) -> None:
        """Count up to here; the bytes are written already."""
        os.pwrite(self._descriptor, committed_bytes.to_bytes(_BYTES, "big"), 0)

    def remove(self) -> None:
        """From now on the whole file counts."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def cut_to_gauge(gauge: Path) -> None:
    """After a kill: cut the upload beside a gauge to what counts, and remove the gauge."""
    counted = gauge.read_bytes()
    committed_bytes = int.from_bytes(counted, "big") if len(counted) == _BYTES else 0
    upload = gauge.with_name(gauge.name.removesuffix(GAUGE))
    with suppress(FileNotFoundError):
        os.truncate(upload, min(committed_bytes, upload.stat().st_size))
    gauge.unlink()


WRITEBACK_BYTES = 2 << 20
"""Stored bytes go to the disk in stretches of this size while more arrive."""

Observer = Callable[[bytes | memoryview], None]
"""Sees every byte of an upload once and in order, those of earlier attempts first."""


class WholeUpload:
    """One attempt to go on with an upload. Its methods block; call them one after the other."""

    def __init__(
        self, keeper: Keeper, path: Path, blob: BlobRef, *, gauge: Gauge | None = None
    ) -> None:
        """Open the file; with a gauge it holds another blob's bytes, which this one's replace."""
        self._gauge = gauge
        self._keeper = keeper
        self.path = path
        self.blob = blob
        self._running = RunningDigest()
        self._observe: Observer | None = None
        self._pushed_bytes = 0
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def committed_offset(self) -> Bytes:
        """How many bytes are stored."""
        return self._running.size_bytes

    @property
    def is_open(self) -> bool:
        """Whether this attempt may still append."""
        return self._descriptor >= 0

    def rebuild(self, observe: Observer | None) -> None:
        """Read what earlier attempts stored; what is beyond the declared size is cut off."""
        self._observe = observe
        with self._lock:
            self._check_open()
            if self._gauge is not None:
                return
            os.ftruncate(self._descriptor, min(_size(self._descriptor), self.blob.size_bytes))
        while piece := self._stored_piece():
            self._take(piece)

    def _stored_piece(self) -> bytes:
        with self._lock:
            self._check_open()
            return os.pread(self._descriptor, FILE_STEP_BYTES, self.committed_offset)

    def append(self, offset: int, piece: bytes | memoryview) -> Bytes:
        """Store the next piece. Returns the committed offset behind it.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, there is a gap, an overlap, or a newer attempt took
                over; UPDATE_TOO_LARGE, it passes the declared size; DISK_FULL. Nothing of it is
            stored.
        """
        with self._lock:
            self._check_open()
            if offset != self.committed_offset:
                raise HyperGPUError(
                    Reason.OFFSET_MISMATCH, f"{offset} came, {self.committed_offset} is next"
                )
            if offset + len(piece) > self.blob.size_bytes:
                raise HyperGPUError(
                    Reason.UPDATE_TOO_LARGE,
                    f"{offset + len(piece)} bytes came, {self.blob.size_bytes} were declared",
                )
            with reject_when_full("the upload stopped"):
                write_whole(self._descriptor, piece, offset)
            self._take(piece)
            if self._gauge is not None:
                self._gauge.write(self.committed_offset)
            self._push_out()
            return self.committed_offset

    def finish(self, *, keep_s: int = KEEP_S) -> BlobRef:
        """Check the whole and make it a durable blob.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, bytes are missing; DIGEST_MISMATCH, the bytes are not
                the declared ones and were thrown away; DISK_FULL, the upload stays as it is.
        """
        with self._lock:
            self._check_open()
            if self.committed_offset < self.blob.size_bytes:
                raise HyperGPUError(
                    Reason.OFFSET_MISMATCH,
                    f"{self.committed_offset} of {self.blob.size_bytes} bytes came",
                )
            self._close()
        if self._running.digest() != self.blob.digest:
            self._keeper.discard(self)
            raise HyperGPUError(
                Reason.DIGEST_MISMATCH, "the bytes are not those that were declared"
            )
        self._keeper.release(self, keep_s)
        return self.blob

    def close(self) -> None:
        """End the attempt; what is stored stays for the next one. Safe to call twice."""
        self.cut_off()
        self._keeper.shrink(self, self.committed_offset)

    def cut_off(self) -> None:
        """End the attempt for another one that goes on at once."""
        with self._lock:
            self._close()

    def discard(self) -> None:
        """End the attempt and throw away what is stored: the bytes proved wrong."""
        self.close()
        self._keeper.discard(self)

    def _take(self, piece: bytes | memoryview) -> None:
        self._running.update(piece)
        if self._observe is not None:
            self._observe(piece)

    def _push_out(self) -> None:
        committed = self.committed_offset
        if committed - self._pushed_bytes >= WRITEBACK_BYTES:
            begin_writeback(self._descriptor, self._pushed_bytes, committed)
            self._pushed_bytes = committed

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise HyperGPUError(Reason.OFFSET_MISMATCH, "a newer upload took this one's place")

    def _close(self) -> None:
        if self._descriptor < 0:
            return
        if self._gauge is not None:
            os.ftruncate(self._descriptor, self.committed_offset)
            self._gauge.remove()
        os.close(self._descriptor)
        self._descriptor = -1


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size
