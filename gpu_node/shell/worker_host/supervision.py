"""The daemon's side of its worker: the trainings it is given. Replies of the worker become events;
what is done about them is the core's.
"""

import asyncio
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path

import structlog

from gpu_node.core import events
from gpu_node.shell.worker import protocol
from gpu_node.shell.worker_host.spare import SpareWorker
from gpu_node.shell.worker_host.worker_process import WorkerDeath, WorkerLaunch, WorkerProcess
from hypergpu.assignment import FailureCause, Lease, Task
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId

log = structlog.get_logger()


def worker_caps(threads: int, memory_bytes: int, step_floor_ms: int = 0) -> dict[str, str]:
    """The owner's caps as the worker reads them; 0 is none."""
    caps = {
        protocol.THREADS: threads,
        protocol.MEMORY_BYTES: memory_bytes,
        protocol.STEP_FLOOR_MS: step_floor_ms,
    }
    return {name: str(cap) for name, cap in caps.items() if cap}


_ABORT_GRACE_S = 10.0
"""A worker may be deep in one inner step; one that takes longer hangs."""
_REPORT_INTERVAL_MS = 1000
"""Time between two reports of progress; the last step is always reported."""


class WorkerSupervisor:
    """The worker as the daemon uses it.

    Args:
        launch: How the worker is started.
        report: Called with each event.
        report_progress: Called with progress that the coordinator should know, at most once a
            second.
        launch_of: Says how a job's worker is started; None: like any other.
        spares: Where a spare worker is kept, and how that one is started; None: there is none.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        *,
        report: Callable[[events.NodeEvent], None],
        report_progress: Callable[[protocol.ShardProgress], None] = lambda _: None,
        launch_of: Callable[[JobId], WorkerLaunch | None] = lambda _: None,
        spares: tuple[SpareWorker, WorkerLaunch] | None = None,
    ) -> None:
        self._process = WorkerProcess(launch, on_reply=self._take_reply, on_death=self._note_death)
        self._launch = launch
        self._own_launch: WorkerLaunch | None = None
        """How the present job's worker is started, where not like any other."""
        self._launch_of = launch_of
        self._spare = None if spares is None else spares[0]
        self._spare_launch = launch if spares is None else spares[1]
        self._unused_home = ""
        self._reviewing: asyncio.Task[None] | None = None
        self._report = report
        self._report_progress = report_progress
        self.report_output: Callable[[protocol.CallOutput], None] = lambda _: None
        """Called with what comes of calls to the work at hand."""
        self._open_calls: set[int] = set()
        self._capabilities: asyncio.Future[protocol.WorkerCapabilities] | None = None
        self._is_ready = False
        self._is_stopping = False
        self._job_id: JobId | None = None
        self._lease: Lease | None = None
        self._progress_at_ms = 0
        self._abort_timers: dict[Lease, asyncio.TimerHandle] = {}
        self._initial_models: dict[int, asyncio.Future[protocol.InitialModelReply]] = {}
        self._numbers = count()
        self._turn = asyncio.Lock()
        """Held while the worker is given work, or ended to be started anew."""

    @property
    def is_at_work(self) -> bool:
        """Whether it has a shard to train or a model to write."""
        return self._lease is not None or bool(self._initial_models)

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None when there is none."""
        return self._process.process_id

    def clean_homes(self) -> tuple[str, ...]:
        """Homes of workers that have seen no job: the spare's, and that of one just taken."""
        reserve = "" if self._spare is None else self._spare.home
        return tuple(home for home in (reserve, self._unused_home) if home)

    async def capabilities(self, limit_s: float | None = None) -> protocol.WorkerCapabilities:
        """Start the worker and wait until it has named its capabilities.

        Args:
            limit_s: Time after which a start that hangs is ended; None: it may take any time.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it died before it was ready.
        """
        loop = asyncio.get_running_loop()
        self._capabilities = loop.create_future()
        await self._process.ensure_started()
        if limit_s is None:
            return await self._capabilities
        reason = f"it was not ready within {limit_s:g} s"
        end_timer = loop.call_later(limit_s, self.end_worker, reason)
        try:
            return await self._capabilities
        finally:
            end_timer.cancel()

    async def start_worker(self) -> None:
        """Start the worker without work; a ready one is reported again."""
        await self._process.ensure_started()
        if self._is_ready:
            self._report(events.WorkerReady(at_ms=monotonic_ms()))

    def end_worker(self, reason: str, cause: FailureCause = FailureCause.OTHER) -> None:
        """End the worker at once: reported as a death for this reason."""
        self._process.kill(reason, cause)

    async def stop(self) -> None:
        """End the worker; its death is not reported."""
        self._is_stopping = True
        if self._reviewing is not None:
            self._reviewing.cancel()
        if self._spare is not None:
            await self._spare.end()
        await self._process.stop()

    async def begin_job(self, job_id: JobId) -> None:
        """End a worker that has worked for another job: what it saw, no other job is to see.

        That is no death for the session, unless it waits for the end of a shard. So ends one that
        does not see a folder that this job's shards are of.
        """
        own_launch = self._launch_of(job_id)
        async with self._turn:
            is_other = self._job_id not in {None, job_id} or own_launch != self._own_launch
            is_free = self._lease is None
            if is_other and self._process.process_id is not None:
                await self._end_unnoticed()
            self._job_id, self._own_launch = job_id, own_launch
            self._process.launch = own_launch or self._launch
            if is_other and is_free and own_launch is None:
                self._use_spare()

    def _use_spare(self) -> None:
        """Take the spare, if one is ready, in place of a worker that is still to be started."""
        spare = self._spare.take() if self._spare is not None else None
        if spare is None or self._process.process_id is not None:
            return
        self._launch, self._spare_launch = spare.launch, self._launch
        self._process, self._unused_home = spare, spare.launch.home
        spare.bind(self._take_reply, self._note_death)
        spare.send(protocol.UseSpare())
        log.info("a spare worker takes the job", pid=spare.process_id, job_id=self._job_id)

    def _review_spare(self) -> None:
        """See beside the work whether there is to be a spare."""
        is_under_way = self._reviewing is not None and not self._reviewing.done()
        if self._spare is None or is_under_way or self._is_stopping:
            return
        review = self._spare.review(self._spare_launch)
        self._reviewing = asyncio.create_task(review, name="spare worker")

    async def start_anew(self, limit_s: float) -> protocol.WorkerCapabilities:
        """End the worker, start another and wait until it has named its capabilities.

        Args:
            limit_s: As of `capabilities`; meanwhile no work is begun.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it died before it was ready.
        """
        async with self._turn:
            if self._spare is not None:
                await self._spare.end()
            await self._end_unnoticed()
            return await self.capabilities(limit_s)

    async def _end_unnoticed(self) -> None:
        self._is_stopping = self._lease is None
        await self._process.stop()
        self._is_stopping = False

    async def compute(self, request: protocol.TrainShard | protocol.DoWork) -> None:
        """Train a shard or do other work; its end is reported."""
        async with self._turn:
            self._lease, self._unused_home = request.lease, ""
            await self._process.ensure_started()
            self._process.send(request)

    def abort(self, lease: Lease) -> None:
        """Drop a shard. A worker that does not answer in time is ended."""
        if lease != self._lease:
            return
        loop, reason = asyncio.get_running_loop(), "it would not abort"
        timer = loop.call_later(_ABORT_GRACE_S, self._process.kill, reason)
        self._abort_timers[lease] = timer
        self._process.send(protocol.AbortShard(lease))

    async def write_initial_model(
        self, task: Task, seed: int, path: Path, dataset: Path | None = None
    ) -> None:
        """Have the worker write a job's first model, once its work at hand is done.

        Args:
            task: The job's.
            seed: The job's.
            path: Gets the model.
            dataset: The job's data as the worker sees them; None: it has none.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it cannot or died first.
        """
        number = next(self._numbers)
        request = protocol.WriteInitialModel(
            number=number,
            workload=task.workload,
            workload_version=task.workload_version,
            options=task.options,
            seed=seed,
            model_path=str(path),
            data_dir="" if dataset is None else str(dataset),
        )
        answer: asyncio.Future[protocol.InitialModelReply] = (
            asyncio.get_running_loop().create_future()
        )
        self._initial_models[number] = answer
        try:
            async with self._turn:
                self._unused_home = ""
                await self._process.ensure_started()
                self._process.send(request)
            reply = await answer
        finally:
            del self._initial_models[number]
        if isinstance(reply, protocol.InitialModelFailed):
            raise HyperGPUError(Reason.WORKER_UNUSABLE, reply.reason)

    def _take_reply(self, reply: protocol.Reply) -> None:
        if isinstance(reply, protocol.ShardFailed | protocol.InitialModelFailed) and reply.is_fatal:
            # It leaves now; its death is reported.
            self._process.coming_death = WorkerDeath(reply.reason, reply.cause)
            return
        match reply:
            case protocol.WorkerCapabilities():
                self._is_ready = True
                if self._capabilities is not None and not self._capabilities.done():
                    self._capabilities.set_result(reply)
                self._report(events.WorkerReady(at_ms=monotonic_ms()))
            case protocol.InitialModelWritten() | protocol.InitialModelFailed():
                # Nobody may wait for the answer any more.
                answer = self._initial_models.get(reply.number)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
            case protocol.ShardProgress() | protocol.CallOutput():
                self._note_course(reply)
            case protocol.SpareReady():
                pass  # It is the worker already.
            case _:
                self._end_work(reply)

    @property
    def lease(self) -> Lease | None:
        """Lease of the work at hand; None: there is none."""
        return self._lease

    def call(self, call: int, body: bytes) -> bool:
        """Have the work at hand answer a call. False: there is none that could."""
        if self._lease is None or not self._is_ready:
            return False
        self._open_calls.add(call)
        self._process.send(protocol.CallWork(self._lease, call, body))
        return True

    def cancel_call(self, call: int) -> None:
        """Have a call answered no more."""
        if self._lease is not None and call in self._open_calls:
            self._open_calls.discard(call)
            self._process.send(protocol.CancelCall(self._lease, call))

    def cancel_calls(self) -> None:
        """Have no call that is open answered any more."""
        for call in tuple(self._open_calls):
            self.cancel_call(call)

    def _note_output(self, output: protocol.CallOutput) -> None:
        is_of_call = not output.call or output.call in self._open_calls
        if output.lease != self._lease or not is_of_call:
            return
        if output.is_last:
            self._open_calls.discard(output.call)
        self.report_output(output)

    def _end_calls(self) -> None:
        """Say of every open call that what was to answer it is gone: somebody waits for it."""
        calls, self._open_calls = self._open_calls, set()
        if self._lease is not None and not self._is_stopping:
            for call in sorted(calls):
                output = protocol.CallOutput(self._lease, call, b"", is_last=True, is_urgent=True)
                self.report_output(output)

    def _note_course(self, reply: protocol.ShardProgress | protocol.CallOutput) -> None:
        if isinstance(reply, protocol.CallOutput):
            self._note_output(reply)
        else:
            self._note_progress(reply)

    def _note_progress(self, progress: protocol.ShardProgress) -> None:
        at_ms, done_steps = monotonic_ms(), progress.steps_done
        is_early = at_ms - self._progress_at_ms < _REPORT_INTERVAL_MS
        if progress.lease != self._lease or (is_early and done_steps != progress.steps_total):
            return
        self._progress_at_ms = at_ms
        loss = progress.loss if math.isfinite(progress.loss) else None
        self._report(
            events.TrainingProgressed(
                at_ms=at_ms, lease=progress.lease, steps_done=done_steps, loss=loss
            )
        )
        self._report_progress(progress)

    def _end_work(
        self,
        reply: protocol.ShardTrained
        | protocol.WorkDone
        | protocol.ShardFailed
        | protocol.ShardAborted,
    ) -> None:
        lease, at_ms = reply.lease, monotonic_ms()
        if (timer := self._abort_timers.pop(lease, None)) is not None:
            timer.cancel()
        if lease != self._lease:
            return
        self._lease = None
        self._open_calls.clear()
        self._review_spare()
        match reply:
            case protocol.ShardTrained(update=update):
                self._report(events.TrainingFinished(at_ms=at_ms, lease=lease, update=update))
            case protocol.WorkDone(result=result, blob=blob):
                done_event = events.WorkFinished(at_ms=at_ms, lease=lease, result=result, blob=blob)
                self._report(done_event)
            case protocol.ShardFailed(reason=reason, cause=cause):
                self._report(
                    events.TrainingFailed(at_ms=at_ms, lease=lease, reason=reason, cause=cause)
                )
            case protocol.ShardAborted():
                self._report(events.TrainingAborted(at_ms=at_ms, lease=lease))

    def _note_death(self, death: WorkerDeath) -> None:
        reason = death.reason
        self._end_calls()
        was_ready, self._is_ready, self._lease = self._is_ready, False, None
        for timer in self._abort_timers.values():
            timer.cancel()
        self._abort_timers.clear()
        if self._capabilities is not None and not self._capabilities.done():
            detail = f"the worker never got ready: {reason}"
            self._capabilities.set_exception(HyperGPUError(Reason.WORKER_UNUSABLE, detail))
        for answer in self._initial_models.values():
            if not answer.done():
                error = HyperGPUError(Reason.WORKER_UNUSABLE, f"the worker died: {reason}")
                answer.set_exception(error)
        if self._is_stopping:
            log.info("the worker ended", reason=reason)
            return
        log.warning("the worker ended", reason=reason)
        self._report(
            events.WorkerDied(
                at_ms=monotonic_ms(), reason=reason, cause=death.cause, was_ready=was_ready
            )
        )
