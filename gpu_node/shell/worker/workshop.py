"""What a worker of each kind can train, and the trainers it has made so far."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import psutil

from gpu_node.shell.worker.limits import Limits
from gpu_node.shell.worker.messages import Draw, Ready, Train, Trained
from gpu_node.shell.worker.shard.beginning import Beginning, asked_for, prefetch_request
from gpu_node.shell.worker.shard.null import Played, answer_null
from gpu_node.shell.worker.shard.training import begun_ahead, train_shard
from gpu_node.shell.worker.shard.watch import ShardError, Watch
from gpu_node.shell.worker.trainer.interface import Trainer
from gpu_node.shell.worker.trainer.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.trainer.paced import Pace, PacedTrainer
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.units import Bytes, Milliseconds, several
from hypergpu.workloads.entry import OptionError, WorkloadEntry
from hypergpu.workloads.registry import BuilderMissingError, build, entries
from hypergpu.workloads.workload import DatasetError, numpy_initial, numpy_layout

_ABILITIES = {"torch": ("torch", "numpy", "null"), "numpy": ("numpy", "null"), "null": ("null",)}

Warm = Beginning | Played


class Engine(Protocol):
    """What a kind of worker has beside numpy. Torch stays behind it."""

    def ready(self, kind: str, workloads: dict[str, int]) -> Ready:
        """The device, once it has computed something."""
        ...

    def trainer(self, entry: WorkloadEntry, request: Train) -> Trainer:
        """A trainer of a torch workload."""
        ...

    def initial(self, entry: WorkloadEntry, request: Draw) -> Flat:
        """The first model of a job with a torch workload."""
        ...


class _Made(NamedTuple):
    key: str
    answer: Callable[[Train, Watch, Warm | None], Trained]
    begin: Callable[[Train], Warm | None]
    """What comes after a request, as far as it can be begun."""


class Workshop:
    """Trains shards one after the other. The newest job's trainer, with its dataset, stays made."""

    def __init__(self, kind: str, limits: Limits) -> None:
        self._engine = _torch_engine(limits) if kind == "torch" else _PlainEngine(limits)
        self._kind = kind
        self._pace = Pace(limits.step_floor_ms / 1000, limits.slowness_path)
        self._entries = {entry.name: entry for entry in entries() if entry.kind in _ABILITIES[kind]}
        self._made: _Made | None = None
        self._beginning: Warm | None = None
        self._answered: Train | None = None
        """The last request, as long as nothing was begun of what comes after it."""

    def ready(self) -> Ready:
        """What the daemon tells the coordinator of this node."""
        return self._engine.ready(
            self._kind, {name: entry.version for name, entry in self._entries.items()}
        )

    def train(self, request: Train, watch: Watch) -> Trained:
        """Answer one request.

        Raises:
            ShardError: It cannot be trained here.
            ShardAbortedError: It is not wanted any more.
        """
        warm = self._stop_idle_work()
        if warm is not None and warm.request != asked_for(request):
            warm = None  # frees its model
        entry = self._entry(request)
        key = json.dumps([request.workload, sorted(request.options.items()), request.data_dir])
        if self._made is None or self._made.key != key:
            self._made = None  # frees the last job's model before the next takes memory
            self._made = self._maker(key, entry, request)
        try:
            trained = self._made.answer(request, watch, warm)
        except DatasetError as error:
            raise ShardError(str(error)) from error
        self._answered = request
        return trained

    def steps_ahead(self, log: Callable[[str], None]) -> bool:
        """Take one inner step of the round after the last one; False: there is none to take.

        Whatever fails is left to the training itself, which will say so.
        """
        try:
            if self._answered is not None and self._made is not None:
                answered, self._answered = self._answered, None
                self._beginning = self._made.begin(answered)
            if self._beginning is None or self._beginning.is_done:
                return False
            self._beginning.advance()
        except Exception as error:  # noqa: BLE001 - a workload of another package may raise anything
            self._stop_idle_work()
            log(f"the next round is not begun: {error}")
            return False
        return True

    def _stop_idle_work(self) -> Warm | None:
        """Begin nothing any more; what was begun so far."""
        beginning, self._beginning, self._answered = self._beginning, None, None
        return beginning

    def draw(self, request: Draw) -> None:
        """Write the first model of a job.

        Raises:
            ShardError: It cannot be made here.
        """
        self._stop_idle_work()  # drawing moves the dice that steps may throw
        entry = self._entry(request)
        try:
            if entry.kind == "torch":
                drawn = self._engine.initial(entry, request)
            else:
                drawn = numpy_initial(build(entry, request.options), request.seed)
        except (OptionError, BuilderMissingError) as error:
            raise ShardError(str(error)) from error
        with Path(request.model_path).open("wb") as file:
            for vector in drawn:
                vector.tofile(file)

    def _entry(self, request: Train | Draw) -> WorkloadEntry:
        entry = self._entries.get(request.workload)
        if entry is None:
            raise ShardError(f"a {self._kind} worker here has no workload {request.workload!r}")
        if entry.version != request.workload_version:
            raise ShardError(
                f"workload {entry.name} has version {entry.version} here and"
                f" {request.workload_version} in the job. Fix: upgrade the older side"
            )
        return entry

    def _maker(self, key: str, entry: WorkloadEntry, request: Train) -> _Made:
        try:
            if entry.kind == "null":
                layout = numpy_layout(build(entry, request.options))
                return _Made(
                    key,
                    lambda wanted, watch, warm: self._answer_null(wanted, layout, watch, warm),
                    self._begin_null,
                )
            if entry.kind == "numpy":
                workload = build(entry, request.options)
                made: Trainer = NumpyTrainer(workload, workload.load(request.data_dir).train)
            else:
                made = self._engine.trainer(entry, request)
        except (OptionError, DatasetError, BuilderMissingError) as error:
            raise ShardError(str(error)) from error
        return _Made(
            key,
            lambda wanted, watch, warm: train_shard(
                wanted,
                self._paced_trainer(made, wanted),
                watch,
                warm if isinstance(warm, Beginning) else None,
            ),
            lambda done: begun_ahead(done, self._paced_trainer(made, done), made.layout),
        )

    def _paced_trainer(self, trainer: Trainer, request: Train) -> Trainer:
        """The trainer as the device that this one plays."""
        if not self._pace.floor_s:
            return trainer
        return PacedTrainer(trainer, self._pace, request.usual_batch_size)

    def _answer_null(
        self, request: Train, layout: Layout, watch: Watch, warm: Warm | None
    ) -> Trained:
        """Nothing is computed, but what a device would take for it may pass, and is told."""
        started_s = time.monotonic()
        passed = 0 if warm is None else warm.steps_taken
        if self._pace.floor_s:
            for _ in range(request.inner_steps - passed):
                watch.refuse_aborted()
                self._pass_step(request)
        compute_s = time.monotonic() - started_s + passed * self._step_s(request)
        answer = answer_null(request, layout, watch)
        return msgspec.structs.replace(answer, compute_ms=Milliseconds(round(compute_s * 1000)))

    def _begin_null(self, request: Train) -> Played | None:
        beginning = prefetch_request(request)
        if beginning is None or not self._pace.floor_s:
            return None
        return Played(beginning, lambda: self._pass_step(request))

    def _pass_step(self, request: Train) -> None:
        time.sleep(self._step_s(request))

    def _step_s(self, request: Train) -> float:
        return self._pace.step_s * request.batch_size / request.usual_batch_size


class _PlainEngine:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def ready(self, kind: str, workloads: dict[str, int]) -> Ready:
        memory_bytes = self._limits.memory_bytes or psutil.virtual_memory().total
        return Ready(
            device="cpu",
            device_name=f"CPU, {several(psutil.cpu_count() or 1, 'thread')}",
            memory_bytes=Bytes(memory_bytes),
            kind=kind,
            workloads=workloads,
        )

    def trainer(self, entry: WorkloadEntry, request: Train) -> Trainer:
        raise ShardError(f"workload {entry.name} needs a torch worker")

    def initial(self, entry: WorkloadEntry, request: Draw) -> Flat:
        raise ShardError(f"workload {entry.name} needs a torch worker")


def _torch_engine(limits: Limits) -> Engine:
    from gpu_node.shell.worker.trainer.torch_engine import TorchEngine

    return TorchEngine(limits)
