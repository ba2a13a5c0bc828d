"""An object store as the plane of bulk bytes. Nodes write to it and read from it at addresses that
the coordinator signs; the coordinator fetches each upload once, and writes each blob once.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from coordinator.shell.blobs.store import BlobStore, open_locked
from coordinator.shell.blobs.upload_store import OpenUpload, UploadStore
from coordinator.shell.blobs.writing import reject_when_full
from coordinator.shell.bulk.bucket import S3Bucket
from coordinator.shell.bulk.messages import BytesServed, Certificates
from coordinator.shell.bulk.tickets import LIFE_MS
from hypergpu.crypto import is_digest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.part_file import PartFile, Span
from hypergpu.statements import BlobRef
from hypergpu.streams import write_durably
from hypergpu.units import Bytes
from hypergpu.v1 import tensor_pb2

log = structlog.get_logger()

ONE_PUT_BYTES_MAX = 16 << 20
"""Larger uploads go in parts, of which those that came need not come again."""
PART_BYTES = 8 << 20
_PARTS_MAX = 10_000
"""Limit of the protocol."""
_UPLOADS = "uploads/"
_BLOBS = "blobs/"
_SECRET = "uploads.key"
_SECRET_BYTES = 32
_AT_ONCE = 4
"""Uploads that are fetched at a time, each through one buffer."""
_WRITE_WAIT_S = 5.0
"""A blob that takes longer to get into the bucket is asked for again."""
_SWEEP_S = 600.0
_LEFT_S = 3600.0
"""What nobody knows is deleted when it is so old: a ticket for it may still be used."""
_DOUBT_S = 600.0
"""A blob is written again at most so often, whoever complains."""
_FORBIDDEN = ("AccessDenied", "InvalidAccessKeyId", "NoSuchBucket", "SignatureDoesNotMatch")


class _Copy:
    """The copy of a blob in the bucket."""

    def __init__(self, blob: BlobRef) -> None:
        self.blob = blob
        self.keys: list[str] = []
        """The newest is in use: a store may not overwrite what somebody doubts."""
        self.writing: asyncio.Task[None] | None = None
        """Done well: the copy is there."""
        self.doubted_s = -_DOUBT_S
        self.bearers: set[NodeId | None] = set()
        """Nodes that were given a ticket for a job's model."""
        self.renew()

    def renew(self) -> None:
        """Have the copy made again, under another key."""
        self.writing = None
        self.keys.append(f"{_BLOBS}{self.blob.digest}.{len(self.keys)}")


class ObjectStore:
    """Copies in a bucket: of uploads until they are here, and of blobs for those who fetch them.

    Nobody guesses a key: that of a blob holds its digest, that of an upload a secret.
    """

    port = 0

    def __init__(
        self,
        bucket: S3Bucket,
        folder: Path,
        blobs: BlobStore,
        uploads: UploadStore,
        on_bytes: Callable[[BytesServed], None],
    ) -> None:
        """Serve the coordinator's folder. Reads or makes a small file.

        Args:
            bucket: Nobody else deletes or writes in it.
            folder: The coordinator's.
            blobs: What can be fetched.
            uploads: Quarantine of what comes.
            on_bytes: Hears of models that nodes were given a ticket for.
        """
        self._bucket = bucket
        self._blobs = blobs
        self._uploads = uploads
        self._secret = _kept_secret(folder / _SECRET)
        self._on_bytes = on_bytes
        self._copies: dict[Digest, _Copy] = {}
        self._offered: set[str] = set()
        """Keys of uploads that were offered since the start."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._fetching = asyncio.Semaphore(_AT_ONCE)

    async def bind(self, host: str, port: int, certificates: Certificates | None) -> None:
        """Try the bucket. One that only does not answer may yet do so."""
        try:
            await asyncio.to_thread(self._bucket.check)
        except HyperGPUError as refused:
            if any(each in refused.detail for each in _FORBIDDEN):
                detail = f"blobs: {refused.detail}"
                raise HyperGPUError(Reason.ARGUMENT_INVALID, detail) from refused
            log.warning("the object store cannot be used yet", reason=str(refused))

    async def run(self) -> None:
        """Delete what nobody needs any more, now and then, until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.sweep, time.time() - _LEFT_S)
            except HyperGPUError as refused:
                log.warning("the bucket was not swept", reason=str(refused))
            await asyncio.sleep(_SWEEP_S)

    async def ticket(
        self, node: NodeId | None, blob: BlobRef, purpose: str = ""
    ) -> tensor_pb2.Ticket:
        """A ticket to fetch a blob, which is written to the bucket first where it has to be."""
        if not blob.size_bytes:
            return tensor_pb2.Ticket(life_ms=LIFE_MS)
        copy = self._copies.setdefault(blob.digest, _Copy(blob))
        await self._have_written(copy)
        if purpose and node not in copy.bearers:
            copy.bearers.add(node)
            self._on_bytes(BytesServed(JobId(purpose), blob.size_bytes))
        url = self._bucket.read_address(copy.keys[-1])
        ranged = tensor_pb2.TicketRange(url=url, start=0, end=blob.size_bytes)
        return tensor_pb2.Ticket(ranges=[ranged], life_ms=LIFE_MS)

    async def upload_ticket(self, node: NodeId | None, upload: OpenUpload) -> tensor_pb2.Ticket:
        """A ticket for one PUT, or one for each part that is missing."""
        ranges: list[tensor_pb2.TicketRange] = []
        if upload.missing:
            key = self._upload_key(upload.name)
            async with self._lock(key):
                ranges = await asyncio.to_thread(self._missing, key, upload.size_bytes)
                self._offered.add(key)
        return tensor_pb2.Ticket(ranges=ranges, life_ms=LIFE_MS)

    async def seal_upload(self, name: str, blob: BlobRef) -> Path:
        """Fetch an upload, seal it, and delete it there."""
        key = self._upload_key(name)
        async with self._fetching, self._lock(key):
            await asyncio.to_thread(self._fetch, name, key, blob.size_bytes)
            sealed = await asyncio.to_thread(self._uploads.seal, name, blob)
            self._offered.discard(key)
        await self._delete([key])
        return sealed

    def doubt(self, digest: Digest) -> None:
        """Write the copy again before the next ticket for it, now and then at most."""
        copy, now_s = self._copies.get(digest), time.monotonic()
        if copy is None or now_s - copy.doubted_s < _DOUBT_S:
            return
        log.warning("a copy in the object store is doubted and made again", blob=digest)
        copy.doubted_s = now_s
        copy.renew()

    async def remove(self, digests: Collection[Digest]) -> None:
        """Delete copies of blobs."""
        copies = [self._copies.pop(digest) for digest in digests if digest in self._copies]
        await self._delete([key for copy in copies for key in copy.keys])

    def sweep(self, before_s: float) -> int:
        """Delete what is older and nobody knows, such as uploads under leases that ended. Blocks.

        Args:
            before_s: Unix time.

        Returns:
            The number of objects.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """
        uploads = {self._upload_key(name) for name in self._uploads.names()}
        written = [each.key for each in self._bucket.objects(_UPLOADS) if each.since_s < before_s]
        left = [key for key in written if key not in uploads]
        copies = [each.key for each in self._bucket.objects(_BLOBS) if each.since_s < before_s]
        left += [key for key in copies if not self._is_stored(key)]
        self._bucket.delete(left)
        begun = [each for each in self._bucket.part_uploads(_UPLOADS) if each.since_s < before_s]
        void = [each for each in begun if each.key not in uploads]
        for each in void:
            self._bucket.abandon(each)
        return len(left) + len(void)

    async def _have_written(self, copy: _Copy) -> None:
        """Wait a moment for the copy, which one task writes whoever waits for it.

        Raises:
            HyperGPUError: NOT_READY, it takes longer; STORE_UNREACHABLE; BLOB_UNKNOWN, it was
                collected meanwhile.
        """
        if copy.writing is None or (copy.writing.done() and copy.writing.exception()):
            copy.writing = asyncio.create_task(self._write(copy, copy.keys[-1]), name="copy")
        try:
            async with asyncio.timeout(_WRITE_WAIT_S):
                await asyncio.shield(copy.writing)
        except TimeoutError:
            detail = f"{copy.blob.digest} is on its way to the object store"
            raise HyperGPUError(Reason.NOT_READY, detail) from None

    async def _write(self, copy: _Copy, key: str) -> None:
        await asyncio.to_thread(self._write_missing, copy.blob, key)

    def _write_missing(self, blob: BlobRef, key: str) -> None:
        """Write a blob's copy, unless one of its size is there from an earlier start."""
        if self._bucket.size(key) == blob.size_bytes:
            return
        file = open_locked(self._blobs.path(blob.digest))
        if file is None:
            raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{blob.digest} was just collected")
        with file:
            self._bucket.write(key, Path(file.name))

    def _missing(self, key: str, size_bytes: int) -> list[tensor_pb2.TicketRange]:
        """Ranges that were not sent to the bucket yet."""
        if key in self._offered and self._bucket.size(key) == size_bytes:
            return []
        if size_bytes <= ONE_PUT_BYTES_MAX:
            return [_range(self._bucket.write_address(key, size_bytes), Span(0, size_bytes))]
        begun = self._bucket.begin(key)
        came = self._bucket.parts(begun)
        return [
            _range(self._bucket.part_address(begun, number, span.end - span.start), span)
            for number, span in _parts(size_bytes)
            if number not in came
        ]

    def _fetch(self, name: str, key: str, size_bytes: int) -> None:
        """Write what the bucket has of an upload to its file here, as far as it is missing."""
        if size_bytes > ONE_PUT_BYTES_MAX and self._bucket.size(key) is None:
            self._finish_parts(key, size_bytes)
        with reject_when_full("the upload cannot be fetched"), suppress(FileNotFoundError):
            part = PartFile(self._uploads.path(name), Bytes(size_bytes))
            try:
                for span in part.missing():
                    if not self._bucket.read(key, span, part.write):
                        break
            finally:
                part.close()

    def _finish_parts(self, key: str, size_bytes: int) -> None:
        """Make an object of its parts, if they are all there."""
        begun = next((each for each in self._bucket.part_uploads(key) if each.key == key), None)
        came = {} if begun is None else self._bucket.parts(begun)
        if begun is not None and came.keys() == {number for number, _ in _parts(size_bytes)}:
            self._bucket.finish(begun, came)

    async def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects. What remains is swept later."""
        try:
            await asyncio.to_thread(self._bucket.delete, keys)
        except HyperGPUError as refused:
            log.warning("objects were not deleted yet", reason=str(refused))

    def _is_stored(self, copy_key: str) -> bool:
        digest = copy_key.removeprefix(_BLOBS).partition(".")[0]
        return is_digest(digest) and self._blobs.size(Digest(digest)) is not None

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _upload_key(self, name: str) -> str:
        return _UPLOADS + hmac.digest(self._secret, name.encode(), "sha256").hex()


def _parts(size_bytes: int) -> Iterator[tuple[int, Span]]:
    """Parts of an upload, numbered from 1."""
    step = max(PART_BYTES, -(-size_bytes // _PARTS_MAX))
    for number, start in enumerate(range(0, size_bytes, step), 1):
        yield number, Span(start, min(start + step, size_bytes))


def _range(url: str, span: Span) -> tensor_pb2.TicketRange:
    return tensor_pb2.TicketRange(url=url, start=span.start, end=span.end, is_whole=True)


def _kept_secret(path: Path) -> bytes:
    """The secret in a file, which is made when it is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        secret = secrets.token_bytes(_SECRET_BYTES)
        write_durably(path, secret)
        return secret
