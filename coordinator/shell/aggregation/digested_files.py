"""Files that are digested while they are read or written, a span at a time, beside the arithmetic.

Memory is a fixed ring of buffers. Hashing and writing happen on a thread of the ring's own, in
order; NumPy, BLAKE3 and file calls all release the interpreter lock, so they overlap with the
arithmetic.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from coordinator.shell.aggregation.fold_request import FoldedFile
from hypergpu.digests import RunningDigest
from hypergpu.ids import Digest
from hypergpu.tensors.layout import Float32s, Octets

_CATCH_UP_BYTES = 1 << 20


class Buffer:
    """One buffer of a ring and the queued work that still needs it."""

    def __init__(self, thread: ThreadPoolExecutor | None, size_bytes: int) -> None:
        self._thread = thread
        self._octets = np.empty(size_bytes, np.uint8)
        self._pending: list[Future[None]] = []

    def octets(self, count: int) -> Octets:
        """The buffer's first bytes."""
        return self._octets[:count]

    def floats(self, count: int) -> Float32s:
        """The buffer's first bytes as float32 values."""
        return self._octets[: 4 * count].view(np.float32)

    def queue(self, work: Callable[[], None]) -> None:
        """Queue work that needs the buffer unchanged; without a thread, do it now."""
        if self._thread is None:
            work()
        else:
            self._pending.append(self._thread.submit(work))

    def wait(self) -> None:
        """Wait for the buffer's work; raises what it raised."""
        pending_work, self._pending = self._pending, []
        for work in pending_work:
            work.result()


class BufferRing:
    """Buffers taken in turn, and the thread that works on their content.

    A buffer stays untouched until as many more have been taken as the ring has.
    """

    def __init__(self, count: int, buffer_bytes: int, *, has_thread: bool = True) -> None:
        """Allocate the memory. Without a thread the caller's own one does the work."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fold") if has_thread else None
        self._buffers = [Buffer(self._thread, buffer_bytes) for _ in range(count)]
        self._next = 0

    def take(self) -> Buffer:
        """The buffer that was taken longest ago, once its work is done."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.wait()
        return buffer

    def drain(self) -> None:
        """Wait for all queued work; raises the first error of it."""
        for buffer in self._buffers:
            buffer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


class InputError(Exception):
    """A file could not be read as expected."""

    def __init__(self, file: "InputFile", reason: str) -> None:
        super().__init__(reason)
        self.file = file
        self.reason = reason


class InputFile:
    """A file of known size and digest. It is opened for each read: a fold may name thousands."""

    def __init__(self, path: Path, digest: Digest) -> None:
        self._path = path
        self._digest = digest
        self._running = RunningDigest()
        self._covered_bytes = 0
        self.is_digested = True
        """Whether what is read is digested; else somebody else does."""
        self.size_bytes = 0

    def check_size(self, *sizes: int) -> None:
        """Look at its size, in bytes; before any read.

        Raises:
            InputError: It cannot be read or has none of ``sizes``.
        """
        try:
            self.size_bytes = self._path.stat().st_size
        except OSError as error:
            raise InputError(self, f"it cannot be read: {error.strerror}") from error
        if self.size_bytes not in sizes:
            size_text = " or ".join(str(size) for size in sizes)
            raise InputError(self, f"it has {self.size_bytes} bytes on disk, not {size_text}")

    def read(self, buffer: Buffer, offset: int, count: int) -> Octets:
        """Read ``count`` bytes; what follows the part already digested is digested on the way."""
        octets = buffer.octets(count)
        self._fill(octets, offset)
        if self.is_digested and offset == self._covered_bytes:
            self._covered_bytes += count
            buffer.queue(lambda: self._running.update(octets.data))
        return octets

    def check_digest(self) -> None:
        """Digest what was not read in order, then compare. The ring must be drained.

        Raises:
            InputError: The digest is another.
        """
        scratch = np.empty(_CATCH_UP_BYTES, np.uint8)
        while self._covered_bytes < self.size_bytes:
            piece = scratch[: self.size_bytes - self._covered_bytes]
            self._fill(piece, self._covered_bytes)
            self._running.update(piece.data)
            self._covered_bytes += piece.size
        if self._running.digest() != self._digest:
            raise InputError(self, "its bytes on disk do not have its digest")

    def _fill(self, octets: Octets, offset: int) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(offset)
                filled_bytes = 0
                while filled_bytes < octets.size:
                    count = file.readinto(octets[filled_bytes:].data)
                    if not count:
                        raise InputError(self, "it became shorter while it was read")
                    filled_bytes += count
        except OSError as error:
            raise InputError(self, f"it cannot be read: {error.strerror}") from error


class OutputFile:
    """A new file under a name of its own. Its digest is taken as it is written."""

    def __init__(self, path: Path, on_failure: ExitStack) -> None:
        """Open it, also one that is to be written over from end to end.

        Unwinding ``on_failure``, once its ring is idle, deletes it.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._path = path
        self._running = RunningDigest()
        self._covered_bytes = 0
        self._size_bytes = 0
        on_failure.callback(self._discard)

    def write(self, buffer: Buffer, offset: int, octets: Octets) -> None:
        """Queue a write of a buffer's bytes at any offset. Every byte must come once."""
        is_next = offset == self._covered_bytes
        self._covered_bytes += octets.size if is_next else 0
        self._size_bytes = max(self._size_bytes, offset + octets.size)
        buffer.queue(lambda: self._store(octets, offset, self._running if is_next else None))

    def close(self) -> FoldedFile:
        """Close the file and name it; not synced. The ring must be drained."""
        while self._covered_bytes < self._size_bytes:
            piece = os.pread(self._descriptor, _CATCH_UP_BYTES, self._covered_bytes)
            self._running.update(piece)
            self._covered_bytes += len(piece)
        os.close(self._descriptor)
        self._descriptor = -1
        return FoldedFile(self._path, self._running.digest(), self._running.size_bytes)

    def _discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def _store(self, octets: Octets, offset: int, running: RunningDigest | None) -> None:
        stored_bytes = 0
        while stored_bytes < octets.size:
            stored_bytes += os.pwrite(
                self._descriptor, octets[stored_bytes:].data, offset + stored_bytes
            )
        if running is not None:
            running.update(octets.data)
