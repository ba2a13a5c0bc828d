"""One attempt to bring an upload further, appended to its file."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from coordinator.shell.blobs.files import begin_writeback, write_whole
from coordinator.shell.blobs.keeper import Keeper
from coordinator.shell.blobs.space import KEEP_S, reject_when_full
from coordinator.shell.blobs.written_count import Gauge
from hypergpu.digest import FILE_STEP_BYTES, RunningDigest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes

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
