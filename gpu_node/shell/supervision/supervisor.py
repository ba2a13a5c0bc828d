"""Supervises the worker: gives it one shard at a time and turns its replies into events."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

import structlog

from gpu_node.core import events
from gpu_node.shell.supervision.process import WorkerProcess
from gpu_node.shell.worker import messages
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.process.clock import monotonic_ms
from hypergpu.statements.assignment import Lease, Task

log = structlog.get_logger()

_ABORT_GRACE_S = 10.0
"""A worker may be deep in one inner step; one that takes longer hangs."""
_REPORT_INTERVAL_MS = 1000
"""Time between two reports of progress; the last step is always reported."""


class WorkerSupervisor:
    """The worker as the daemon uses it.

    Args:
        command: Command line of the worker.
        environment: Environment of the process.
        report: Called with each event.
        report_progress: Called with progress that the coordinator should know, at most once a
            second.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        report: Callable[[events.NodeEvent], None],
        report_progress: Callable[[messages.ShardProgress], None] = lambda _: None,
    ) -> None:
        self._process = WorkerProcess(
            command, environment, on_reply=self._take_reply, on_death=self._note_death
        )
        self._report = report
        self._report_progress = report_progress
        self._capabilities: asyncio.Future[messages.WorkerCapabilities] | None = None
        self._is_ready = False
        self._is_stopping = False
        self._lease: Lease | None = None
        self._progress_at_ms = 0
        self._abort_timers: dict[Lease, asyncio.TimerHandle] = {}
        self._initial_models: dict[int, asyncio.Future[messages.InitialModelReply]] = {}
        self._numbers = count()

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None when there is none."""
        return self._process.process_id

    async def capabilities(self) -> messages.WorkerCapabilities:
        """Start the worker and wait until it has named its capabilities.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it died before it was ready.
        """
        self._capabilities = asyncio.get_running_loop().create_future()
        await self._process.ensure_started()
        return await self._capabilities

    async def start_worker(self) -> None:
        """Start the worker without work; a ready one is reported again."""
        await self._process.ensure_started()
        if self._is_ready:
            self._report(events.WorkerReady(at_ms=monotonic_ms()))

    def end_worker(self, reason: str) -> None:
        """End the worker at once: reported as a death for this reason."""
        self._process.kill(reason)

    async def stop(self) -> None:
        """End the worker; its death is not reported."""
        self._is_stopping = True
        await self._process.stop()

    async def train(self, request: messages.TrainShard) -> None:
        """Train a shard; its end is reported."""
        self._lease = request.lease
        await self._process.ensure_started()
        self._process.send(request)

    def abort(self, lease: Lease) -> None:
        """Drop a shard. A worker that does not answer in time is ended."""
        if lease != self._lease:
            return
        loop, reason = asyncio.get_running_loop(), "it would not abort"
        timer = loop.call_later(_ABORT_GRACE_S, self._process.kill, reason)
        self._abort_timers[lease] = timer
        self._process.send(messages.AbortShard(lease))

    async def write_initial_model(self, task: Task, seed: int, path: Path) -> None:
        """Have the worker write a job's first model, once its work at hand is done.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it cannot or died first.
        """
        number = next(self._numbers)
        request = messages.WriteInitialModel(
            number=number,
            workload=task.workload,
            workload_version=task.workload_version,
            options=task.options,
            seed=seed,
            model_path=str(path),
        )
        answer: asyncio.Future[messages.InitialModelReply] = (
            asyncio.get_running_loop().create_future()
        )
        self._initial_models[number] = answer
        try:
            await self._process.ensure_started()
            self._process.send(request)
            reply = await answer
        finally:
            del self._initial_models[number]
        if isinstance(reply, messages.InitialModelFailed):
            raise HyperGPUError(Reason.WORKER_UNUSABLE, reply.reason)

    def _take_reply(self, reply: messages.Reply) -> None:
        if isinstance(reply, messages.ShardFailed | messages.InitialModelFailed) and reply.is_fatal:
            self._process.death_reason = reply.reason  # it leaves now; its death is reported
            return
        match reply:
            case messages.WorkerCapabilities():
                self._is_ready = True
                if self._capabilities is not None and not self._capabilities.done():
                    self._capabilities.set_result(reply)
                self._report(events.WorkerReady(at_ms=monotonic_ms()))
            case messages.InitialModelWritten() | messages.InitialModelFailed():
                # Nobody may wait for the answer any more.
                answer = self._initial_models.get(reply.number)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
            case messages.ShardProgress():
                self._note_progress(reply)
            case _:
                self._end_training(reply)

    def _note_progress(self, progress: messages.ShardProgress) -> None:
        at_ms, done = monotonic_ms(), progress.steps_done
        is_early = at_ms - self._progress_at_ms < _REPORT_INTERVAL_MS
        if progress.lease != self._lease or (is_early and done != progress.steps_total):
            return
        self._progress_at_ms = at_ms
        self._report(events.TrainingProgressed(at_ms=at_ms, lease=progress.lease, steps_done=done))
        self._report_progress(progress)

    def _end_training(
        self, reply: messages.ShardTrained | messages.ShardFailed | messages.ShardAborted
    ) -> None:
        lease, at_ms = reply.lease, monotonic_ms()
        if (timer := self._abort_timers.pop(lease, None)) is not None:
            timer.cancel()
        if lease != self._lease:
            return
        self._lease = None
        match reply:
            case messages.ShardTrained(update=update):
                self._report(events.TrainingFinished(at_ms=at_ms, lease=lease, update=update))
            case messages.ShardFailed(reason=reason):
                self._report(events.TrainingFailed(at_ms=at_ms, lease=lease, reason=reason))
            case messages.ShardAborted():
                self._report(events.TrainingAborted(at_ms=at_ms, lease=lease))

    def _note_death(self, reason: str) -> None:
        was_ready, self._is_ready, self._lease = self._is_ready, False, None
        for timer in self._abort_timers.values():
            timer.cancel()
        self._abort_timers.clear()
        if self._capabilities is not None and not self._capabilities.done():
            detail = f"the worker never got ready: {reason}"
            self._capabilities.set_exception(HyperGPUError(Reason.WORKER_UNUSABLE, detail))
        for answer in self._initial_models.values():
            if not answer.done():
                died = HyperGPUError(Reason.WORKER_UNUSABLE, f"the worker died: {reason}")
                answer.set_exception(died)
        if self._is_stopping:
            log.info("the worker ended", reason=reason)
            return
        log.warning("the worker ended", reason=reason)
        self._report(events.WorkerDied(at_ms=monotonic_ms(), reason=reason, was_ready=was_ready))
