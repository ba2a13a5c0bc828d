"""Uploads before they are believed: files that grow at their committed offset and become blobs.

What is committed is simply what the file holds: it survives the process, and the running digest is
rebuilt from it. An upload that is written over an older blob's file has a gauge beside it, which
says how much of the file counts; it is cut to that when the attempt or the process ends. Whether
the bytes are right is decided once, at the end, by the whole digest.
"""

import threading
import time
from collections.abc import Collection
from pathlib import Path

from coordinator.shell.blobs.keeper import Attempt
from coordinator.shell.blobs.space import Space, reject_when_full
from coordinator.shell.blobs.spare_files import SPARE_BYTES_MIN
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.stripes import (
    StripedFile,
    StripeUpload,
    committed_of,
    striped_bytes,
)
from coordinator.shell.blobs.upload import Observer, WholeUpload
from coordinator.shell.blobs.written_count import GAUGE, Gauge, cut_to_gauge
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes
from hypergpu.wire.bulk import Stripe

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
