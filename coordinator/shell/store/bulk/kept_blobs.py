"""Blobs in a bucket that outlive this machine, so that another coordinator can go on with them.

A blob is in the bucket before anybody hears of it: accepted updates are copied there by the store
itself, from where their nodes wrote them. What comes back is believed by its digest alone.
"""

import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from coordinator.shell.store.blobs.store import BlobCopy
from coordinator.shell.store.bulk.bucket import BucketError, S3Bucket
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of_file, is_digest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.part_file import Span
from hypergpu.units import Bytes

FOLDER = "blobs/"


def copy_key(digest: Digest, number: int = 0) -> str:
    """Key of a blob's copy; a later one has a higher number."""
    return f"{FOLDER}{digest}.{number}"


def digest_in(key: str) -> Digest | None:
    """The blob that an object is a copy of; None: of none."""
    digest = key.removeprefix(FOLDER).partition(".")[0]
    return Digest(digest) if key.startswith(FOLDER) and is_digest(digest) else None


def number_in(key: str) -> int:
    """The number of a copy's key."""
    number = key.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


class KeptBlobs:
    """The part of a bucket with a coordinator's blobs. Calls block; threads may share it.

    No blob gets a key that is still being deleted: a blob that is needed again would go with it.
    A key is deleted by one caller at a time, and by nobody while it is of a blob that is needed.
    """

    def __init__(self, bucket: S3Bucket) -> None:
        """Nothing is asked yet."""
        self.bucket = bucket
        self._lock = threading.Lock()
        self._keys: dict[Digest, list[str]] = {}
        """Copies of each blob that is there; the newest is last."""
        self._writing: set[str] = set()
        self._damaged: dict[Digest, list[str]] = {}
        """Keys with something else than their blob, deleted with it: what a store says now it may
        not say tomorrow."""
        self._forgotten: list[str] = []
        self._deleting: dict[Digest, set[str]] = {}
        """Keys that may vanish, and that no blob gets until they have."""
        self._in_deletion: set[str] = set()
        """Those of them that somebody deletes right now."""
        self._uploads: dict[Digest, str] = {}

    def copies(self) -> dict[Digest, BlobCopy]:
        """Every blob that is there.

        Raises:
            BucketError: The store did not answer.
            HyperGPUError: ARGUMENT_INVALID, keys, bucket or permissions are wrong.
        """
        copies: dict[Digest, BlobCopy] = {}
        try:
            objects = self.bucket.objects()
        except BucketError as error:
            if error.is_forbidden:
                detail = f"blobs: {error.detail}"
                raise HyperGPUError(Reason.ARGUMENT_INVALID, detail) from error
            raise
        for each in sorted(objects, key=lambda each: each.since_s):
            if (digest := digest_in(each.key)) is not None:
                copies[digest] = BlobCopy(Bytes(each.size_bytes), each.since_s)
                with self._lock:
                    self._keys.setdefault(digest, []).append(each.key)
        return copies

    def find(self, digest: Digest) -> BlobCopy | None:
        """The newest copy of a blob; None: there is none.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        with self._lock:
            keys = self._keys.get(digest)
        size_bytes = self.bucket.size(keys[-1]) if keys else None
        return None if size_bytes is None else BlobCopy(Bytes(size_bytes), time.time())

    def key(self, digest: Digest) -> str:
        """Key of a blob's newest copy; where there is none, the one that it would get."""
        with self._lock:
            keys = self._keys.get(digest)
            return keys[-1] if keys else self._free_key(digest)

    def note_upload(self, digest: Digest, key: str) -> None:
        """Note an object that is said to be this blob, and that nobody else deletes."""
        with self._lock:
            self._uploads[digest] = key

    def keep(self, blob: BlobRef, path: Path) -> None:
        """Have a blob in the bucket. Returns once it is.

        Raises:
            BucketError: The store refused it, or did not answer.
        """
        with self._lock:
            upload = self._uploads.pop(blob.digest, "")
            if blob.digest in self._keys:
                return
            key = self._free_key(blob.digest)
            self._writing.add(key)
        try:
            self._write(key, path, upload)
            with self._lock:
                self._keys[blob.digest] = [key]
        finally:
            with self._lock:
                self._writing.discard(key)

    def fetch(self, blob: BlobRef, path: Path) -> bool:
        """Write a blob's bytes to a file. False: nothing in the bucket is that blob.

        Raises:
            BucketError: The store refused it, or did not answer.
            OSError: The file cannot be written.
        """
        with self._lock:
            keys = list(reversed(self._keys.get(blob.digest, ())))
        for key in keys:
            with path.open("wb") as file:
                self.bucket.read(key, Span(0, blob.size_bytes), partial(_append, file))
            if digest_of_file(path) == blob.digest:
                return True
            self._set_aside(blob.digest, key)
        path.unlink(missing_ok=True)
        return False

    def forget(self, digest: Digest) -> None:
        """Let go of a blob that nobody needs any more: its keys are the next `take_forgotten`'s."""
        with self._lock:
            keys = self._keys.pop(digest, []) + self._damaged.pop(digest, [])
            self._forgotten += self._begin(keys)

    def take_forgotten(self) -> list[str]:
        """Keys of blobs that were let go of since the last call, to be deleted by the caller."""
        with self._lock:
            keys, self._forgotten = self._forgotten, []
            return keys

    def begin_deletion(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that may be deleted: of no blob that is needed by now, and not being
        deleted by somebody else.
        """
        with self._lock:
            kept_keys = (*self._keys.values(), *self._damaged.values())
            needed_keys = self._writing.union(*kept_keys)
            return self._begin(key for key in keys if key not in needed_keys)

    def end_deletion(self, keys: Collection[str]) -> None:
        """Note that these keys are gone: blobs may get them again."""
        with self._lock:
            self._in_deletion.difference_update(keys)
            for key in keys:
                digest = digest_in(key)
                if digest is None or digest not in self._deleting:
                    continue
                self._deleting[digest].discard(key)
                if not self._deleting[digest]:
                    del self._deleting[digest]

    def abandon_deletion(self, keys: Collection[str]) -> None:
        """Note that these keys may not be gone: no blob gets them, and somebody else may try."""
        with self._lock:
            self._in_deletion.difference_update(keys)

    def _begin(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that nobody else deletes. Called with the lock."""
        free = [key for key in keys if key not in self._in_deletion]
        self._in_deletion.update(free)
        for key in free:
            if (digest := digest_in(key)) is not None:
                self._deleting.setdefault(digest, set()).add(key)
        return free

    def _set_aside(self, digest: Digest, key: str) -> None:
        """Take a key with something else for no copy: a sound blob that comes is copied again."""
        with self._lock:
            keys = self._keys.get(digest, [])
            if key not in keys:
                return
            keys.remove(key)
            if not keys:
                del self._keys[digest]
            self._damaged.setdefault(digest, []).append(key)

    def _free_key(self, digest: Digest) -> str:
        used_keys = (*self._deleting.get(digest, ()), *self._damaged.get(digest, ()))
        return copy_key(digest, max(map(number_in, used_keys), default=-1) + 1)

    def _write(self, key: str, path: Path, upload: str) -> None:
        if not upload:
            self.bucket.write(key, path)
            return
        self.bucket.copy(upload, key)
        with suppress(BucketError):  # It is swept later.
            self.bucket.delete([upload])


def _append(file: BinaryIO, _at: int, piece: bytes) -> None:
    file.write(piece)
