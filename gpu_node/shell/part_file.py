"""A blob's file while it is fetched: its ranges come in any order and survive a kill."""

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hypergpu.crypto import RunningDigest
from hypergpu.ids import Digest
from hypergpu.units import Bytes

_RECORD = struct.Struct(">QQ")
_STEP_BYTES = 1 << 20


class Span(NamedTuple):
    """Bytes from ``start`` to before ``end``."""

    start: int
    end: int


class PartFile:
    """Room for the whole blob, and behind it a record of each range that was written.

    Nothing is synced: what a power cut damages shows in the digest. Threads may share it.
    """

    def __init__(self, path: Path, size_bytes: Bytes) -> None:
        """Open the file, or make it; a file of just this size holds nothing of the blob yet.

        Raises:
            OSError: The disk is full, or the file cannot be written.
        """
        self._lock = threading.Lock()
        self._size_bytes = size_bytes
        self._running = RunningDigest()
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._written = self._read_records()
            self._next_record = size_bytes + len(self._written) * _RECORD.size
            if size_bytes:
                os.posix_fallocate(self._descriptor, 0, size_bytes)
        except BaseException:
            self.close()
            raise

    def missing(self) -> list[Span]:
        """The ranges that are not written, in order."""
        return list(self._missing())

    def write(self, start: int, content: bytes | bytearray) -> None:
        """Write a range. Does nothing once the file is closed. Blocks."""
        with self._lock:
            if self._descriptor is None or not content:
                return
            end = start + len(content)
            _write_whole(self._descriptor, content, start)
            _write_whole(self._descriptor, _RECORD.pack(start, end), self._next_record)
            self._next_record += _RECORD.size
            self._written.append(Span(start, end))
            if start == self._running.size_bytes:
                self._running.update(content)

    def finish(self) -> Digest:
        """The digest of the file, which is now the blob's alone. Blocks."""
        with self._lock:
            if self._descriptor is None:
                raise ValueError("the file is closed")
            while left := self._size_bytes - self._running.size_bytes:
                at = self._running.size_bytes
                self._running.update(os.pread(self._descriptor, min(_STEP_BYTES, left), at))
            os.ftruncate(self._descriptor, self._size_bytes)
            return self._running.digest()

    def close(self) -> None:
        """Close the file. A write that is under way ends first."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _read_records(self) -> list[Span]:
        assert self._descriptor is not None  # noqa: S101 - just opened
        left = os.fstat(self._descriptor).st_size - self._size_bytes
        if left <= 0:
            # Shorter, it is of no program that writes such files.
            os.ftruncate(self._descriptor, self._size_bytes)
            return []
        raw = os.pread(self._descriptor, left - left % _RECORD.size, self._size_bytes)
        return [Span(*each) for each in _RECORD.iter_unpack(raw)]

    def _missing(self) -> Iterator[Span]:
        at = 0
        for start, end in sorted(self._written):
            if start > at:
                yield Span(at, start)
            at = max(at, end)
        if at < self._size_bytes:
            yield Span(at, self._size_bytes)


def _write_whole(descriptor: int, content: bytes | bytearray, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
