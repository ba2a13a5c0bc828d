"""The daemon's side of its worker: the process, and the trainings it is given. Replies of the
worker become events; what is done about them is the core's.
"""

import asyncio
import contextlib
import math
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from gpu_node.core import events
from gpu_node.shell.worker import protocol
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.statements import Lease, Task
from hypergpu.streams import FrameError, frame, monotonic_ms, next_frame

log = structlog.get_logger()

_STOP_GRACE_S = 5.0
_LOG_LINE_BYTES = 1 << 16


def worker_caps(threads: int, memory_bytes: int, step_floor_ms: int = 0) -> dict[str, str]:
    """The owner's caps as the worker reads them; 0 is none."""
    caps = {
        protocol.THREADS: threads,
        protocol.MEMORY_BYTES: memory_bytes,
        protocol.STEP_FLOOR_MS: step_floor_ms,
    }
    return {name: str(cap) for name, cap in caps.items() if cap}


class WorkerLaunch(NamedTuple):
    """How a worker is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


class WorkerProcess:
    """One worker. After a death the next `ensure_started` spawns another.

    Args:
        command: Command line.
        environment: Environment of the process.
        on_reply: Called with each message of the worker.
        on_death: Called with the reason after each death, and when it cannot be spawned.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        on_reply: Callable[[protocol.Reply], None],
        on_death: Callable[[str], None],
    ) -> None:
        self.launch = WorkerLaunch(command, environment)
        """How the next one is started."""
        self._on_reply = on_reply
        self._on_death = on_death
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._spawning = asyncio.Lock()
        self.death_reason = ""
        """Reason of the coming death, where it is known before."""

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    async def ensure_started(self) -> None:
        """Spawn the worker unless it is there."""
        async with self._spawning:
            if self._process is None:
                await self._spawn()

    def send(self, request: protocol.Request) -> None:
        """Send without waiting for the worker to read: one that hangs may not."""
        process = self._process
        # One that just died is reported as a death.
        if process is not None and process.stdin is not None:
            process.stdin.write(frame(protocol.encode(request)))

    def kill(self, reason: str) -> None:
        """End the worker at once."""
        if self._process is not None:
            self.death_reason = self.death_reason or reason
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """End the worker in good order, and kill it should it not leave."""
        watching = self._watching
        if self._process is None or watching is None:
            return
        self.send(protocol.StopWorker())
        await asyncio.wait([watching], timeout=_STOP_GRACE_S)
        self.kill("")
        await asyncio.wait([watching])

    async def _spawn(self) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.launch.command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=dict(self.launch.environment),
                limit=_LOG_LINE_BYTES,
            )
        except OSError as broken:
            self._on_death(f"it cannot be started: {broken.strerror}")
            return
        self._process, self.death_reason = process, ""
        self._watching = asyncio.create_task(self._watch(process), name="worker")
        log.info("a worker was started", pid=process.pid, command=self.launch.command[-1])

    async def _watch(self, process: Process) -> None:
        logging = asyncio.create_task(self._log(process))
        await self._read_replies(process)
        ending = asyncio.create_task(self._await_end(process))
        # Its own children may hold its pipes open for any time: that is not waited for.
        await asyncio.wait([logging, ending], timeout=_STOP_GRACE_S)
        if process.returncode is None:
            self.kill("it closed its pipe and did not leave")
            await asyncio.wait([ending], timeout=_STOP_GRACE_S)
        logging.cancel()
        ending.cancel()
        self._process = None
        self._on_death(self.death_reason or _exit_reason(process.returncode))

    async def _read_replies(self, process: Process) -> None:
        if process.stdout is None:
            raise AssertionError("the worker was spawned with a pipe")
        try:
            while (payload := await next_frame(process.stdout)) is not None:
                self._on_reply(protocol.decode_reply(payload))
        except (FrameError, msgspec.MsgspecError, UnicodeError) as broken:
            self.kill(f"it is not understood: {broken}")

    async def _await_end(self, process: Process) -> None:
        """Wait for a process. Asyncio takes it for alive until all its output is read."""
        while process.stdout is not None and await process.stdout.read(_LOG_LINE_BYTES):
            pass
        await process.wait()

    async def _log(self, process: Process) -> None:
        if process.stderr is None:
            return
        while line := await _line(process.stderr):
            log.info(line, pid=process.pid)


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line; one that is too long comes in pieces."""
    try:
        raw = await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as ended:
        raw = ended.partial
    except asyncio.LimitOverrunError as overrun:
        raw = await stream.read(max(1, overrun.consumed))
    text = raw.decode("utf-8", "replace")
    return text.rstrip() or (" " if raw else "")


def _exit_reason(status: int | None) -> str:
    if status is None:
        return "it cannot be ended"
    # A sandbox says so of what it ran, as shells do.
    number = status - 128 if status > 128 else -status
    if number <= 0:
        return f"it left with status {status}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(number).name}"
    return f"it was ended by signal {number}"


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
        launch_of: Says how a job's worker is started; None: like any other.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        report: Callable[[events.NodeEvent], None],
        report_progress: Callable[[protocol.ShardProgress], None] = lambda _: None,
        launch_of: Callable[[JobId], WorkerLaunch | None] = lambda _: None,
    ) -> None:
        self._process = WorkerProcess(
            command, environment, on_reply=self._take_reply, on_death=self._note_death
        )
        self._launch = WorkerLaunch(command, environment)
        self._launch_of = launch_of
        self._report = report
        self._report_progress = report_progress
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
        ending = loop.call_later(limit_s, self.end_worker, reason)
        try:
            return await self._capabilities
        finally:
            ending.cancel()

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

    async def begin_job(self, job_id: JobId) -> None:
        """End a worker that has worked for another job: what it saw, no other job is to see.

        That is no death for the session, unless it waits for the end of a shard. So ends one that
        does not see a folder that this job's shards are of.
        """
        launch = self._launch_of(job_id) or self._launch
        async with self._turn:
            is_other = self._job_id not in {None, job_id} or launch != self._process.launch
            if is_other and self._process.process_id is not None:
                await self._end_unnoticed()
            self._job_id, self._process.launch = job_id, launch

    async def start_anew(self, limit_s: float) -> protocol.WorkerCapabilities:
        """End the worker, start another and wait until it has named its capabilities.

        Args:
            limit_s: As of `capabilities`; meanwhile no work is begun.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it died before it was ready.
        """
        async with self._turn:
            await self._end_unnoticed()
            return await self.capabilities(limit_s)

    async def _end_unnoticed(self) -> None:
        self._is_stopping = self._lease is None
        await self._process.stop()
        self._is_stopping = False

    async def train(self, request: protocol.TrainShard) -> None:
        """Train a shard; its end is reported."""
        async with self._turn:
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
                await self._process.ensure_started()
                self._process.send(request)
            reply = await answer
        finally:
            del self._initial_models[number]
        if isinstance(reply, protocol.InitialModelFailed):
            raise HyperGPUError(Reason.WORKER_UNUSABLE, reply.reason)

    def _take_reply(self, reply: protocol.Reply) -> None:
        if isinstance(reply, protocol.ShardFailed | protocol.InitialModelFailed) and reply.is_fatal:
            self._process.death_reason = reply.reason  # it leaves now; its death is reported
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
            case protocol.ShardProgress():
                self._note_progress(reply)
            case _:
                self._end_training(reply)

    def _note_progress(self, progress: protocol.ShardProgress) -> None:
        at_ms, done = monotonic_ms(), progress.steps_done
        is_early = at_ms - self._progress_at_ms < _REPORT_INTERVAL_MS
        if progress.lease != self._lease or (is_early and done != progress.steps_total):
            return
        self._progress_at_ms = at_ms
        loss = progress.loss if math.isfinite(progress.loss) else None
        self._report(
            events.TrainingProgressed(at_ms=at_ms, lease=progress.lease, steps_done=done, loss=loss)
        )
        self._report_progress(progress)

    def _end_training(
        self, reply: protocol.ShardTrained | protocol.ShardFailed | protocol.ShardAborted
    ) -> None:
        lease, at_ms = reply.lease, monotonic_ms()
        if (timer := self._abort_timers.pop(lease, None)) is not None:
            timer.cancel()
        if lease != self._lease:
            return
        self._lease = None
        match reply:
            case protocol.ShardTrained(update=update):
                self._report(events.TrainingFinished(at_ms=at_ms, lease=lease, update=update))
            case protocol.ShardFailed(reason=reason):
                self._report(events.TrainingFailed(at_ms=at_ms, lease=lease, reason=reason))
            case protocol.ShardAborted():
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
