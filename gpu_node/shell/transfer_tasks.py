"""Downloads and uploads as tasks, one for each lease, and what their ends mean to the machine."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NamedTuple

import grpc
import structlog

from gpu_node.core.commands import Upload
from gpu_node.core.events import (
    Event,
    FetchBroken,
    FetchRefused,
    InputsFetched,
    UpdateAccepted,
    UpdateLate,
    UpdateRefused,
    UploadBroken,
)
from gpu_node.core.update import Update
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.control import ControlLink
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.link.refusals import refusal_in, why
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.datasets import Datasets
from gpu_node.shell.transfer.download import Download
from gpu_node.shell.transfer.drawing import Drawing
from gpu_node.shell.transfer.models import Models
from gpu_node.shell.transfer.upload import Uploader
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.process.clock import monotonic_ms
from hypergpu.statements.assignment import Assignment, Lease

log = structlog.get_logger()

_WORTH_ANOTHER_TRY = frozenset(
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
"""Refusals of a transfer after which the next try may succeed."""
_VOID = frozenset({Reason.UPDATE_LATE, Reason.LEASE_STALE, Reason.JOB_UNKNOWN, Reason.JOB_PHASE})
"""Refusals of an update that nobody waits for any more."""


class Inputs(NamedTuple):
    """What a training needs, on disk."""

    model: Path
    dataset: Path | None


_CHANNEL_CLOSED = (
    asyncio.CancelledError,
    asyncio.InvalidStateError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
)
"""What awaits on a channel, or begins a call on it, gets when the channel is closed meanwhile."""


class TransferTasks:
    """At most one download and one upload for each lease."""

    def __init__(
        self,
        link: ControlLink,
        cache: BlobCache,
        uploader: Uploader,
        drawing: Drawing,
        event_queue: EventQueue,
    ) -> None:
        self._link = link
        self._cache = cache
        self._download = Download(cache, link.prober.findings)
        self._models = Models(cache, self._download, drawing)
        self._datasets = Datasets(cache, self._download)
        self._uploader = uploader
        self._report = event_queue.event
        self._inspect = event_queue.inspect
        self._tasks: dict[tuple[str, Lease], asyncio.Task[None]] = {}
        self.inputs: dict[Lease, Inputs] = {}
        """Of the newest assignment fetched for."""

    def fetch(self, assignment: Assignment) -> None:
        """Bring an assignment's inputs, unless that is under way."""
        self._begin("fetch", assignment.lease, lambda calls: self._fetch(calls, assignment))

    def stop_fetch(self, lease: Lease) -> None:
        """Bring them no more."""
        self._end("fetch", lease)

    def upload(self, command: Upload) -> None:
        """Send an update, unless that is under way."""
        self._begin("upload", command.assignment.lease, lambda calls: self._upload(calls, command))

    def stop_upload(self, lease: Lease) -> None:
        """Send it no more."""
        self._end("upload", lease)

    async def close(self) -> None:
        """End every task."""
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(
        self, kind: str, lease: Lease, errand: Callable[[Calls], Coroutine[None, None, Event]]
    ) -> None:
        calls = self._link.calls
        # Without a link the machine asks again once there is one.
        if calls is None or (kind, lease) in self._tasks:
            return
        task = asyncio.create_task(self._run((kind, lease), lambda: errand(calls)), name=kind)
        task.add_done_callback(self._inspect)
        self._tasks[kind, lease] = task

    def _end(self, kind: str, lease: Lease) -> None:
        task = self._tasks.pop((kind, lease), None)
        if task is not None:
            task.cancel()

    async def _run(
        self, key: tuple[str, Lease], errand: Callable[[], Coroutine[None, None, Event]]
    ) -> None:
        kind, lease = key
        try:
            event = await errand()
        except _CHANNEL_CLOSED as closed:
            task = asyncio.current_task()
            is_stopped = task is None or task.cancelling() > 0
            if isinstance(closed, asyncio.CancelledError) and is_stopped:
                raise
            # Closing a channel cancels the calls on it, which looks the same to who awaits them.
            broken = FetchBroken if kind == "fetch" else UploadBroken
            event = broken(at_ms=monotonic_ms(), lease=lease, reason="the channel was closed")
        # From here on the machine may ask again; a stopped errand reports nothing.
        self._tasks.pop(key, None)
        self._report(event)

    async def _fetch(self, calls: Calls, assignment: Assignment) -> Event:
        lease, task = assignment.lease, assignment.task
        before = self._download.received_bytes
        needed = {task.model.digest, *(blob.digest for blob in (task.manifest,) if blob)}
        self._cache.pin(frozenset(needed | {delta.base for delta in assignment.deltas}))
        try:
            async with self._link.lines.over(calls, assignment.connections) as over:
                dataset = await self._datasets.bring(over, task.manifest) if task.manifest else None
                model = await self._models.bring(over, assignment)
            if self._download.received_bytes > before:
                await asyncio.to_thread(self._cache.trim)
        except (grpc.aio.AioRpcError, HyperGPUError, TimeoutError, OSError) as broken:
            has_progressed = self._download.received_bytes > before
            return _fetch_ended(lease, broken, has_progressed=has_progressed)
        self.inputs = {lease: Inputs(model, dataset)}
        return InputsFetched(at_ms=monotonic_ms(), lease=lease)

    async def _upload(self, calls: Calls, command: Upload) -> Event:
        assignment, update = command.assignment, command.update
        lease = assignment.lease
        try:
            async with self._link.lines.over(calls, assignment.connections) as over:
                await self._uploader.send(over, assignment, update)
        except (grpc.aio.AioRpcError, HyperGPUError, OSError) as broken:
            return await self._upload_ended(lease, update, broken)
        return UpdateAccepted(at_ms=monotonic_ms(), lease=lease)

    async def _upload_ended(self, lease: Lease, update: Update, broken: Exception) -> Event:
        refused, reason = _refusal(broken), why(broken)
        if refused is not None and refused.reason is Reason.DIGEST_MISMATCH:
            try:
                await self._uploader.refuse_damaged(lease, update)
            except (HyperGPUError, OSError) as damaged:
                return UpdateRefused(at_ms=monotonic_ms(), lease=lease, reason=why(damaged))
            refused = None
        if refused is not None and refused.reason in _VOID:
            return UpdateLate(at_ms=monotonic_ms(), lease=lease, reason=reason)
        if refused is not None and refused.reason not in _WORTH_ANOTHER_TRY:
            return UpdateRefused(at_ms=monotonic_ms(), lease=lease, reason=reason)
        return UploadBroken(
            at_ms=monotonic_ms(),
            lease=lease,
            reason=reason,
            has_progressed=self._uploader.has_progressed,
        )


def _refusal(broken: Exception) -> HyperGPUError | None:
    if isinstance(broken, grpc.aio.AioRpcError):
        return refusal_in(broken)
    return broken if isinstance(broken, HyperGPUError) else None


def _fetch_ended(lease: Lease, broken: Exception, *, has_progressed: bool) -> Event:
    refused = _refusal(broken)
    is_lasting = refused is not None and refused.reason not in _WORTH_ANOTHER_TRY
    is_ours = isinstance(broken, OSError) and not isinstance(broken, TimeoutError)
    if is_lasting or is_ours:
        return FetchRefused(at_ms=monotonic_ms(), lease=lease, reason=why(broken))
    return FetchBroken(
        at_ms=monotonic_ms(), lease=lease, reason=why(broken), has_progressed=has_progressed
    )
