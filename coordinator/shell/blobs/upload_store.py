"""Uploads before they are believed: files that grow at their committed offset, or in stripes that
several streams fill, and become blobs. The counts of stripes stand behind the upload's last byte.

An upload that several streams fill at once, each a stripe of one file.

Behind the last byte of the upload stands what is committed of each stripe, 8 bytes big-endian
each, so that the bytes and what counts of them share one name and survive the process together. A
file without them is whole. As with any upload the whole digest has the last word: a power cut may
put these counts ahead of the bytes.
"""

import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from coordinator.shell.blobs.store import SPARE_BYTES_MIN, BlobStore
from coordinator.shell.blobs.writing import (
    GAUGE,
    KEEP_S,
    Attempt,
    Gauge,
    Keeper,
    Observer,
    Space,
    WholeUpload,
    cut_to_gauge,
    reject_when_full,
    write_over,
)
from hypergpu.crypto import FILE_STEP_BYTES, RunningDigest, digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements import BlobRef
from hypergpu.streams import Stripe
from hypergpu.units import Bytes

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


EXPIRY_S = 24 * 3600
_FINISHED = ".finished"
_OF_OWNER = "-"
"""Between the owner and the upload in a file's name."""


class UploadStore:
    """The uploads under one folder. Their declared sizes count against the space."""

    def __init__(self, folder: Path, blobs: BlobStore, space: Space) -> None:
        self._folder = folder / "quarantine"
        self._blobs = blobs
        self._space = space
        self._lock = threading.Lock()
        self._uploads: dict[Path, WholeUpload | StripedFile] = {}
        self._reserved: dict[Path, int] = {}
        self._owned: dict[str, Path] = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*" + GAUGE):
            cut_to_gauge(path)
        for path in self._folder.glob("*" + _FINISHED):
            self._take_back(path)
        for path in self._folder.iterdir():
            if path not in self._reserved:
                self._count(path)

    def open(
        self, key: str, blob: BlobRef, observe: Observer | None = None, *, owner: str = ""
    ) -> WholeUpload:
        """Begin an upload or go on with it. An older attempt at the same key is cut off.

        Args:
            key: What makes the upload one: the same key later goes on where this one ends.
            blob: What was declared.
            observe: Sees every byte once, what is stored already before this returns. What it
                raises passes through, the bytes it saw being stored: discard them.
            owner: Has one upload at a time: any other one of its is thrown away.

        Raises:
            HyperGPUError: DISK_FULL, the declared size does not fit.
        """
        path = self._path(key, owner)
        with self._lock:
            self._drop_other(path)
            if older := self._uploads.pop(path, None):
                older.cut_off()
            self._reserve(path, blob.size_bytes)
            with reject_when_full("the upload cannot begin"):
                upload = WholeUpload(self, path, blob, gauge=self._written_over(path, blob))
            self._uploads[path] = upload
        upload.rebuild(observe)
        return upload

    def open_stripe(
        self,
        key: str,
        blob: BlobRef,
        stripe: Stripe,
        observe: Observer | None = None,
        *,
        owner: str = "",
    ) -> StripeUpload:
        """Begin or go on with a stripe; see `open`. An older attempt at this stripe is cut off.

        The whole declared size counts against the space as long as there is any stripe. Stripes of
        another count are another upload.
        """
        path = self._path(_striped_key(key, stripe), owner)
        with self._lock:
            self._drop_other(path)
            file = self._uploads.get(path)
            begun = file.begin(stripe, observe) if isinstance(file, StripedFile) else None
            while begun is None:
                self._reserve(path, striped_bytes(blob, stripe.count))
                with reject_when_full("the upload cannot begin"):
                    file = StripedFile(self, path, blob, stripe.count)
                self._uploads[path] = file
                begun = file.begin(stripe, observe)
        return begun

    def committed_stripe(
        self, key: str, blob: BlobRef, stripe: Stripe, *, owner: str = ""
    ) -> Bytes:
        """Up to where a stripe is stored, counted within the whole; its start if it is unknown."""
        path = self._path(_striped_key(key, stripe), owner)
        with self._lock:
            file = self._uploads.get(path)
            if isinstance(file, StripedFile) and file.is_open:
                return file.committed_bytes(stripe.index)
        return committed_of(path, blob, stripe)

    def committed_offset(self, key: str, *, owner: str = "") -> Bytes:
        """How much of an upload is stored; 0 for an unknown one."""
        path = self._path(key, owner)
        with self._lock:
            upload = self._uploads.get(path)
            if isinstance(upload, WholeUpload) and upload.is_open:
                return upload.committed_offset
        try:
            return Bytes(path.stat().st_size)
        except FileNotFoundError:
            return Bytes(0)

    def expire(self, older_than_s: int = EXPIRY_S) -> int:
        """Throw away uploads that are not open and have not grown for that long; says how many."""
        oldest_s = time.time() - older_than_s
        with self._lock:
            abandoned = [path for path in self._reserved if self._is_abandoned(path, oldest_s)]
            for path in abandoned:
                self._drop(path)
        return len(abandoned)

    def owned_uploads(self) -> frozenset[Path]:
        """The uploads that have an owner."""
        with self._lock:
            return frozenset(self._owned.values())

    def forget(self, uploads: Collection[Path], *, keeps: Collection[str]) -> int:
        """Throw away those of ``uploads`` whose owner is not in ``keeps``, open or not.

        Returns:
            How many.
        """
        kept = {_digest(owner) for owner in keeps}
        with self._lock:
            void = [path for path in uploads if path in self._reserved and _owner(path) not in kept]
            for path in void:
                self._drop(path)
        return len(void)

    def discard(self, attempt: Attempt) -> None:
        """Throw an attempt's file away, unless a newer attempt has taken it over."""
        with self._lock:
            if self._uploads.get(attempt.path) is attempt:
                self._drop(attempt.path)

    def shrink(self, attempt: Attempt, stored_bytes: Bytes) -> None:
        """Reserve for an attempt that ended no more than what it stored."""
        with self._lock:
            if self._uploads.get(attempt.path) is attempt:
                self._reserve(attempt.path, stored_bytes)

    def release(self, attempt: Attempt, keep_s: int) -> None:
        """Hand a checked file to the blobs."""
        finished = attempt.path.with_name(attempt.path.name + _FINISHED)
        with self._lock:
            if self._uploads.get(attempt.path) is not attempt:
                raise HyperGPUError(Reason.OFFSET_MISMATCH, "a newer upload took this one's place")
            # Under a name of its own nobody can write to it, while others go on during the sync.
            attempt.path.rename(finished)
            self._let_go(attempt.path)
        try:
            self._blobs.adopt(finished, attempt.blob, keep_s=keep_s)
        except BaseException:
            self._take_back(finished)
            raise

    def _take_back(self, finished: Path) -> None:
        path = finished.with_name(finished.name.removesuffix(_FINISHED))
        with self._lock:
            if path in self._reserved:
                finished.unlink()
                return
            finished.rename(path)
            self._count(path)

    def _written_over(self, path: Path, blob: BlobRef) -> Gauge | None:
        """Begin a new upload on the file of an older blob, if there is one of its size."""
        if path.exists() or blob.size_bytes < SPARE_BYTES_MIN:
            return None
        # Before the file has its name: without it the older blob's bytes would count.
        gauge = Gauge(path)
        if self._blobs.reuse(path, blob.size_bytes):
            return gauge
        gauge.remove()
        return None

    def _path(self, key: str, owner: str) -> Path:
        name = _digest(key)
        return self._folder / (f"{_digest(owner)}{_OF_OWNER}{name}" if owner else name)

    def _count(self, path: Path) -> None:
        """Take account of a file that is there already."""
        self._reserved[path] = path.stat().st_size
        self._space.count(self._reserved[path])
        if owner := _owner(path):
            self._owned[owner] = path

    def _reserve(self, path: Path, size_bytes: int) -> None:
        held_bytes = self._reserved.get(path, 0)
        if size_bytes > held_bytes:
            self._space.take(size_bytes - held_bytes)
        else:
            self._space.give(held_bytes - size_bytes)
        self._reserved[path] = size_bytes
        if owner := _owner(path):
            self._owned[owner] = path

    def _is_abandoned(self, path: Path, oldest_s: float) -> bool:
        upload = self._uploads.get(path)
        if upload is not None and upload.is_open:
            return False
        return not path.exists() or path.stat().st_mtime <= oldest_s

    def _drop_other(self, path: Path) -> None:
        """Throw away any other upload of the owner of this one."""
        if (other := self._owned.get(_owner(path), path)) != path:
            self._drop(other)

    def _drop(self, path: Path) -> None:
        if upload := self._uploads.get(path):
            upload.cut_off()
        self._let_go(path)
        path.unlink(missing_ok=True)

    def _let_go(self, path: Path) -> None:
        self._uploads.pop(path, None)
        self._space.give(self._reserved.pop(path))
        if self._owned.get(_owner(path)) == path:
            del self._owned[_owner(path)]


def _striped_key(key: str, stripe: Stripe) -> str:
    return f"{key}/{stripe.count}"


def _digest(text: str) -> str:
    return digest_of(text.encode())


def _owner(path: Path) -> str:
    """The digest of the upload's owner; empty when it has none."""
    return path.name.rpartition(_OF_OWNER)[0]
