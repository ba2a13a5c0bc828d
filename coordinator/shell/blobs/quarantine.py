"""Uploads before they are believed: files that grow at their committed offset and become blobs.

What is committed is simply what the file holds: it survives the process, and the running digest is
rebuilt from it. An upload that is written over an older blob's file has a gauge beside it, which
says how much of the file counts; it is cut to that when the attempt or the process ends. Whether
the bytes are right is decided once, at the end, by the whole digest.
"""

import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from coordinator.core.job import BlobRef
from coordinator.shell.blobs.files import begin_writeback, write_whole
from coordinator.shell.blobs.gauge import GAUGE, Gauge, cut_to_gauge
from coordinator.shell.blobs.interface import KEEP_S, Blobs
from coordinator.shell.blobs.space import Space, disk_full_refused
from coordinator.shell.blobs.spares import SPARE_BYTES_MIN
from hypergpu.digest import FILE_STEP_BYTES, RunningDigest, digest_of
from hypergpu.refusal import Reason, RefusalError
from hypergpu.units import Bytes

EXPIRY_S = 24 * 3600
WRITEBACK_BYTES = 2 << 20
"""Stored bytes go to the disk in stretches of this size while more arrive."""
_FINISHED = ".finished"
_OF_OWNER = "-"
"""Between the owner and the upload in a file's name."""

Observer = Callable[[bytes | memoryview], None]
"""Sees every byte of an upload once and in order, those of earlier attempts first."""


class Upload:
    """One attempt to go on with an upload. Its methods block; call them one after the other."""

    def __init__(
        self, quarantine: "Quarantine", path: Path, blob: BlobRef, *, gauge: Gauge | None = None
    ) -> None:
        """Open the file; with a gauge it holds another blob's bytes, which this one's replace."""
        self._gauge = gauge
        self._quarantine = quarantine
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
            RefusalError: OFFSET_MISMATCH, there is a gap, an overlap, or a newer attempt took over;
                UPDATE_TOO_LARGE, it passes the declared size; DISK_FULL. Nothing of it is stored.
        """
        with self._lock:
            self._check_open()
            if offset != self.committed_offset:
                raise RefusalError(
                    Reason.OFFSET_MISMATCH, f"{offset} came, {self.committed_offset} is next"
                )
            if offset + len(piece) > self.blob.size_bytes:
                raise RefusalError(
                    Reason.UPDATE_TOO_LARGE,
                    f"{offset + len(piece)} bytes came, {self.blob.size_bytes} were declared",
                )
            with disk_full_refused("the upload stopped"):
                write_whole(self._descriptor, piece, offset)
            self._take(piece)
            if self._gauge is not None:
                self._gauge.write(self.committed_offset)
            self._push_out()
            return self.committed_offset

    def finish(self, *, keep_s: int = KEEP_S) -> BlobRef:
        """Check the whole and make it a durable blob.

        Raises:
            RefusalError: OFFSET_MISMATCH, bytes are missing; DIGEST_MISMATCH, the bytes are not the
                declared ones and were thrown away; DISK_FULL, the upload stays as it is.
        """
        with self._lock:
            self._check_open()
            if self.committed_offset < self.blob.size_bytes:
                raise RefusalError(
                    Reason.OFFSET_MISMATCH,
                    f"{self.committed_offset} of {self.blob.size_bytes} bytes came",
                )
            self._close()
        if self._running.digest() != self.blob.digest:
            self._quarantine.discard(self)
            raise RefusalError(Reason.DIGEST_MISMATCH, "the bytes are not those that were declared")
        self._quarantine.release(self, keep_s)
        return self.blob

    def close(self) -> None:
        """End the attempt; what is stored stays for the next one. Safe to call twice."""
        self.cut_off()
        self._quarantine.shrink(self)

    def cut_off(self) -> None:
        """End the attempt for another one that goes on at once."""
        with self._lock:
            self._close()

    def discard(self) -> None:
        """End the attempt and throw away what is stored: the bytes proved wrong."""
        self.close()
        self._quarantine.discard(self)

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
            raise RefusalError(Reason.OFFSET_MISMATCH, "a newer upload took this one's place")

    def _close(self) -> None:
        if self._descriptor < 0:
            return
        if self._gauge is not None:
            os.ftruncate(self._descriptor, self.committed_offset)
            self._gauge.remove()
        os.close(self._descriptor)
        self._descriptor = -1


class Quarantine:
    """The uploads under one folder. Their declared sizes count against the space."""

    def __init__(self, folder: Path, blobs: Blobs, space: Space) -> None:
        self._folder = folder / "quarantine"
        self._blobs = blobs
        self._space = space
        self._lock = threading.Lock()
        self._uploads: dict[Path, Upload] = {}
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
    ) -> Upload:
        """Begin an upload or go on with it. An older attempt at the same key is cut off.

        Args:
            key: What makes the upload one: the same key later goes on where this one ends.
            blob: What was declared.
            observe: Sees every byte once, what is stored already before this returns. What it
                raises passes through, the bytes it saw being stored: discard them.
            owner: Has one upload at a time: any other one of its is thrown away.

        Raises:
            RefusalError: DISK_FULL, the declared size does not fit.
        """
        path = self._path(key, owner)
        with self._lock:
            if (other := self._owned.get(_owner(path), path)) != path:
                self._drop(other)
            if older := self._uploads.pop(path, None):
                older.cut_off()
            self._reserve(path, blob.size_bytes)
            with disk_full_refused("the upload cannot begin"):
                upload = Upload(self, path, blob, gauge=self._written_over(path, blob))
            self._uploads[path] = upload
        upload.rebuild(observe)
        return upload

    def committed_offset(self, key: str, *, owner: str = "") -> Bytes:
        """How much of an upload is stored; 0 for an unknown one."""
        path = self._path(key, owner)
        with self._lock:
            upload = self._uploads.get(path)
            if upload is not None and upload.is_open:
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

    def owned(self) -> frozenset[Path]:
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

    def discard(self, upload: Upload) -> None:
        """Throw an attempt's file away, unless a newer attempt has taken it over."""
        with self._lock:
            if self._uploads.get(upload.path) is upload:
                self._drop(upload.path)

    def shrink(self, upload: Upload) -> None:
        """Reserve for an attempt that ended no more than what it stored."""
        with self._lock:
            if self._uploads.get(upload.path) is upload:
                self._reserve(upload.path, upload.committed_offset)

    def release(self, upload: Upload, keep_s: int) -> None:
        """Hand a checked file to the blobs."""
        finished = upload.path.with_name(upload.path.name + _FINISHED)
        with self._lock:
            if self._uploads.get(upload.path) is not upload:
                raise RefusalError(Reason.OFFSET_MISMATCH, "a newer upload took this one's place")
            # Under a name of its own nobody can write to it, while others go on during the sync.
            upload.path.rename(finished)
            self._let_go(upload.path)
        try:
            self._blobs.adopt(finished, upload.blob, keep_s=keep_s)
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


def _digest(text: str) -> str:
    return digest_of(text.encode())


def _owner(path: Path) -> str:
    """The digest of the upload's owner; empty when it has none."""
    return path.name.rpartition(_OF_OWNER)[0]


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size
