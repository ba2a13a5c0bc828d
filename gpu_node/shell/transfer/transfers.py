"""Downloads and uploads as tasks, one for each lease, whose ends are events."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import grpc

from gpu_node.core import events
from gpu_node.core.commands import SendResult, SendUpdate
from gpu_node.core.events import TrainedUpdate
from gpu_node.core.limits import cause_of
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.channel import describe_error, rejection_in
from gpu_node.shell.link.control import CoordinatorStream
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import BlobSource, Download
from gpu_node.shell.transfer.inputs import Datasets, InitialModels, Models, fetch_blobs
from gpu_node.shell.transfer.results import ResultSending
from gpu_node.shell.transfer.signed_data import check_signed_data
from gpu_node.shell.transfer.uploads import Uploader
from hypergpu.assignment import AnyAssignment, Assignment, FailureCause, Lease, PackedAssignment
from hypergpu.blobs import BlobRef
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import Bytes
from hypergpu.wire.bulk_ranges import BulkBrokenError

_TRANSIENT = frozenset(
    {
        Reason.NOT_READY,
        Reason.RATE_LIMITED,
        Reason.STREAM_SILENT,
        Reason.CALL_BROKEN,
        Reason.NONCE_REPLAYED,
        Reason.OFFSET_MISMATCH,
        Reason.DISK_FULL,
        Reason.STORE_UNREACHABLE,
        Reason.VERSION_MISMATCH,
        Reason.EPOCH_CLOSED,
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


_TRANSFER_ERRORS = (
    grpc.aio.AioRpcError,
    BulkBrokenError,
    HyperGPUError,
    TimeoutError,
    OSError,
)
"""Errors by which a transfer ends."""


class TransferTasks:
    """At most one download and one upload for each lease."""

    def __init__(
        self,
        stream: CoordinatorStream,
        cache: BlobCache,
        uploader: Uploader,
        initial_models: InitialModels,
        event_queue: EventQueue,
        *,
        paths: StatePaths,
    ) -> None:
        self._paths = paths
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
        self.blobs: dict[Lease, tuple[Path, ...]] = {}
        """Blobs of packed work that the node has."""
        self._needed: dict[Lease, frozenset[Digest]] = {}
        """Blobs of the same, which the cache keeps."""
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

    def fetch(self, assignment: AnyAssignment, leases: Collection[Lease] = ()) -> None:
        """Fetch the inputs of an assignment, unless that is under way.

        Args:
            assignment: What is to be done.
            leases: All that the node has: inputs of others are forgotten.
        """
        lease = assignment.lease
        self.blobs = {each: paths for each, paths in self.blobs.items() if each in leases}
        self._needed = {each: names for each, names in self._needed.items() if each in leases}
        if isinstance(assignment, Assignment):
            return self._begin("fetch", lease, lambda calls: self._fetch(calls, assignment))
        if assignment.inputs:
            return self._begin("fetch", lease, lambda calls: self._fetch_blobs(calls, assignment))
        self.blobs[lease] = ()
        return self._event_queue.put(events.InputsFetched(at_ms=monotonic_ms(), lease=lease))

    async def bring(self, blobs: Sequence[BlobRef]) -> tuple[Path, ...]:
        """Blobs that a call to the work at hand names.

        Raises:
            HyperGPUError: COORDINATOR_UNREACHABLE, there is no link, or a blob is not to be had.
        """
        calls = self._stream.calls
        if calls is None:
            raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, "there is no link")
        try:
            return await fetch_blobs(self._download, BlobSource(calls), blobs)
        except _TRANSFER_ERRORS as error:
            raise HyperGPUError(Reason.BLOB_UNKNOWN, describe_error(error)) from error
        except _CHANNEL_CLOSED as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            detail = "the channel was closed"
            raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail) from error

    def forget(self, paths: Sequence[Path]) -> None:
        """Let the cache go of blobs that the worker has links to."""
        self._cache.discard(Digest(path.name) for path in paths)

    def upload(self, command: SendUpdate) -> None:
        """Send an update, unless that is under way."""
        self._begin("upload", command.assignment.lease, lambda calls: self._upload(calls, command))

    def contribute(self, command: SendResult) -> None:
        """Send the result of packed work, unless that is under way."""
        lease = command.assignment.lease
        self._begin("upload", lease, lambda calls: self._contribute(calls, command))

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
        except _CHANNEL_CLOSED as error:
            task = asyncio.current_task()
            is_stopped = task is None or task.cancelling() > 0
            if isinstance(error, asyncio.CancelledError) and is_stopped:
                raise
            # Closing a channel cancels its calls, which looks like a stopped task.
            event_type = events.FetchBroken if kind == "fetch" else events.UploadBroken
            event = event_type(at_ms=monotonic_ms(), lease=lease, reason="the channel was closed")
        # From here on the session may ask again; a stopped task reports nothing.
        self._tasks.pop(key, None)
        self._event_queue.put(event)

    async def _fetch(self, calls: Calls, assignment: Assignment) -> events.NodeEvent:
        lease, task = assignment.lease, assignment.task
        before = self._received_before = self._download.received_bytes
        needed_digests = {task.model.digest, *(blob.digest for blob in (task.manifest,) if blob)}
        self._pin(lease, needed_digests | {delta.base for delta in assignment.deltas})
        dataset: Path | None = None
        try:
            deliveries = {assignment.newest_blob.digest: self._stream.take_delivery(lease)}
            source = BlobSource(calls, assignment.connections, deliveries)
            if task.manifest is not None:
                dataset = await self._datasets.fetch(source, task.manifest)
            model = await self._models.get(source, assignment, dataset)
            if self._download.received_bytes > before:
                await asyncio.to_thread(self._cache.trim)
        except _TRANSFER_ERRORS as error:
            has_progressed = self._download.received_bytes > before
            return _fetch_ended(lease, error, has_progressed=has_progressed)
        self.inputs = {lease: TrainingInputs(model, dataset)}
        return events.InputsFetched(at_ms=monotonic_ms(), lease=lease)

    async def _fetch_blobs(self, calls: Calls, assignment: PackedAssignment) -> events.NodeEvent:
        lease = assignment.lease
        before = self._received_before = self._download.received_bytes
        self._pin(lease, frozenset(blob.digest for blob in assignment.inputs))
        try:
            paths = await fetch_blobs(self._download, BlobSource(calls), assignment.inputs)
            await asyncio.to_thread(check_signed_data, assignment, tuple(paths))
            if self._download.received_bytes > before:
                await asyncio.to_thread(self._cache.trim)
        except _TRANSFER_ERRORS as error:
            has_progressed = self._download.received_bytes > before
            return _fetch_ended(lease, error, has_progressed=has_progressed)
        self.blobs[lease] = paths
        return events.InputsFetched(at_ms=monotonic_ms(), lease=lease)

    def _pin(self, lease: Lease, digests: Set[Digest]) -> None:
        """Keep the blobs of a lease, beside those of others that the node has."""
        self._needed[lease] = frozenset(digests)
        self._cache.pin(frozenset().union(*self._needed.values()))

    async def _upload(self, calls: Calls, command: SendUpdate) -> events.NodeEvent:
        assignment, update = command.assignment, command.update
        lease = assignment.lease
        try:
            await self._uploader.send(calls, assignment, update)
        except _TRANSFER_ERRORS as error:
            return await self._upload_ended(lease, update, error)
        return events.UploadAccepted(at_ms=monotonic_ms(), lease=lease)

    async def _contribute(self, calls: Calls, command: SendResult) -> events.NodeEvent:
        lease = command.assignment.lease
        attempt = ResultSending(calls, self._paths, self._uploader.result_signing)
        try:
            await attempt.run(command)
        except _TRANSFER_ERRORS as error:
            return _sending_ended(lease, error, has_progressed=attempt.has_progressed)
        return events.UploadAccepted(at_ms=monotonic_ms(), lease=lease)

    async def _upload_ended(
        self, lease: Lease, update: TrainedUpdate, broken: Exception
    ) -> events.NodeEvent:
        has_progressed = self._uploader.has_progressed
        rejection = rejection_in(broken)
        if rejection is None or rejection.reason is not Reason.DIGEST_MISMATCH:
            return _sending_ended(lease, broken, has_progressed=has_progressed)
        at_ms, reason = monotonic_ms(), describe_error(broken)
        try:
            await self._uploader.check_undamaged(lease, update)
        except (HyperGPUError, OSError) as error:
            return events.UploadRejected(at_ms=at_ms, lease=lease, reason=describe_error(error))
        return events.UploadBroken(
            at_ms=at_ms, lease=lease, reason=reason, has_progressed=has_progressed
        )


def _sending_ended(lease: Lease, broken: Exception, *, has_progressed: bool) -> events.NodeEvent:
    at_ms, reason = monotonic_ms(), describe_error(broken)
    rejection = rejection_in(broken)
    kind = None if rejection is None else rejection.reason
    if kind in _VOID:
        return events.UploadLate(at_ms=at_ms, lease=lease, reason=reason)
    if kind is not None and kind not in _TRANSIENT:
        return events.UploadRejected(at_ms=at_ms, lease=lease, reason=reason)
    return events.UploadBroken(
        at_ms=at_ms, lease=lease, reason=reason, has_progressed=has_progressed
    )


def _fetch_ended(lease: Lease, broken: Exception, *, has_progressed: bool) -> events.NodeEvent:
    at_ms, reason = monotonic_ms(), describe_error(broken)
    rejection = rejection_in(broken)
    is_lasting = rejection is not None and rejection.reason not in _TRANSIENT
    is_local = isinstance(broken, OSError) and not isinstance(broken, TimeoutError)
    if is_lasting or is_local:
        cause = FailureCause.OTHER if rejection is None else cause_of(rejection.reason)
        return events.FetchRejected(at_ms=at_ms, lease=lease, reason=reason, cause=cause)
    return events.FetchBroken(
        at_ms=at_ms, lease=lease, reason=reason, has_progressed=has_progressed
    )
