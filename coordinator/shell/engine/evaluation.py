"""Evaluations and gradients as tasks of an engine: names of files go in, measured values come out.

Wherever a task is computed, an evaluator's process of its own runs the workload's code, as beside
the coordinator: it sees no secret, and is ended where it takes too long.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import msgspec

from coordinator.shell.evaluator.process import (
    ANSWER_TIMEOUT_S,
    Evaluate,
    Evaluated,
    EvaluatorFailure,
    EvaluatorProcess,
    GradientMeasured,
    Initialise,
    Initialised,
    MeasureGradient,
    Reply,
)
from coordinator.shell.evaluator.threads import LIBRARY_THREADS, library_threads
from hypergpu.engine.engine import Engine
from hypergpu.engine.tasks import EngineTask
from hypergpu.errors import HyperGPUError
from hypergpu.privacy import public_environment
from hypergpu.workloads.workload import UnknownWorkloadError, find

KIND = "evaluate"
_LIMIT_S = 2 * ANSWER_TIMEOUT_S
"""It may wait for a GPU."""
_AT_ONCE = 64


class EvaluatorTask(msgspec.Struct, frozen=True):
    """A request of an evaluator, and the threads that its libraries take."""

    request: Evaluate | MeasureGradient
    threads: tuple[str, ...]
    """As `library_threads` gives them."""


_encoder = msgspec.msgpack.Encoder()
_tasks = msgspec.msgpack.Decoder(EvaluatorTask)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class EngineEvaluator:
    """Measures models by an engine, several at a time. Initial models, and what the engine cannot
    measure, are the business of the coordinator's own evaluator, as are the errors.
    """

    def __init__(self, engine: Engine, own: EvaluatorProcess) -> None:
        self._engine = engine
        self._own = own
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="evaluation")
        self._running_count = 0
        self._change = asyncio.Condition()

    async def initialise(self, request: Initialise) -> Initialised:
        """See `EvaluatorProcess`."""
        return await self._own.initialise(request)

    async def evaluate(self, request: Evaluate) -> Evaluated:
        """See `EvaluatorProcess`."""
        reply = await self._ask(request)
        return reply if isinstance(reply, Evaluated) else await self._own.evaluate(request)

    async def measure_gradient(self, request: MeasureGradient) -> GradientMeasured:
        """See `EvaluatorProcess`."""
        reply = await self._ask(request)
        if isinstance(reply, GradientMeasured):
            return reply
        return await self._own.measure_gradient(request)

    async def stop(self) -> None:
        """See `EvaluatorProcess`. The engine ends with its owner."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._own.stop()

    async def _ask(self, request: Evaluate | MeasureGradient) -> Reply | None:
        """The engine's answer; None: it lost the task."""
        arguments = _encoder.encode(EvaluatorTask(request, library_threads()))
        task = EngineTask(
            KIND, arguments, wants_gpu=_uses_torch(request.workload), limit_s=_LIMIT_S
        )
        loop = asyncio.get_running_loop()
        # One worker is left to folds, which rounds wait for.
        async with self._change:
            await self._change.wait_for(
                lambda: self._running_count < max(1, self._engine.workers - 1)
            )
            self._running_count += 1
        try:
            (found,) = await loop.run_in_executor(self._threads, self._engine.run, [task])
        finally:
            self._running_count -= 1
            async with self._change:
                self._change.notify()
        return None if found is None else _replies.decode(found)


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
    """An evaluator's process beside a worker of an engine; it stays for the worker's next task."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._turn = threading.Lock()
        self._environment: dict[str, str] = {}
        self._process: EvaluatorProcess | None = None

    def answer(self, task: EvaluatorTask) -> Reply:
        """Answer the task's request. Blocks."""
        with self._turn:
            return self._runner.run(self._answer(task))

    async def _answer(self, task: EvaluatorTask) -> Reply:
        threads = zip(LIBRARY_THREADS, task.threads, strict=True)
        # It names the GPU, too, which an engine may give to somebody else meanwhile.
        environment = public_environment() | dict(threads)
        if self._process is not None and environment != self._environment:
            await self._process.stop()
            self._process = None
        if self._process is None:
            self._environment = environment
            self._process = EvaluatorProcess(environment=environment)
        try:
            return await self._process.reply(task.request)
        except HyperGPUError as error:
            return EvaluatorFailure(reason=error.reason.name, detail=error.detail)
