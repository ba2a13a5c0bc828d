"""Uploads before they are believed. Bulk processes write their ranges; once all are there an upload
is sealed, so that nobody can open it, checked, and becomes a blob.
"""

import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from coordinator.shell.store.blobs.spares import SPARE_BYTES_MIN
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.writing import KEEP_S, Space, reject_when_full
from hypergpu.blobs import BlobRef
from hypergpu.digests import FILE_STEP_BYTES, RunningDigest, digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import PartFile, Span, make_part, missing_spans
from hypergpu.units import Bytes

EXPIRY_S = 24 * 3600
IDLE_S = 60
_BLOCK_BYTES = 512
"""Unit in which systems tell what a file takes."""
QUARANTINE = "quarantine"
"""Folder of the uploads in a coordinator's folder."""
_SEALED = ".sealed"
_OF_OWNER = "-"
"""Between the owner and the upload in a file's name."""


def upload_name(key: str, *, owner: str = "") -> str:
    """Name of an upload.

    Args:
        key: What makes it one: the same key later goes on where this one ends.
        owner: Whose it is; empty: nobody's.
    """
    return f"{_digest(owner)}{_OF_OWNER}{_digest(key)}" if owner else _digest(key)


class OpenUpload(NamedTuple):
    """An upload that may be written to."""

    name: str
    """Name of its file in the quarantine."""
    size_bytes: Bytes
    missing: tuple[Span, ...]
    """What has not come yet, in order."""
    is_new: bool
    """Whether nobody knew of it: nothing of it was sent."""


class UploadStore:
    """The uploads under one folder. Their declared sizes count against the space; those without an
    owner are users' files, which leave some of it to others.
    """

    def __init__(self, folder: Path, blobs: BlobStore, space: Space) -> None:
        self._folder = folder / QUARANTINE
        self._blobs = blobs
        self._space = space
        self._lock = threading.Lock()
        self._reserved: dict[Path, int] = {}
        self._owned: dict[str, Path] = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        for sealed_path in self._folder.glob("*" + _SEALED):
            _unseal(sealed_path)
        for path in self._folder.iterdir():
            self._count(path)

    def open(self, name: str, blob: BlobRef) -> OpenUpload:
        """Begin an upload or go on with it.

        Args:
            name: From `upload_name`. Its owner has one upload at a time: any other one of its is
                thrown away.
            blob: What was declared.

        Raises:
            HyperGPUError: DISK_FULL, the declared size does not fit.
        """
        path = self._folder / name
        with self._lock:
            if (other := self._owned.get(_owner(path), path)) != path:
                self._drop(other)
            is_new = path not in self._reserved
            self._reserve(path, blob.size_bytes)
            try:
                with reject_when_full("the upload cannot begin"):
                    self._make(path, blob)
                    missing_ranges = missing_spans(path, blob.size_bytes)
                    return OpenUpload(path.name, blob.size_bytes, missing_ranges, is_new)
            except BaseException:
                if is_new:
                    self._drop(path)
                raise

    def reopen(self, name: str, blob: BlobRef) -> OpenUpload:
        """Go on with an upload, whose whole size is reserved again.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, nobody began it; DISK_FULL.
        """
        with self._lock:
            self._require_begun(self._folder / name)
        return self.open(name, blob)

    def seal(self, name: str, blob: BlobRef) -> Path:
        """Give a whole upload a name under which nobody opens it for writing.

        Whoever has it open already must be made to close it before it is checked.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, bytes are missing or nobody began it.
        """
        path = self._folder / name
        with self._lock:
            self._require_begun(path)
            left_bytes = sum(end - start for start, end in missing_spans(path, blob.size_bytes))
            if left_bytes:
                detail = f"{left_bytes} of {blob.size_bytes} bytes are missing: offer it again"
                raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)
            sealed_path = path.with_name(f"{name}.{blob.size_bytes}{_SEALED}")
            path.rename(sealed_path)
            self._reserved[sealed_path] = self._reserved.pop(path)
            if self._owned.get(_owner(path)) == path:
                del self._owned[_owner(path)]
            return sealed_path

    def finish(
        self,
        sealed: Path,
        blob: BlobRef,
        *,
        observe: Callable[[bytes], None] = lambda _: None,
        keep_s: int = KEEP_S,
    ) -> None:
        """Read a sealed upload and make it a durable blob. Blocks.

        Args:
            sealed: Its file, which nobody else has open for writing.
            blob: What was declared.
            observe: Sees every byte once and in order. What it raises passes through.
            keep_s: How long the fresh blob outlives every collection.

        Raises:
            HyperGPUError: DIGEST_MISMATCH, it is not what was declared; DISK_FULL, the upload can
                be sealed again later.
        """
        try:
            _check(sealed, blob, observe)
        except BaseException:
            self._forget_sealed(sealed)
            sealed.unlink(missing_ok=True)
            raise
        self._forget_sealed(sealed)
        try:
            self._blobs.adopt(sealed, blob, keep_s=keep_s)
        except BaseException:
            self._take_back(sealed)
            raise

    def expire(self, older_than_s: int = EXPIRY_S, idle_s: int = IDLE_S) -> int:
        """Throw away uploads that have not grown for that long; says how many.

        Of those that are idle only what they take of the disk stays reserved, until they go on.
        """
        now_s, dropped_count = time.time(), 0
        with self._lock:
            for path in [each for each in self._reserved if each.suffix != _SEALED]:
                if _is_idle(path, now_s - older_than_s):
                    self._drop(path)
                    dropped_count += 1
                elif _is_idle(path, now_s - idle_s):
                    self._reserve(path, min(self._reserved[path], _stored_bytes(path)))
        return dropped_count

    def discard(self, name: str) -> None:
        """Throw an upload away, if it is there and not sealed."""
        with self._lock:
            if (path := self._folder / name) in self._reserved:
                self._drop(path)

    def path(self, name: str) -> Path:
        """File of an upload that is open, there or not."""
        return self._folder / name

    def names(self) -> frozenset[str]:
        """All uploads that are here."""
        with self._lock:
            return frozenset(_name(path) for path in self._reserved)

    def owned_uploads(self) -> frozenset[Path]:
        """The uploads that have an owner."""
        with self._lock:
            return frozenset(self._owned.values())

    def forget(self, uploads: Collection[Path], *, keeps: Collection[str]) -> int:
        """Throw away those of ``uploads`` whose owner is not in ``keeps``.

        Returns:
            How many.
        """
        kept_names = {_digest(owner) for owner in keeps}
        with self._lock:
            void = [
                path
                for path in uploads
                if path in self._reserved and _owner(path) not in kept_names
            ]
            for path in void:
                self._drop(path)
        return len(void)

    def _require_begun(self, path: Path) -> None:
        if path not in self._reserved:
            raise HyperGPUError(Reason.OFFSET_MISMATCH, "nothing of it is here: offer it first")

    def _make(self, path: Path, blob: BlobRef) -> None:
        """Make the file. Over an older blob's of the same size, if there is one."""
        if not path.exists() and blob.size_bytes >= SPARE_BYTES_MIN:
            self._blobs.reuse(path, blob.size_bytes)
        make_part(path, blob.size_bytes)
        os.utime(path)

    def _forget_sealed(self, sealed: Path) -> None:
        with self._lock:
            self._space.give(self._reserved.pop(sealed))

    def _take_back(self, sealed: Path) -> None:
        """Let a sealed upload, which is whole, be opened again."""
        path = sealed.with_name(_name(sealed))
        with self._lock:
            if path in self._reserved or _owner(path) in self._owned or not sealed.exists():
                sealed.unlink(missing_ok=True)
                return
            self._count(_unseal(sealed))

    def _count(self, path: Path) -> None:
        """Take account of a file that is there already."""
        self._reserved[path] = path.stat().st_size
        self._space.count(self._reserved[path])
        if owner := _owner(path):
            self._owned[owner] = path

    def _reserve(self, path: Path, size_bytes: int) -> None:
        held_bytes = self._reserved.get(path, 0)
        if size_bytes > held_bytes:
            take = self._space.take if _owner(path) else self._space.take_data
            take(size_bytes - held_bytes)
        else:
            self._space.give(held_bytes - size_bytes)
        self._reserved[path] = size_bytes
        if owner := _owner(path):
            self._owned[owner] = path

    def _drop(self, path: Path) -> None:
        self._space.give(self._reserved.pop(path))
        if self._owned.get(_owner(path)) == path:
            del self._owned[_owner(path)]
        path.unlink(missing_ok=True)


def _check(sealed: Path, blob: BlobRef, observe: Callable[[bytes], None]) -> None:
    """Read a sealed upload whole; if it is what was declared, cut off all behind it."""
    running_digest = RunningDigest()
    with sealed.open("r+b", buffering=0) as file:
        while left_bytes := blob.size_bytes - running_digest.size_bytes:
            piece = file.read(min(FILE_STEP_BYTES, left_bytes))
            if not piece:
                raise HyperGPUError(Reason.DIGEST_MISMATCH, "its file was cut")
            running_digest.update(piece)
            observe(piece)
        if running_digest.digest() != blob.digest:
            detail = "the bytes are not those that were declared"
            raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
        file.truncate(blob.size_bytes)


def _name(path: Path) -> str:
    """Name of an upload, sealed or not."""
    return path.name.partition(".")[0]


def _unseal(sealed: Path) -> Path:
    """Give a sealed upload, which is whole, its name back."""
    size_bytes = int(sealed.name.split(".")[1])
    if sealed.stat().st_size == size_bytes:
        # It was checked already, and lost its records.
        make_part(sealed, Bytes(size_bytes))
        part = PartFile(sealed, Bytes(size_bytes))
        part.record(Span(0, size_bytes))
        part.close()
    path = sealed.with_name(_name(sealed))
    sealed.rename(path)
    return path


def _stored_bytes(path: Path) -> int:
    """What a file takes of the disk."""
    return path.stat().st_blocks * _BLOCK_BYTES


def _is_idle(path: Path, oldest_s: float) -> bool:
    return not path.exists() or path.stat().st_mtime <= oldest_s


def _digest(text: str) -> str:
    return digest_of(text.encode())


def _owner(path: Path) -> str:
    """The digest of the upload's owner; empty when it has none."""
    return path.name.rpartition(_OF_OWNER)[0]
