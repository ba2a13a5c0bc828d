"""An object store as the plane of bulk bytes. Nodes write to it and read from it at addresses that
the coordinator signs; the coordinator fetches each upload once, and writes each blob once.
"""

import asyncio
import hmac
import re
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import structlog

from coordinator.shell.store.blobs.store import BlobStore, open_locked
from coordinator.shell.store.blobs.upload_store import OpenUpload, UploadStore
from coordinator.shell.store.blobs.writing import kept_secret, reject_when_full
from coordinator.shell.store.bulk.bucket import BucketError, S3Bucket
from coordinator.shell.store.bulk.kept_blobs import KeptBlobs, copy_key, digest_in, number_in
from coordinator.shell.store.bulk.messages import BytesServed, Certificates
from coordinator.shell.store.bulk.store import UpdateTaker
from coordinator.shell.store.bulk.tickets import LIFE_MS
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.part_file import PartFile, Span
from hypergpu.v1 import tensor_pb2

log = structlog.get_logger()

ONE_PUT_BYTES_MAX = 16 << 20
"""Larger uploads go in parts, of which those that came need not come again."""
PART_BYTES = 8 << 20
_PARTS_MAX = 512
"""A ticket with an address for each stays small."""
_UPLOADS = "uploads/"
_SECRET = "uploads.key"
_SIGNATURE = re.compile("(?<=X-Amz-Signature=)[0-9a-f]+")
_KEY_BYTES = 16
"""Octets of a key that nobody is to guess."""
_TRANSFERS = 4
"""Uploads that are fetched and blobs that are written at a time, each through one buffer."""
_CALLS = 4
"""Small calls at a time."""
_WAIT_S = 5.0
"""A blob that takes longer to get into the bucket is asked for again."""
_PROBE_S = 15.0
_PROBE_AGAIN_S = 2.0
"""Time between looks at a store that failed."""
_SWEEP_S = 600.0
_UNKNOWN_S = 3600.0
"""Age at which what nobody knows is deleted: until then a ticket for it may be used."""
_DOUBT_S = 600.0
"""Time between two new copies of a blob for which nothing but a complaint speaks."""

_Result = TypeVar("_Result")


class _Copy:
    """The copy of a blob in the bucket."""

    def __init__(self, blob: BlobRef, key: str) -> None:
        self.blob = blob
        self.keys = [key]
        """The newest is in use: a store may not overwrite what somebody doubts."""
        self.writing: asyncio.Task[None] | None = None
        """The task that writes it; ended without an error: the copy is there."""
        self.doubted_s = -_DOUBT_S
        self.bearers: set[NodeId | None] = set()
        """Nodes that were given a ticket for a job's model."""

    def renew(self) -> None:
        """Have the copy written again, under another key."""
        self.writing = None
        self.keys.append(copy_key(self.blob.digest, number_in(self.keys[-1]) + 1))


class ObjectStore:
    """Copies in a bucket: of uploads until they are here, and of blobs for those who fetch them.

    Nobody guesses a key: that of a blob holds its digest, that of an upload a secret. After a call
    that failed all fail at once until the store answers again.
    """

    port = 0

    def __init__(
        self,
        kept: KeptBlobs | S3Bucket,
        folder: Path,
        blobs: BlobStore,
        uploads: UploadStore,
        on_bytes: Callable[[BytesServed], None],
    ) -> None:
        """Serve the coordinator's folder. Reads or makes a small file.

        Args:
            kept: The bucket's part, or all blobs in it where they outlive this machine. Nobody else
                deletes or writes there.
            folder: The coordinator's.
            blobs: What can be fetched.
            uploads: Quarantine of what comes.
            on_bytes: Hears of models that nodes were given a ticket for.
        """
        self._failure: BucketError | None = None
        """Last failure of the store, which has not answered since."""
        self._kept = kept if isinstance(kept, KeptBlobs) else None
        self._bucket = kept.bucket if isinstance(kept, KeptBlobs) else kept
        self._blobs = blobs
        self._uploads = uploads
        self._known_address = ""
        self._secret = kept_secret(folder / _SECRET)
        self._on_bytes = on_bytes
        self._copies: dict[Digest, _Copy] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[object]] = set()
        # Of its own: a store that hangs must not hold the threads of everybody else.
        self._calls = ThreadPoolExecutor(_CALLS, thread_name_prefix="bucket")
        self._transfers = ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="bucket-bytes")

    @property
    def known_address(self) -> str:
        """An address like those of tickets, as of the first call that could sign one."""
        if not self._known_address:
            with suppress(BucketError):
                signed_url = self._bucket.write_address(_UPLOADS, 0)
                self._known_address = _SIGNATURE.sub("", signed_url)
        return self._known_address

    @property
    def obstacle(self) -> str:
        """Why jobs wait for the store; empty: they do not."""
        return str(self._failure) if self._failure else ""

    async def bind(self, host: str, port: int, certificates: Certificates | None) -> None:
        """Try the bucket for a moment. One that only does not answer may yet do so."""
        trial_task = self._detach(self._note(self._calls, self._bucket.check))
        try:
            async with asyncio.timeout(_WAIT_S):
                await asyncio.shield(trial_task)
        except BucketError as error:
            if error.is_forbidden:
                detail = f"blobs: {error.detail}"
                raise HyperGPUError(Reason.ARGUMENT_INVALID, detail) from error
            log.warning("the object store cannot be used yet", reason=str(error))
        except TimeoutError:
            log.warning("the object store does not answer yet")

    async def run(self) -> None:
        """Look after the store until cancelled: does it answer, and what does nobody need?"""
        swept_s = -_SWEEP_S
        try:
            while True:
                await self.look()
                if not self._failure and time.monotonic() - swept_s >= _SWEEP_S:
                    swept_s = time.monotonic()
                    with suppress(BucketError):
                        await self._call(partial(self.sweep, time.time() - _UNKNOWN_S))
                await asyncio.sleep(_PROBE_AGAIN_S if self._failure else _PROBE_S)
        finally:
            # Python ends no process before its threads.
            self._bucket.close()
            for threads in (self._calls, self._transfers):
                threads.shutdown(wait=False, cancel_futures=True)

    async def look(self) -> None:
        """See whether the store answers."""
        with suppress(BucketError):
            await self._note(self._calls, self._bucket.probe)

    async def ticket(
        self, node: NodeId | None, blob: BlobRef, purpose: str = ""
    ) -> tensor_pb2.Ticket:
        """A ticket to fetch a blob, which is written to the bucket first where it has to be."""
        if not blob.size_bytes:
            return tensor_pb2.Ticket(life_ms=LIFE_MS)
        if (copy := self._copies.get(blob.digest)) is None:
            copy = self._copies[blob.digest] = _Copy(blob, self._key(blob.digest))
        await self._have_written(copy)
        if purpose and node not in copy.bearers:
            copy.bearers.add(node)
            self._on_bytes(BytesServed(JobId(purpose), blob.size_bytes))
        url = self._bucket.read_address(copy.keys[-1])
        ticket_range = tensor_pb2.TicketRange(url=url, start=0, end=blob.size_bytes)
        return tensor_pb2.Ticket(ranges=[ticket_range], life_ms=LIFE_MS)

    def ready_ticket(self, node: NodeId, blob: BlobRef, purpose: str) -> None:
        """None: a copy may have to be written first."""

    async def upload_ticket(self, node: NodeId | None, upload: OpenUpload) -> tensor_pb2.Ticket:
        """A ticket for one PUT, or one for each part that is missing."""
        ranges: list[tensor_pb2.TicketRange] = []
        if upload.missing:
            # A caller that goes away leaves neither lock nor thread behind in a state of their own.
            ranges = await asyncio.shield(self._detach(self._offer(upload)))
        return tensor_pb2.Ticket(ranges=ranges, life_ms=LIFE_MS)

    async def receive_upload(self, name: str, blob: BlobRef) -> Path:
        """Fetch an upload, seal it, and delete it there."""
        key = self._upload_key(name)
        async with self._lock(key):
            upload = await asyncio.to_thread(self._uploads.reopen, name, blob)
            if upload.missing:
                await self._transfer(partial(self._fetch, key, upload))
            sealed_path = await asyncio.to_thread(self._uploads.seal, name, blob)
        if self._kept is None:
            self._detach(self._delete([key]))
        else:
            self._kept.note_upload(blob.digest, key)
        return sealed_path

    async def doubt(self, digest: Digest) -> None:
        """Have the copy written again where it is not what it should be, or now and then."""
        copy = self._copies.get(digest)
        if copy is None or copy.writing is None or not copy.writing.done():
            return
        size_bytes = await self._call(partial(self._bucket.size, copy.keys[-1]))
        now_s = time.monotonic()
        if size_bytes == copy.blob.size_bytes and now_s - copy.doubted_s < _DOUBT_S:
            return
        log.warning("a copy in the object store is doubted and written again", blob=digest)
        copy.doubted_s = now_s
        copy.renew()

    def take_updates(self, taker: UpdateTaker) -> None:
        """None come here: they come by tickets."""

    def remove(self, digests: Collection[Digest]) -> None:
        """Delete copies of blobs, in the background."""
        copies = [self._copies.pop(digest) for digest in digests if digest in self._copies]
        free = self._begin_deletion([key for copy in copies for key in copy.keys])
        if self._kept is not None:
            free += self._kept.take_forgotten()
        if free:
            self._detach(self._delete(free))

    def sweep(self, before_s: float) -> int:
        """Delete what is older and nobody knows, such as uploads under leases that ended. Blocks.

        Args:
            before_s: Unix time.

        Returns:
            The number of objects.

        Raises:
            BucketError: The store cannot be used.
        """
        uploads = {self._upload_key(name) for name in self._uploads.names()}
        in_use = uploads | {copy.keys[-1] for copy in list(self._copies.values())}
        part_uploads = [each for each in self._bucket.part_uploads("") if each.since_s < before_s]
        void = [each for each in part_uploads if each.key not in in_use]
        for each in void:
            self._bucket.abandon(each)
        written_keys = [each.key for each in self._bucket.objects() if each.since_s < before_s]
        leftover_keys = [
            key for key in written_keys if key not in uploads and not self._is_copy(key)
        ]
        free = self._begin_deletion(leftover_keys)
        with self._deletion(free):
            self._bucket.delete(free)
        return len(free) + len(void)

    async def _have_written(self, copy: _Copy) -> None:
        """Wait a moment for the copy, which one task writes whoever waits for it.

        Raises:
            BucketError: The store cannot be used.
            HyperGPUError: NOT_READY, it takes longer; BLOB_UNKNOWN, it was collected meanwhile.
        """
        if copy.writing is None or (copy.writing.done() and copy.writing.exception()):
            write = partial(self._write_missing, copy.blob, copy.keys[-1])
            copy.writing = self._detach(self._transfer(write))
        try:
            async with asyncio.timeout(_WAIT_S):
                await asyncio.shield(copy.writing)
        except TimeoutError:
            self._refuse_unreachable()
            detail = f"{copy.blob.digest} is on its way to the object store"
            raise HyperGPUError(Reason.NOT_READY, detail) from None

    def _write_missing(self, blob: BlobRef, key: str) -> None:
        """Write a blob's copy, unless one of its size is there from an earlier start."""
        if self._bucket.size(key) == blob.size_bytes:
            return
        file = open_locked(self._blobs.path(blob.digest))
        if file is None:
            raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{blob.digest} was just collected")
        with file:
            try:
                self._bucket.write(key, Path(file.name))
            except FileNotFoundError as error:
                detail = f"{blob.digest} was just collected"
                raise HyperGPUError(Reason.BLOB_UNKNOWN, detail) from error

    async def _offer(self, upload: OpenUpload) -> list[tensor_pb2.TicketRange]:
        key = self._upload_key(upload.name)
        async with self._lock(key):
            if upload.is_new and upload.size_bytes <= ONE_PUT_BYTES_MAX:
                return self._one_put(key, upload.size_bytes)
            return await self._call(partial(self._missing, key, upload.size_bytes))

    def _missing(self, key: str, size_bytes: int) -> list[tensor_pb2.TicketRange]:
        """Ranges that were not sent to the bucket yet."""
        if self._bucket.size(key) == size_bytes:
            return []
        if size_bytes <= ONE_PUT_BYTES_MAX:
            return self._one_put(key, size_bytes)
        part_upload = self._bucket.begin(key)
        came = self._bucket.parts(part_upload)
        return [
            _range(self._bucket.part_address(part_upload, number, span.end - span.start), span)
            for number, span in _parts(size_bytes)
            if number not in came
        ]

    def _one_put(self, key: str, size_bytes: int) -> list[tensor_pb2.TicketRange]:
        return [_range(self._bucket.write_address(key, size_bytes), Span(0, size_bytes))]

    def _fetch(self, key: str, upload: OpenUpload) -> None:
        """Write what the bucket has of an upload to its file here, as far as it is missing."""
        size_bytes = self._bucket.size(key)
        if size_bytes != upload.size_bytes and self._has_joined(key, upload.size_bytes):
            size_bytes = upload.size_bytes
        if size_bytes != upload.size_bytes:
            # A store that does not overwrite would keep it for ever.
            self._bucket.delete([key])
            return
        with reject_when_full("the upload cannot be fetched"), suppress(FileNotFoundError):
            part = PartFile(self._uploads.path(upload.name), upload.size_bytes)
            try:
                for span in upload.missing:
                    if not self._bucket.read(key, span, part.write):
                        break
            finally:
                part.close()

    def _has_joined(self, key: str, size_bytes: int) -> bool:
        """Whether all parts were there, and are an object now."""
        if size_bytes <= ONE_PUT_BYTES_MAX:
            return False
        part_upload = next(
            (each for each in self._bucket.part_uploads(key) if each.key == key), None
        )
        came = {} if part_upload is None else self._bucket.parts(part_upload)
        if part_upload is None or came.keys() != {number for number, _ in _parts(size_bytes)}:
            return False
        self._bucket.finish(part_upload, came)
        return True

    async def _call(self, call: Callable[[], _Result]) -> _Result:
        """Make a small call, unless the store fails."""
        self._refuse_unreachable()
        return await self._note(self._calls, call)

    async def _transfer(self, work: Callable[[], _Result]) -> _Result:
        """Move bytes, unless the store fails."""
        self._refuse_unreachable()
        return await self._note(self._transfers, work)

    async def _note(self, threads: ThreadPoolExecutor, call: Callable[[], _Result]) -> _Result:
        """Make a call, and take note whether the store answers."""
        try:
            result = await asyncio.get_running_loop().run_in_executor(threads, call)
        except BucketError as error:
            if not self._failure:
                log.warning("the object store fails", reason=str(error))
            self._failure = error
            raise
        if self._failure:
            log.info("the object store answers again")
        self._failure = None
        return result

    def _refuse_unreachable(self) -> None:
        """Refuse what needs a store that fails: `run` looks when it is back."""
        if self._failure:
            raise BucketError(self._failure.detail, self._failure.code)

    def _detach(self, work: Coroutine[object, object, _Result]) -> "asyncio.Task[_Result]":
        """Start work that goes on when its caller is gone, and whose error may go unheard."""
        task = asyncio.create_task(work, name="object store")
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects. What remains is swept."""
        for key in keys:
            # Who sends the same upload again waits, or it would be deleted.
            with suppress(BucketError), self._deletion([key]):
                async with self._lock(key):
                    await self._call(partial(self._bucket.delete, [key]))

    def _begin_deletion(self, keys: list[str]) -> list[str]:
        """Those of the keys that may be deleted."""
        return keys if self._kept is None else self._kept.begin_deletion(keys)

    @contextmanager
    def _deletion(self, keys: list[str]) -> Iterator[None]:
        """Delete keys within the block, whose error leaves them to somebody else."""
        try:
            yield
        except BaseException:
            if self._kept is not None:
                self._kept.abandon_deletion(keys)
            raise
        if self._kept is not None:
            self._kept.end_deletion(keys)

    def _key(self, digest: Digest) -> str:
        """Where a blob's copy is or comes."""
        return copy_key(digest) if self._kept is None else self._kept.key(digest)

    def _is_copy(self, key: str) -> bool:
        """Whether an object is the copy of a blob that is here."""
        digest = digest_in(key)
        return digest is not None and self._blobs.size(digest) is not None

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _upload_key(self, name: str) -> str:
        return _UPLOADS + hmac.digest(self._secret, name.encode(), "sha256")[:_KEY_BYTES].hex()


def _parts(size_bytes: int) -> Iterator[tuple[int, Span]]:
    """Parts of an upload, numbered from 1."""
    step = max(PART_BYTES, -(-size_bytes // _PARTS_MAX))
    for number, start in enumerate(range(0, size_bytes, step), 1):
        yield number, Span(start, min(start + step, size_bytes))


def _range(url: str, span: Span) -> tensor_pb2.TicketRange:
    return tensor_pb2.TicketRange(url=url, start=span.start, end=span.end, is_whole=True)
