"""A blob's file while its ranges come in any order, fetched or sent here; they survive a kill."""

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hypergpu.digests import FILE_STEP_BYTES, RunningDigest
from hypergpu.ids import Digest
from hypergpu.units import Bytes

_RECORD = struct.Struct(">QQ")
_RECORDS_BYTES_MAX = 4 << 20
"""Records that are read; an upload of a quarter of a terabyte has so many."""
_Content = bytes | bytearray | memoryview


class Span(NamedTuple):
    """Bytes from ``start`` to before ``end``."""

    start: int
    end: int


def make_part(path: Path, size_bytes: Bytes) -> None:
    """Make the file, unless it is there. Of the disk it takes what is written.

    A file of just this size holds nothing of the blob yet.

    Raises:
        OSError: The file cannot be written, or not be so large.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.fstat(descriptor).st_size < _records_start(size_bytes):
            os.ftruncate(descriptor, _records_start(size_bytes))
    finally:
        os.close(descriptor)


def missing_spans(path: Path, size_bytes: Bytes) -> tuple[Span, ...]:
    """The ranges of a part file that were not written, in order."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return tuple(_gaps(_recorded_spans(descriptor, size_bytes), size_bytes))
    finally:
        os.close(descriptor)


class PartFile:
    """A file of the blob's size, and behind it a record of each range that was written.

    Nothing is synced: what a power cut damages shows in the digest. Threads and processes may
    share the file.
    """

    def __init__(self, path: Path, size_bytes: Bytes) -> None:
        """Open a file that `make_part` made.

        Raises:
            OSError: It is not there, or cannot be written.
        """
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._is_whole = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The kernel appends a record whole, whoever else appends.
            self._records = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file; -1 once it is closed."""
        return self._descriptor

    @property
    def is_deleted(self) -> bool:
        """Whether the open file has no name any more: nobody will read it."""
        return os.fstat(self._descriptor).st_nlink == 0

    def missing(self) -> list[Span]:
        """The ranges that are not recorded, in order."""
        recorded_spans = _recorded_spans(self._descriptor, self.size_bytes)
        return list(_gaps(recorded_spans, self.size_bytes))

    def write(self, start: int, *pieces: _Content) -> None:
        """Write and record pieces in a row. Does nothing once the file is closed. Blocks."""
        with self._lock:
            if self._descriptor < 0 or self._is_whole:
                return
            at = start
            for piece in pieces:
                self.write_unrecorded(at, piece)
                self._note(at, piece)
                at += len(piece)
            if at > start:
                self.record(Span(start, at))

    def write_unrecorded(self, start: int, content: _Content) -> None:
        """Write a range that does not count before it is recorded. Blocks."""
        view = memoryview(content)
        while view:
            written_bytes = os.pwrite(self._descriptor, view, start)
            view, start = view[written_bytes:], start + written_bytes

    def record(self, span: Span) -> None:
        """Let a range count that is written."""
        os.write(self._records, _RECORD.pack(*span))

    def truncate(self) -> None:
        """Drop the records: the file is the blob's alone, and takes no more writes."""
        self._is_whole = True
        os.ftruncate(self._descriptor, self.size_bytes)

    def close(self) -> None:
        """Close the file. A write that is under way ends first. Safe to call twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                os.close(self._records)
                self._descriptor = -1

    def _note(self, start: int, content: _Content) -> None:
        """Hear of each range as it is written."""


class DigestingPartFile(PartFile):
    """A part file of one process, whose digest is taken while its bytes come in order."""

    def __init__(self, path: Path, size_bytes: Bytes) -> None:
        """Make the file if it is not there, with room on the disk for the whole blob.

        Raises:
            OSError: The disk is full, or the file cannot be written.
        """
        make_part(path, size_bytes)
        super().__init__(path, size_bytes)
        self._running = RunningDigest()
        # Not every system can promise room.
        if size_bytes and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._descriptor, 0, size_bytes)
            except BaseException:
                self.close()
                raise

    def finish(self) -> Digest:
        """The digest of the file, which is now the blob's alone. Blocks."""
        with self._lock:
            if self._descriptor < 0:
                raise ValueError("the file is closed")
            while left_bytes := self.size_bytes - self._running.size_bytes:
                at = self._running.size_bytes
                piece = os.pread(self._descriptor, min(FILE_STEP_BYTES, left_bytes), at)
                self._running.update(piece)
            self.truncate()
            return self._running.digest()

    def _note(self, start: int, content: _Content) -> None:
        if start == self._running.size_bytes:
            self._running.update(content)


def _records_start(size_bytes: int) -> int:
    """Where records begin: none lies on two blocks of the disk, of which one may be full."""
    return -(-size_bytes // _RECORD.size) * _RECORD.size


def _recorded_spans(descriptor: int, size_bytes: int) -> list[Span]:
    """The recorded ranges; what a full disk cut off is none."""
    start = _records_start(size_bytes)
    left_bytes = min(os.fstat(descriptor).st_size - start, _RECORDS_BYTES_MAX)
    if left_bytes < _RECORD.size:
        return []
    raw = os.pread(descriptor, left_bytes - left_bytes % _RECORD.size, start)
    spans = (Span(*each) for each in _RECORD.iter_unpack(raw))
    return [span for span in spans if span.start < span.end <= size_bytes]


def _gaps(written: list[Span], size_bytes: int) -> Iterator[Span]:
    at = 0
    for start, end in sorted(written):
        if start > at:
            yield Span(at, start)
        at = max(at, end)
    if at < size_bytes:
        yield Span(at, size_bytes)
