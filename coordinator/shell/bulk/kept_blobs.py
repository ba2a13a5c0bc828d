"""Blobs in a bucket that outlive this machine, so that another coordinator can go on with them.

A blob is in the bucket before anybody hears of it: accepted updates are copied there by the store
itself, from where their nodes wrote them. What comes back is believed by its digest alone.
"""

import threading
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from coordinator.shell.bulk.bucket import BucketError, S3Bucket
from hypergpu.crypto import digest_of_file, is_digest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.part_file import Span
from hypergpu.statements import BlobRef
from hypergpu.units import Bytes

FOLDER = "blobs/"


def copy_key(digest: Digest, number: int = 0) -> str:
    """Key of a blob's copy; a later one has a higher number."""
    return f"{FOLDER}{digest}.{number}"


def digest_in(key: str) -> Digest | None:
    """The blob that an object is a copy of; None: of none."""
    digest = key.removeprefix(FOLDER).partition(".")[0]
    return Digest(digest) if key.startswith(FOLDER) and is_digest(digest) else None


class KeptBlobs:
    """The part of a bucket with a coordinator's blobs. Calls block; threads may share it."""

    def __init__(self, bucket: S3Bucket) -> None:
        """Nothing is asked yet."""
        self.bucket = bucket
        self._lock = threading.Lock()
        self._keys: dict[Digest, list[str]] = {}
        self._uploads: dict[Digest, str] = {}

    def sizes(self) -> dict[Digest, Bytes]:
        """Every blob that is there.

        Raises:
            BucketError: The store did not answer.
            HyperGPUError: ARGUMENT_INVALID, keys, bucket or permissions are wrong.
        """
        sizes: dict[Digest, Bytes] = {}
        try:
            found = self.bucket.objects()
        except BucketError as refused:
            if refused.is_forbidden:
                detail = f"blobs: {refused.detail}"
                raise HyperGPUError(Reason.ARGUMENT_INVALID, detail) from refused
            raise
        for each in sorted(found, key=lambda each: each.since_s):
            if (digest := digest_in(each.key)) is not None:
                sizes[digest] = Bytes(each.size_bytes)
                with self._lock:
                    self._keys.setdefault(digest, []).append(each.key)
        return sizes

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
        key = copy_key(blob.digest)
        if upload:
            self.bucket.copy(upload, key)
            with suppress(BucketError):  # It is swept later.
                self.bucket.delete([upload])
        else:
            self.bucket.write(key, path)
        with self._lock:
            self._keys[blob.digest] = [key]

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
        path.unlink(missing_ok=True)
        return False

    def forget(self, digests: Collection[Digest]) -> list[str]:
        """Keys of blobs that nobody needs any more, to be deleted by the caller."""
        with self._lock:
            return [key for digest in digests for key in self._keys.pop(digest, ())]


def _append(file: BinaryIO, _at: int, piece: bytes) -> None:
    file.write(piece)
