"""Evaluations and gradients as tasks of an engine: names of files go in, measured values come out.

Wherever a task is computed, an evaluator's process of its own runs the workload's code, as beside
the coordinator: it sees no secret, and is ended where it takes too long.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import msgspec

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.process import (
    Evaluate,
    Evaluated,
    EvaluatorFailure,
    EvaluatorReply,
    GradientMeasured,
    Initialise,
    Initialised,
    MeasureGradient,
    MeasureShards,
    ModelRequest,
    ShardsMeasured,
    TryUpdate,
    UpdateTried,
)
from coordinator.shell.evaluator.seat import EvaluatorLimits, EvaluatorSeat, SeatMaker
from coordinator.shell.evaluator.threads import LIBRARY_THREADS, library_threads
from hypergpu.engine.engine import Engine
from hypergpu.engine.tasks import EngineTask
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.privacy import public_environment
from hypergpu.workloads.registry import UnknownWorkloadError, find

KIND = "evaluate"
_TIMES_LIMIT = 2
"""A task may wait for a GPU: it has so many times the time of an answer."""
_AT_ONCE = 64


class EvaluatorPlace(msgspec.Struct, frozen=True):
    """Where evaluators beside workers of an engine run, and what they may take."""

    data_dir: str
    """The coordinator's folder."""
    limits: EvaluatorLimits


class EvaluatorTask(msgspec.Struct, frozen=True):
    """A request of an evaluator, and the threads that its libraries take."""

    request: ModelRequest
    threads: tuple[str, ...]
    """As `library_threads` gives them."""
    job_id: JobId
    """The job that asks: a process serves one job."""
    place: EvaluatorPlace


_encoder = msgspec.msgpack.Encoder()
_tasks = msgspec.msgpack.Decoder(EvaluatorTask)
_replies: msgspec.msgpack.Decoder[EvaluatorReply] = msgspec.msgpack.Decoder(EvaluatorReply)


class EngineEvaluator:
    """Measures models by an engine, several at a time. Initial models, and what the engine cannot
    measure, are the business of the coordinator's own evaluator, as are the errors.
    """

    def __init__(self, engine: Engine, own: EvaluatorPool, place: EvaluatorPlace) -> None:
        self._engine = engine
        self._own = own
        self._place = place
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="evaluation")
        self._running_count = 0
        self._change = asyncio.Condition()

    async def initialise(self, job: EvaluatorJob, request: Initialise) -> Initialised:
        """See `EvaluatorPool`."""
        return await self._own.initialise(job, request)

    async def evaluate(self, job: EvaluatorJob, request: Evaluate) -> Evaluated:
        """See `EvaluatorPool`."""
        reply = await self._ask(job, request)
        return reply if isinstance(reply, Evaluated) else await self._own.evaluate(job, request)

    async def measure_gradient(
        self, job: EvaluatorJob, request: MeasureGradient
    ) -> GradientMeasured:
        """See `EvaluatorPool`."""
        reply = await self._ask(job, request)
        if isinstance(reply, GradientMeasured):
            return reply
        return await self._own.measure_gradient(job, request)

    async def measure_shards(self, job: EvaluatorJob, request: MeasureShards) -> ShardsMeasured:
        """See `EvaluatorPool`."""
        reply = await self._ask(job, request)
        if isinstance(reply, ShardsMeasured):
            return reply
        return await self._own.measure_shards(job, request)

    async def try_update(self, job: EvaluatorJob, request: TryUpdate) -> UpdateTried:
        """See `EvaluatorPool`."""
        reply = await self._ask(job, request)
        return reply if isinstance(reply, UpdateTried) else await self._own.try_update(job, request)

    def waiting_reason(self, job: EvaluatorJob) -> str:
        """See `EvaluatorPool`."""
        return self._own.waiting_reason(job)

    def end_job(self, job_id: JobId) -> None:
        """See `EvaluatorPool`. A task of an engine cannot be taken back: its time is bounded."""
        self._own.end_job(job_id)

    async def stop(self) -> None:
        """See `EvaluatorPool`. The engine ends with its owner."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._own.stop()

    async def _ask(self, job: EvaluatorJob, request: ModelRequest) -> EvaluatorReply | None:
        """The engine's answer; None: it lost the task."""
        arguments = _encoder.encode(
            EvaluatorTask(request, library_threads(), job.job_id, self._place)
        )
        limit_s = _TIMES_LIMIT * self._place.limits.answer_s
        task = EngineTask(KIND, arguments, wants_gpu=_uses_torch(request.workload), limit_s=limit_s)
        loop = asyncio.get_running_loop()
        # One worker is left to folds, which rounds wait for.
        async with self._change:
            await self._change.wait_for(
                lambda: self._running_count < max(1, self._engine.workers - 1)
            )
            self._running_count += 1
        try:
            (answer,) = await loop.run_in_executor(self._threads, self._engine.run, [task])
        finally:
            self._running_count -= 1
            async with self._change:
                self._change.notify()
        return None if answer is None else _replies.decode(answer)


def _uses_torch(workload: str) -> bool:
    try:
        return find(workload).kind == "torch"
    except UnknownWorkloadError:
        return False


def compute(arguments: bytes) -> bytes:
    """Answer a request: the function of this kind of task."""
    return _encoder.encode(_evaluator_here().answer(_tasks.decode(arguments)))


@cache
def _evaluator_here() -> "TaskEvaluator":
    return TaskEvaluator()


class TaskEvaluator:
    """An evaluator's process beside a worker of an engine. It stays for the worker's next task, if
    that is one of the same job.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._turn = threading.Lock()
        self._serves: tuple[object, ...] = ()
        self._seat: EvaluatorSeat | None = None

    def answer(self, task: EvaluatorTask) -> EvaluatorReply:
        """Answer the task's request. Blocks."""
        with self._turn:
            return self._runner.run(self._answer(task))

    async def _answer(self, task: EvaluatorTask) -> EvaluatorReply:
        threads = zip(LIBRARY_THREADS, task.threads, strict=True)
        # It names the GPU, too, which an engine may give to somebody else meanwhile.
        environment = public_environment() | dict(threads)
        serves = (task.job_id, task.place, environment)
        if self._seat is not None and serves != self._serves:
            await self._seat.close()
            self._seat = None
        try:
            if self._seat is None:
                self._serves = serves
                maker = SeatMaker(
                    Path(task.place.data_dir), task.place.limits, environment=environment
                )
                self._seat = await maker.seat()
            return await self._seat.reply(task.request)
        except HyperGPUError as error:
            return EvaluatorFailure(reason=error.reason.name, detail=error.detail, fix=error.fix)


Evaluators = EvaluatorPool | EngineEvaluator
"""What measures models and makes them, in processes of this machine or by an engine."""
