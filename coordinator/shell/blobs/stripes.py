"""An upload that several streams fill at once, each a stripe of one file.

Behind the last byte of the upload stands what is committed of each stripe, 8 bytes big-endian
each, so that the bytes and what counts of them share one name and survive the process together. A
file without them is whole. As with any upload the whole digest has the last word: a power cut may
put these counts ahead of the bytes.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from coordinator.shell.blobs.files import write_over
from coordinator.shell.blobs.keeper import Keeper
from coordinator.shell.blobs.space import KEEP_S, reject_when_full
from coordinator.shell.blobs.upload import Observer
from hypergpu.digest import FILE_STEP_BYTES, RunningDigest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes
from hypergpu.wire.bulk import Stripe

_COUNT_BYTES = 8


def striped_bytes(blob: BlobRef, count: int) -> int:
    """How large the file of an upload of ``count`` stripes is."""
    return blob.size_bytes + count * _COUNT_BYTES


def committed_of(path: Path, blob: BlobRef, stripe: Stripe) -> Bytes:
    """How far a stripe of a file that nobody has open has come."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Bytes(stripe.start(blob.size_bytes))
    try:
        return _counts(descriptor, blob, stripe.count)[stripe.index]
    finally:
        os.close(descriptor)


def _counts(descriptor: int, blob: BlobRef, count: int) -> list[Bytes]:
    stripes = [Stripe(index, count) for index in range(count)]
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes == blob.size_bytes:
        return [Bytes(stripe.end(blob.size_bytes)) for stripe in stripes]
    raw = b""
    if size_bytes == striped_bytes(blob, count):
        raw = os.pread(descriptor, count * _COUNT_BYTES, blob.size_bytes)
    found = [
        int.from_bytes(raw[at : at + _COUNT_BYTES], "big")
        for at in range(0, count * _COUNT_BYTES, _COUNT_BYTES)
    ]
    return [
        Bytes(max(stripe.start(blob.size_bytes), min(stripe.end(blob.size_bytes), each)))
        for stripe, each in zip(stripes, found, strict=True)
    ]


class StripedFile:
    """The file behind the stripes of one upload, open as long as one of them is."""

    def __init__(self, keeper: Keeper, path: Path, blob: BlobRef, count: int) -> None:
        """Go on with what the file holds, or begin it."""
        self.path = path
        self.blob = blob
        self.count = count
        self.running = RunningDigest()
        self._keeper = keeper
        self._lock = threading.Lock()
        self._attempts: dict[int, StripeUpload] = {}
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._committed = _counts(self._descriptor, blob, count)
        if os.fstat(self._descriptor).st_size != blob.size_bytes:
            os.ftruncate(self._descriptor, striped_bytes(blob, count))

    @property
    def is_open(self) -> bool:
        """Whether an attempt may still append."""
        return self._descriptor >= 0

    def committed_bytes(self, index: int) -> Bytes:
        """How far a stripe has come, counted within the whole upload."""
        return self._committed[index]

    def begin(self, stripe: Stripe, observe: Observer | None) -> "StripeUpload | None":
        """A new attempt at a stripe, which cuts an older one off; None when the file is closed."""
        with self._lock:
            if not self.is_open:
                return None
            attempt = StripeUpload(self, stripe, observe)
            self._attempts[stripe.index] = attempt
            return attempt

    def is_current(self, attempt: "StripeUpload") -> bool:
        """Whether no newer attempt at the stripe took this one's place."""
        return self.is_open and self._attempts.get(attempt.stripe.index) is attempt

    def append(self, attempt: "StripeUpload", offset: int, piece: bytes | memoryview) -> Bytes:
        """Store the next piece of a stripe; see `WholeUpload.append`."""
        index, end = attempt.stripe.index, attempt.stripe.end(self.blob.size_bytes)
        with self._lock:
            self._check(attempt)
            if offset != self._committed[index]:
                detail = f"{offset} came, {self._committed[index]} is next"
                raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)
            if offset + len(piece) > end:
                detail = f"byte {offset + len(piece)} came, the stripe ends at {end}"
                raise HyperGPUError(Reason.UPDATE_TOO_LARGE, detail)
            with reject_when_full("the upload stopped"):
                write_over(self._descriptor, piece, offset)
                count = (offset + len(piece)).to_bytes(_COUNT_BYTES, "big")
                write_over(self._descriptor, count, self.blob.size_bytes + index * _COUNT_BYTES)
            self._committed[index] = Bytes(offset + len(piece))
            return self._committed[index]

    def gather(self, attempt: "StripeUpload") -> bool:
        """Read the whole, once every stripe is there; see `StripeUpload.gather`."""
        with self._lock:
            if not self.is_open and self._attempts.get(attempt.stripe.index) is attempt:
                return False
            self._check(attempt)
            if not self._is_whole():
                return False
            descriptor, self._descriptor = self._descriptor, -1
        try:
            for piece in _pieces(descriptor, self.blob.size_bytes):
                self.running.update(piece)
                if attempt.observe is not None:
                    attempt.observe(piece)
            os.ftruncate(descriptor, self.blob.size_bytes)
        finally:
            os.close(descriptor)
        return True

    def finish(self, keep_s: int) -> None:
        """Make what was gathered a durable blob."""
        if self.running.digest() != self.blob.digest:
            self.discard()
            raise HyperGPUError(
                Reason.DIGEST_MISMATCH, "the bytes are not those that were declared"
            )
        self._keeper.release(self, keep_s)

    def leave(self, attempt: "StripeUpload") -> None:
        """End an attempt; what is stored stays."""
        with self._lock:
            if self.is_current(attempt):
                del self._attempts[attempt.stripe.index]
                if not self._attempts:
                    self._close()

    def cut_off(self) -> None:
        """End every attempt."""
        with self._lock:
            self._attempts.clear()
            self._close()

    def discard(self) -> None:
        """End every attempt and throw away what is stored."""
        self.cut_off()
        self._keeper.discard(self)

    def _is_whole(self) -> bool:
        ends = (Stripe(index, self.count).end(self.blob.size_bytes) for index in range(self.count))
        return all(held == end for held, end in zip(self._committed, ends, strict=True))

    def _check(self, attempt: "StripeUpload") -> None:
        if not self.is_current(attempt):
            raise HyperGPUError(Reason.OFFSET_MISMATCH, "a newer upload took this one's place")

    def _close(self) -> None:
        if self.is_open:
            os.close(self._descriptor)
            self._descriptor = -1


class StripeUpload:
    """One attempt to go on with a stripe, like a `WholeUpload`. Offsets count within the whole."""

    def __init__(self, file: StripedFile, stripe: Stripe, observe: Observer | None) -> None:
        self.stripe = stripe
        self.observe = observe
        self._file = file

    @property
    def path(self) -> Path:
        """The file of all the stripes."""
        return self._file.path

    @property
    def committed_offset(self) -> Bytes:
        """Up to where the stripe is stored."""
        return self._file.committed_bytes(self.stripe.index)

    @property
    def is_open(self) -> bool:
        """Whether this attempt may still append."""
        return self._file.is_current(self)

    def append(self, offset: int, piece: bytes | memoryview) -> Bytes:
        """Store the next piece; see `WholeUpload.append`."""
        return self._file.append(self, offset, piece)

    def gather(self) -> bool:
        """Show the whole to the observer, once every stripe is there.

        Returns:
            False when stripes are missing, or when another stripe's attempt has it in hand: of all
            the attempts one is told to `finish`.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, a newer attempt took over.
        """
        return self._file.gather(self)

    def finish(self, *, keep_s: int = KEEP_S) -> BlobRef:
        """Make what was gathered a durable blob. Raises what `WholeUpload.finish` raises."""
        self._file.finish(keep_s)
        return self._file.blob

    def close(self) -> None:
        """End the attempt; what is stored stays for the next one. Safe to call twice."""
        self._file.leave(self)

    def discard(self) -> None:
        """End every stripe's attempt and throw away what is stored: the bytes proved wrong."""
        self._file.discard()


def _pieces(descriptor: int, size_bytes: int) -> Iterator[bytes]:
    for at in range(0, size_bytes, FILE_STEP_BYTES):
        yield os.pread(descriptor, min(FILE_STEP_BYTES, size_bytes - at), at)
