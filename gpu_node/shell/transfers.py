"""Downloads and uploads as tasks, one for each lease, whose ends are events.

An update is signed, has a nonce of its own, and goes on from where the last try ended; over several
connections it goes as a stripe on each, all under one nonce.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import NamedTuple

import grpc

from gpu_node.core import events
from gpu_node.core.events import TrainedUpdate
from gpu_node.core.phases import PhaseClock
from gpu_node.core.state import SendUpdate
from gpu_node.shell.access import describe_error, rejection_in
from gpu_node.shell.bulk import BulkBrokenError
from gpu_node.shell.cache import BlobCache
from gpu_node.shell.calls import (
    Calls,
    Measurements,
    TransferTimer,
    contribution,
    update_header,
)
from gpu_node.shell.control import CoordinatorStream, EventQueue, gather_or_cancel
from gpu_node.shell.download import BlobSource, Download
from gpu_node.shell.inputs import Datasets, InitialModels, Models
from gpu_node.shell.receipts import ReceiptKeeper
from gpu_node.shell.state import NonceCounter, StatePaths
from hypergpu.crypto import IdentityKey, digest_of_file, sign
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements import Assignment, Lease, separator_of
from hypergpu.streams import PIECE_BYTES, Stripe, monotonic_ms, most_stripes, transfer_timeout_s
from hypergpu.units import Bytes
from hypergpu.v1 import node_pb2
from hypergpu.wire.chunks import CHUNK_BYTES, encode_chunk

_CHUNK_FIELD = node_pb2.SubmitUpdateRequest.CHUNK_FIELD_NUMBER
_READ_BYTES = 4 * CHUNK_BYTES
_IN_FLIGHT_BYTES = 4 << 20
"""Bytes that the transport may have taken without any of them having arrived."""


class Uploader:
    """Sends updates and remembers how far each got."""

    def __init__(
        self,
        paths: StatePaths,
        identity: IdentityKey,
        measurements: Measurements | None = None,
        receipts: ReceiptKeeper | None = None,
        phases: PhaseClock | None = None,
    ) -> None:
        self._paths = paths
        self._phases = phases or PhaseClock()
        self._receipts = receipts or ReceiptKeeper(paths, identity.node_id)
        self._measurements = measurements or Measurements()
        self._identity = identity
        self._nonces = NonceCounter(paths)
        self._fresh: set[Lease] = set()
        self._committed: dict[Lease, int] = {}
        self._sent_bytes = 0
        self._gained_bytes = 0
        self._timer: TransferTimer | None = None
        """Timer of the upload under way, once it was admitted."""

    def note_finished(self, lease: Lease) -> None:
        """Note a fresh update: the coordinator cannot hold any of it."""
        self._fresh.add(lease)
        self._committed.clear()

    @property
    def has_progressed(self) -> bool:
        """Whether the last attempts moved bytes that need not be sent again."""
        return self._sent_bytes > _IN_FLIGHT_BYTES or self._gained_bytes > 0

    @property
    def moved_bytes(self) -> int:
        """Bytes of the update under way that were sent, in earlier attempts too."""
        return sum(self._committed.values()) + self._sent_bytes

    async def send(self, calls: Calls, assignment: Assignment, update: TrainedUpdate) -> None:
        """Send the bytes that the coordinator lacks; the update is accepted when this returns.

        Raises:
            grpc.aio.AioRpcError: The call broke or was rejected.
            HyperGPUError: FILE_UNUSABLE when the update is damaged on this disk, CALL_BROKEN when
                the coordinator ended the call early.
        """
        lease = assignment.lease
        self._sent_bytes = self._gained_bytes = 0
        stripes = _cut_stripes(calls.connections, update.size_bytes)
        offsets = await self._offsets(calls, lease, update, stripes)
        if offsets is None:
            await self._count_accepted(assignment)
            return
        path = self._paths.update(lease.job_id, lease.round)
        _check_size(path, update)
        nonce = await asyncio.to_thread(self._nonces.take)
        header = self._signed_header(assignment, update, nonce)
        await asyncio.to_thread(self._receipts.agree, lease.job_id, assignment.terms)
        self._timer = None
        sending = [
            self._send(connection, _stripe_header(header, stripe, offset), path)
            for connection, stripe, offset in zip(calls.connections, stripes, offsets, strict=False)
        ]
        answers = await gather_or_cancel(sending)
        if not any(answer.is_accepted for answer in answers):
            arrived = min(answer.committed_offset for answer in answers)
            detail = f"not all of {update.size_bytes} bytes arrived: {arrived} in one stretch"
            raise HyperGPUError(Reason.CALL_BROKEN, detail)
        await self._count_accepted(assignment)
        if self._timer is not None:
            # Only the answer shows that all bytes arrived; until then they may lie in buffers.
            committed = sum(
                offset - _start(stripe, update)
                for stripe, offset in zip(stripes, offsets, strict=True)
            )
            self._timer.add_bytes(update.size_bytes - committed)
            self._timer.stop()

    async def _count_accepted(self, assignment: Assignment) -> None:
        """Count the accepted update for the node's own records."""
        count, round_number = self._receipts.count_accepted, assignment.lease.round
        await asyncio.to_thread(count, assignment.terms, round_number, assignment.task.samples)

    def _signed_header(
        self, assignment: Assignment, update: TrainedUpdate, nonce: int
    ) -> node_pb2.UpdateHeader:
        signed = contribution(self._identity.node_id, assignment, update, nonce)
        separator = separator_of(assignment.terms.domain)
        signature = sign(self._identity, separator, signed)
        lease = assignment.lease
        phases = self._phases.durations(lease, monotonic_ms())
        return update_header(lease, update, nonce=nonce, signature=signature, phases=phases)

    async def _send(
        self, calls: Calls, header: node_pb2.UpdateHeader, path: Path
    ) -> node_pb2.SubmitUpdateResponse:
        """Send one stripe, or the whole, over one connection."""
        stripe = Stripe(header.stripe, max(1, header.stripes))
        end = stripe.end(header.size_bytes)
        timeout_s = transfer_timeout_s(
            end - header.offset, calls.timeout_ms, connections=stripe.count
        )
        messages = self._messages(header, path, end)
        return await calls.submit(messages, timeout_s, end - header.offset)

    async def check_undamaged(self, lease: Lease, update: TrainedUpdate) -> None:
        """Check an update in which the coordinator found another digest than its own.

        Raises:
            HyperGPUError: FILE_UNUSABLE, it is damaged on this disk.
        """
        path = self._paths.update(lease.job_id, lease.round)
        if await asyncio.to_thread(digest_of_file, path) != update.digest:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is damaged on this node's disk")

    async def _offsets(
        self, calls: Calls, lease: Lease, update: TrainedUpdate, stripes: tuple[Stripe, ...]
    ) -> list[int] | None:
        """The offset to go on from in each stripe; None when nothing is left to send."""
        starts = [_start(stripe, update) for stripe in stripes]
        if lease in self._fresh:
            self._fresh.discard(lease)
            return starts
        known = await gather_or_cancel(
            [calls.query_upload(lease, update.digest, stripe) for stripe in stripes]
        )
        if any(answer.is_accepted for answer in known):
            return None
        offsets = [
            max(start, min(answer.committed_offset, stripe.end(update.size_bytes)))
            for start, answer, stripe in zip(starts, known, stripes, strict=True)
        ]
        committed = sum(offsets) - sum(starts)
        self._gained_bytes = committed - self._committed.get(lease, 0)
        self._committed = {lease: committed}
        return offsets

    async def _messages(
        self, header: node_pb2.UpdateHeader, path: Path, end: int
    ) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        offset = header.offset
        chunk_bytes = PIECE_BYTES if header.stripes > 1 else CHUNK_BYTES
        # Read while the header is judged, and each next block while one is being sent.
        next_block = loop.run_in_executor(None, _block, path, offset, end)
        try:
            yield node_pb2.SubmitUpdateRequest(header=header).SerializeToString()
            if self._timer is None:
                connections = max(1, header.stripes)
                direction = node_pb2.DIRECTION_UP
                self._timer = TransferTimer(self._measurements, direction, connections=connections)
            while block := await next_block:
                next_block = loop.run_in_executor(None, _block, path, offset + len(block), end)
                view = memoryview(block)
                for start in range(0, len(block), chunk_bytes):
                    piece = view[start : start + chunk_bytes]
                    yield encode_chunk(_CHUNK_FIELD, offset + start, piece)
                    self._sent_bytes += piece.nbytes
                offset += len(block)
        finally:
            # A call that ended early reads no more; an error of the last read does not matter then.
            next_block.add_done_callback(lambda done: done.cancelled() or done.exception())


def _check_size(path: Path, update: TrainedUpdate) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as broken:
        detail = f"the update {path}: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    if size_bytes != update.size_bytes:
        detail = f"the update {path} has {size_bytes} bytes, not {update.size_bytes}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)


def _block(path: Path, offset: int, end: int) -> bytes:
    """The next bytes, none at ``end``. Opened for each, no file is left behind by a dead call."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(max(0, min(_READ_BYTES, end - offset)))


def _cut_stripes(connections: tuple[Calls, ...], size_bytes: int) -> tuple[Stripe, ...]:
    """A stripe for each connection, as far as the update is large enough."""
    count = min(len(connections), most_stripes(size_bytes))
    return tuple(Stripe(index, count) for index in range(count))


def _start(stripe: Stripe, update: TrainedUpdate) -> int:
    return stripe.start(update.size_bytes)


def _stripe_header(
    header: node_pb2.UpdateHeader, stripe: Stripe, offset: int
) -> node_pb2.UpdateHeader:
    """The header with which one stripe begins. An undivided update names no stripe."""
    headed = node_pb2.UpdateHeader()
    headed.CopyFrom(header)
    headed.offset = offset
    if stripe.count > 1:
        headed.stripe, headed.stripes = stripe.index, stripe.count
    return headed


_TRANSIENT = frozenset(
    {
        Reason.NOT_READY,
        Reason.RATE_LIMITED,
        Reason.STREAM_SILENT,
        Reason.CALL_BROKEN,
        Reason.NONCE_REPLAYED,
        Reason.OFFSET_MISMATCH,
        Reason.DISK_FULL,
        Reason.VERSION_MISMATCH,
    }
)
"""Rejections of a transfer after which the next try may succeed."""
_VOID = frozenset({Reason.UPDATE_LATE, Reason.LEASE_STALE, Reason.JOB_UNKNOWN, Reason.JOB_PHASE})
"""Rejections of an update that nobody waits for any more."""
_CHANNEL_CLOSED = (
    asyncio.CancelledError,
    asyncio.InvalidStateError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
)
"""Errors of calls on a channel that is closed meanwhile."""


class TrainingInputs(NamedTuple):
    """Model and dataset of a training, on disk."""

    model: Path
    dataset: Path | None


class TransferTasks:
    """At most one download and one upload for each lease."""

    def __init__(
        self,
        stream: CoordinatorStream,
        cache: BlobCache,
        uploader: Uploader,
        initial_models: InitialModels,
        event_queue: EventQueue,
    ) -> None:
        self._stream = stream
        self._cache = cache
        self._download = Download(cache, stream.prober.measurements)
        self._models = Models(cache, self._download, initial_models)
        self._datasets = Datasets(cache, self._download)
        self._uploader = uploader
        self._event_queue = event_queue
        self._tasks: dict[tuple[str, Lease], asyncio.Task[None]] = {}
        self.inputs: dict[Lease, TrainingInputs] = {}
        """Inputs of the assignment that was fetched last."""
        self._received_before = 0

    @property
    def moved_bytes(self) -> Bytes:
        """Bytes of the transfer under way so far; 0 without one."""
        kinds = {kind for kind, _ in self._tasks}
        if "upload" in kinds:
            return Bytes(self._uploader.moved_bytes)
        if "fetch" in kinds:
            return Bytes(self._download.received_bytes - self._received_before)
        return Bytes(0)

    def fetch(self, assignment: Assignment) -> None:
        """Fetch the inputs of an assignment, unless that is under way."""
        self._begin("fetch", assignment.lease, lambda calls: self._fetch(calls, assignment))

    def upload(self, command: SendUpdate) -> None:
        """Send an update, unless that is under way."""
        self._begin("upload", command.assignment.lease, lambda calls: self._upload(calls, command))

    def stop(self, lease: Lease) -> None:
        """Stop the transfers of a lease."""
        for kind in ("fetch", "upload"):
            if (task := self._tasks.pop((kind, lease), None)) is not None:
                task.cancel()

    async def close(self) -> None:
        """End every task."""
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(
        self,
        kind: str,
        lease: Lease,
        transfer: Callable[[Calls], Coroutine[None, None, events.NodeEvent]],
    ) -> None:
        calls = self._stream.calls
        # Without a link the session asks again once there is one.
        if calls is None or (kind, lease) in self._tasks:
            return
        task = asyncio.create_task(self._run((kind, lease), lambda: transfer(calls)), name=kind)
        task.add_done_callback(self._event_queue.check_task)
        self._tasks[kind, lease] = task

    async def _run(
        self,
        key: tuple[str, Lease],
        transfer: Callable[[], Coroutine[None, None, events.NodeEvent]],
    ) -> None:
        kind, lease = key
        try:
            event = await transfer()
        except _CHANNEL_CLOSED as closed:
            task = asyncio.current_task()
            is_stopped = task is None or task.cancelling() > 0
            if isinstance(closed, asyncio.CancelledError) and is_stopped:
                raise
            # Closing a channel cancels its calls, which looks like a stopped task.
            broken = events.FetchBroken if kind == "fetch" else events.UploadBroken
            event = broken(at_ms=monotonic_ms(), lease=lease, reason="the channel was closed")
        # From here on the session may ask again; a stopped task reports nothing.
        self._tasks.pop(key, None)
        self._event_queue.put(event)

    async def _fetch(self, calls: Calls, assignment: Assignment) -> events.NodeEvent:
        lease, task = assignment.lease, assignment.task
        before = self._received_before = self._download.received_bytes
        needed = {task.model.digest, *(blob.digest for blob in (task.manifest,) if blob)}
        self._cache.pin(frozenset(needed | {delta.base for delta in assignment.deltas}))
        dataset: Path | None = None
        try:
            source = BlobSource(calls, assignment.connections)
            if task.manifest is not None:
                dataset = await self._datasets.fetch(source, task.manifest)
            model = await self._models.get(source, assignment)
            if self._download.received_bytes > before:
                await asyncio.to_thread(self._cache.trim)
        except (
            grpc.aio.AioRpcError,
            BulkBrokenError,
            HyperGPUError,
            TimeoutError,
            OSError,
        ) as broken:
            has_progressed = self._download.received_bytes > before
            return _fetch_ended(lease, broken, has_progressed=has_progressed)
        self.inputs = {lease: TrainingInputs(model, dataset)}
        return events.InputsFetched(at_ms=monotonic_ms(), lease=lease)

    async def _upload(self, calls: Calls, command: SendUpdate) -> events.NodeEvent:
        assignment, update = command.assignment, command.update
        lease = assignment.lease
        try:
            async with self._stream.connections.open(calls, assignment.connections) as bulk_calls:
                await self._uploader.send(bulk_calls, assignment, update)
        except (grpc.aio.AioRpcError, HyperGPUError, OSError) as broken:
            return await self._upload_ended(lease, update, broken)
        return events.UploadAccepted(at_ms=monotonic_ms(), lease=lease)

    async def _upload_ended(
        self, lease: Lease, update: TrainedUpdate, broken: Exception
    ) -> events.NodeEvent:
        at_ms, reason = monotonic_ms(), describe_error(broken)
        rejection = rejection_in(broken)
        kind = None if rejection is None else rejection.reason
        if kind is Reason.DIGEST_MISMATCH:
            try:
                await self._uploader.check_undamaged(lease, update)
            except (HyperGPUError, OSError) as damaged:
                return events.UploadRejected(
                    at_ms=at_ms, lease=lease, reason=describe_error(damaged)
                )
            kind = None
        if kind in _VOID:
            return events.UploadLate(at_ms=at_ms, lease=lease, reason=reason)
        if kind is not None and kind not in _TRANSIENT:
            return events.UploadRejected(at_ms=at_ms, lease=lease, reason=reason)
        has_progressed = self._uploader.has_progressed
        return events.UploadBroken(
            at_ms=at_ms, lease=lease, reason=reason, has_progressed=has_progressed
        )


def _fetch_ended(lease: Lease, broken: Exception, *, has_progressed: bool) -> events.NodeEvent:
    at_ms, reason = monotonic_ms(), describe_error(broken)
    rejection = rejection_in(broken)
    is_lasting = rejection is not None and rejection.reason not in _TRANSIENT
    is_local = isinstance(broken, OSError) and not isinstance(broken, TimeoutError)
    if is_lasting or is_local:
        return events.FetchRejected(at_ms=at_ms, lease=lease, reason=reason)
    return events.FetchBroken(
        at_ms=at_ms, lease=lease, reason=reason, has_progressed=has_progressed
    )
