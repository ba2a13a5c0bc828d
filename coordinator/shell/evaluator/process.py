"""The evaluator's process as the coordinator holds it, and the messages between the two: msgpack in
`hypergpu.frames`, on stdin and stdout of `python -m coordinator.shell.evaluator`.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import structlog

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.experts import Mixture
from hypergpu.frames import FrameError, frame, next_frame
from hypergpu.ids import Digest
from hypergpu.privacy import public_environment
from hypergpu.process import memory_of
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.entry import HeldOutExample
from hypergpu.workloads.installed import PackageWatch

log = structlog.get_logger()


class WorkloadRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Fields of every request: the workload, its options and its data."""

    workload: str
    workload_version: int = 0
    """The job's, which has to be the one that is installed; 0: whichever is."""
    options: dict[str, str | int | float | bool] = {}
    data_dir: str = ""
    """The user's files; empty for the workload's own data."""
    is_held_out: bool = False
    """Whether all of these are held out: nodes train on data that stay where they are."""


class Initialise(WorkloadRequest, frozen=True, tag=True, kw_only=True):
    """Make the initial model of a job and count the samples of each partition."""

    seed: int = 0
    """The job's seed: it keys the initial parameters and the division into partitions."""
    sharding: str = "iid"
    """``iid`` or ``dirichlet``."""
    alpha: float = 0.0
    """Dirichlet concentration; not looked at for ``iid``."""
    partitions: int = 1
    weights_path: str = ""
    """Weights to take instead of drawing some; empty: draw them."""
    weights_layout: Digest = Digest("")
    """Layout of the model that they are; empty: they are a safetensors file."""
    model_path: str
    """Where the model is written."""
    layout_path: str
    """Where the layout's canonical JSON is written."""


class Initialised(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model and the layout lie where they were asked for, synced."""

    digest: Digest
    size_bytes: Bytes
    layout_json: str
    partition_sizes: tuple[Samples, ...]
    workload_version: int
    can_checkpoint: bool = False
    operators: tuple[str, ...] = ()
    """Operators of torch without which no node can train it."""
    examples: tuple[HeldOutExample, ...] = ()
    metric_name: str = ""
    """Name of the metric that evaluations will tell."""
    notes: tuple[str, ...] = ()
    """What a user should know of how data and model are used."""
    mixture: Mixture | None = None
    """None: the model is no mixture of experts."""


class Evaluate(WorkloadRequest, frozen=True, tag=True, kw_only=True):
    """Measure a model on the held-out set."""

    model_path: str
    layout_digest: Digest
    samples_most: int = 0
    """Held-out samples to measure, always the same ones; 0: all."""


class Evaluated(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Mean loss over the held-out set, and the workload's metrics."""

    loss: float
    metric: float
    metric_name: str
    metrics: dict[str, float] = {}
    """Further metrics by name, those that are finite numbers."""
    outputs: tuple[str, ...] = ()
    """The model's output for each of the examples; empty: it has none."""
    samples: int = 0
    """Held-out samples that were measured."""
    samples_all: int = 0
    """Held-out samples that there are."""


class MeasureGradient(WorkloadRequest, frozen=True, tag=True, kw_only=True):
    """Differentiate the held-out loss at a model."""

    model_path: str
    layout_digest: Digest
    samples_most: int
    """Most held-out samples to use, spread evenly over the set."""
    sketch_secret: bytes
    """What the signs of the gradient's sketch are drawn from."""
    by_layers: bool = False
    """Whether it is held against updates that are sketched by groups of layers."""


class GradientMeasured(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The mean loss, and a sketch of its gradient."""

    loss: float | None
    """None: it is not finite."""
    sketch: bytes
    """``float64``, as in `coordinator.shell.aggregation.sketch`."""


class ShardSamples(msgspec.Struct, frozen=True):
    """Some samples of a shard."""

    partition: int
    positions: tuple[int, ...]
    """In the partition's stream."""


class ShardsRequest(WorkloadRequest, frozen=True, tag=True, kw_only=True):
    """Fields of requests about samples of shards: a model, and the division of the data."""

    model_path: str
    layout_digest: Digest
    seed: int
    """The seed of the division into partitions, and of their streams."""
    sharding: str
    alpha: float
    partitions: int
    """See `Initialise`."""


class MeasureShards(ShardsRequest, frozen=True, tag=True, kw_only=True):
    """Differentiate the loss of samples of some shards at a model, shard by shard."""

    shards: tuple[ShardSamples, ...]
    sketch_secret: bytes


class ShardsMeasured(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A sketch of each group of layers of each shard's gradient, and the shard's loss."""

    sketches: tuple[bytes, ...]
    """One a shard: ``float64[groups, WIDTH]``, as in `coordinator.shell.aggregation.sketch`."""
    losses: tuple[float | None, ...]
    """Mean loss of each shard's samples; None: it is not finite."""


class TryUpdate(ShardsRequest, frozen=True, tag=True, kw_only=True):
    """Measure the loss of samples of a shard at a model less an update of it."""

    shard: ShardSamples
    update_path: str
    codec: str
    experts: tuple[int, ...] = ()
    """Experts that the update covers, beside what all share; none: everything."""


class UpdateTried(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The mean loss of the samples."""

    loss: float | None
    """None: it is not finite."""


class Warm(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Import what jobs of a workload need, and see no job."""

    workload: str


class Warmed(msgspec.Struct, frozen=True, tag=True):
    """It is done."""


class EvaluatorFailure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request cannot be met. ``reason`` names a `hypergpu.errors.Reason`."""

    reason: str
    detail: str
    fix: str = ""
    """Empty: the reason's own."""


ModelRequest = Evaluate | MeasureGradient | MeasureShards | TryUpdate
EvaluatorRequest = Initialise | ModelRequest
EvaluatorReply = (
    Initialised | Evaluated | GradientMeasured | ShardsMeasured | UpdateTried | EvaluatorFailure
)
Order = EvaluatorRequest | Warm
_OrderAnswer = EvaluatorReply | Warmed


COMMAND = (sys.executable, "-m", "coordinator.shell.evaluator")
_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 30.0
"""A killed process on a busy machine takes this long at most."""
ANSWER_TIMEOUT_S = 600.0
"""More than a first model or an evaluation takes on a usual machine; it ends one that hangs."""
_WATCH_EVERY_S = 0.25
MEMORY_BYTES = "HYPERGPU_EVALUATOR_MEMORY_BYTES"
"""Environment variable with the most memory that a process may take; without it there is no cap."""
_RAISE_LIMIT = "raise HYPERGPU_COORDINATOR_EVALUATOR_LIMIT_S where the coordinator runs"
_RAISE_MEMORY = "raise HYPERGPU_COORDINATOR_EVALUATOR_MEMORY_BYTES where the coordinator runs"

_Answer = TypeVar("_Answer", Initialised, Evaluated, GradientMeasured, ShardsMeasured, UpdateTried)


def work_name(request: EvaluatorRequest) -> str:
    """A request for people."""
    if isinstance(request, Initialise):
        return "its first model"
    if isinstance(request, MeasureGradient):
        return "the gradient of its held-out loss"
    if isinstance(request, MeasureShards):
        return "the gradients of its shards"
    if isinstance(request, TryUpdate):
        return "the trial of an update"
    return "its evaluation"


def memory_error(work: str, most_bytes: int) -> HyperGPUError:
    """The error of work that needs more memory than a process may take."""
    most = f"{most_bytes / 10**9:.1f} GB" if most_bytes else "this machine has"
    detail = f"{work} needs more memory than the {most} that an evaluator may take"
    return HyperGPUError(Reason.EVALUATOR_LIMIT, detail, fix=_RAISE_MEMORY)


class EvaluatorProcess:
    """One evaluator, asked one thing at a time in order of asking.

    A request raises `HyperGPUError` with the evaluator's reason where it cannot be met, with
    EVALUATOR_LIMIT when it takes more time or memory than it may, and with NOT_READY when the
    process died twice. Cancelling a request kills the process, as its answer would otherwise be
    taken for the next one's.

    Args:
        command: Command line.
        environment: Of the process; None: this one's without secrets.
        answer_timeout_s: Most seconds of one answer.
        memory_bytes: Most memory that the process may take, looked at four times a second; 0: any.
    """

    def __init__(
        self,
        command: tuple[str, ...] = COMMAND,
        *,
        environment: Mapping[str, str] | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        memory_bytes: int = 0,
    ) -> None:
        self._command = command
        self._answer_timeout_s = answer_timeout_s
        self._memory_bytes = memory_bytes
        # It runs code of workloads, which is to see no secret.
        environment = public_environment() if environment is None else environment
        cap = {MEMORY_BYTES: str(memory_bytes)} if memory_bytes else {}
        self._environment = {**environment, **cap}
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._packages = PackageWatch()

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    async def initialise(self, request: Initialise) -> Initialised:
        """Make an initial model."""
        return expected_answer(await self.reply(request), Initialised)

    async def evaluate(self, request: Evaluate) -> Evaluated:
        """Measure a model."""
        return expected_answer(await self.reply(request), Evaluated)

    async def measure_gradient(self, request: MeasureGradient) -> GradientMeasured:
        """Differentiate the held-out loss."""
        return expected_answer(await self.reply(request), GradientMeasured)

    async def measure_shards(self, request: MeasureShards) -> ShardsMeasured:
        """Differentiate the loss of samples of some shards."""
        return expected_answer(await self.reply(request), ShardsMeasured)

    async def try_update(self, request: TryUpdate) -> UpdateTried:
        """Measure the loss of samples of a shard after an update."""
        return expected_answer(await self.reply(request), UpdateTried)

    async def warm(self, order: Warm) -> bool:
        """Start the process and let it import; tells whether it did."""
        async with self._turn:
            return isinstance(await self._ask_once(order, "its start"), Warmed)

    async def stop(self) -> None:
        """Let the process end after its current request, and kill it when that takes too long."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await process.wait()

    async def end(self) -> None:
        """End the process at once."""
        if self._process is not None:
            await self._kill(self._process)

    async def reply(self, request: EvaluatorRequest) -> EvaluatorReply:
        """The reply to a request, which may be an `EvaluatorFailure`."""
        async with self._turn:
            await self._end_outdated()
            work = work_name(request)
            answer = await self._ask_once(request, work) or await self._ask_once(request, work)
        if answer is None or isinstance(answer, Warmed):
            raise HyperGPUError(
                Reason.NOT_READY,
                "the evaluator died twice on this request",
                fix="see its last lines in the coordinator's log",
            )
        return answer

    async def _end_outdated(self) -> None:
        """End a process that has imported packages which changed since; the next has the new."""
        if changes := await asyncio.to_thread(self._packages.look):
            log.info("the evaluator starts anew: workload packages changed", changes=changes)
            await self.stop()

    async def _ask_once(self, order: Order, work: str) -> _OrderAnswer | None:
        """The answer; None when the process died first.

        Raises:
            HyperGPUError: EVALUATOR_LIMIT, it took more than it may, and was ended.
        """
        process = await self._spawn()
        answer: _OrderAnswer | None = None
        watch_task = asyncio.create_task(self._watch_memory(process))
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                payload = await _exchange(process, frame(msgspec.msgpack.encode(order)))
            answer = None if payload is None else msgspec.msgpack.decode(payload, type=_OrderAnswer)
        except (FrameError, ConnectionError, msgspec.MsgspecError, RecursionError, UnicodeError):
            pass
        except TimeoutError:
            limit = f"{self._answer_timeout_s:g} s"
            detail = f"{work} took more than {limit}, the most that an evaluator may take"
            raise HyperGPUError(Reason.EVALUATOR_LIMIT, detail, fix=_RAISE_LIMIT) from None
        finally:
            is_over = watch_task.done() and not watch_task.cancelled()
            watch_task.cancel()
            if answer is None:
                await self._kill(process)
        if answer is None and is_over:
            raise memory_error(work, self._memory_bytes)
        return answer

    async def _watch_memory(self, process: Process) -> None:
        """End a process that takes too much; returns once it was ended."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if not self._memory_bytes:
                continue
            taken_bytes = await asyncio.to_thread(memory_of, process.pid)
            if taken_bytes > self._memory_bytes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return

    async def _spawn(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=self._environment
            )
        return self._process

    async def _kill(self, process: Process) -> None:
        self._process = None
        if process.returncode is None:
            process.kill()
        # asyncio takes a process for a living one until all that it wrote is read, and until what
        # it started has closed its pipes too.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.communicate()


def expected_answer(reply: EvaluatorReply, answer: type[_Answer]) -> _Answer:
    """The reply as the answer that was asked for.

    Raises:
        HyperGPUError: With the evaluator's reason; NOT_READY, it is another answer.
    """
    if isinstance(reply, EvaluatorFailure):
        raise HyperGPUError(Reason[reply.reason], reply.detail, fix=reply.fix)
    if not isinstance(reply, answer):
        detail = f"the evaluator answered {type(reply).__name__}"
        raise HyperGPUError(Reason.NOT_READY, detail)
    return reply


async def _exchange(process: Process, question: bytes) -> bytes | None:
    if process.stdin is None or process.stdout is None:
        return None
    process.stdin.write(question)
    await process.stdin.drain()
    return await next_frame(process.stdout)
