"""The trainers of a worker: what each kind can train, and the newest job's trainer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from gpu_node.core.update import TrainedUpdate
from gpu_node.shell.worker.callbacks import ShardCallbacks, ShardError
from gpu_node.shell.worker.limits import Limits
from gpu_node.shell.worker.messages import TrainShard, WorkerCapabilities, WriteInitialModel
from gpu_node.shell.worker.null import NullPrefetch, NullShards
from gpu_node.shell.worker.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.prefetch import PrefetchRun, own_prefetch
from gpu_node.shell.worker.slow_device import SlowedTrainer, StepFloor
from gpu_node.shell.worker.trainer import Trainer
from gpu_node.shell.worker.training import begin_prefetch, train_shard
from hypergpu.units import Bytes, several
from hypergpu.workloads.entry import OptionError, WorkloadEntry
from hypergpu.workloads.registry import BuilderMissingError, build, entries
from hypergpu.workloads.workload import DatasetError, numpy_initial, numpy_layout

if TYPE_CHECKING:
    from gpu_node.shell.worker.torch_engine import TorchEngine

_ABILITIES = {"torch": ("torch", "numpy", "null"), "numpy": ("numpy", "null"), "null": ("null",)}


class TrainedShards:
    """Trains with a trainer, slowed down where this device plays a slower one."""

    def __init__(self, trainer: Trainer, floor: StepFloor) -> None:
        self._trainer = trainer
        self._floor = floor

    def train(
        self, request: TrainShard, callbacks: ShardCallbacks, early: PrefetchRun | None
    ) -> TrainedUpdate:
        """Train a shard; ``early`` is its own prefetch as far as it was taken, else None."""
        return train_shard(request, self._trainer_for(request), callbacks, early)

    def begin_prefetch(self, request: TrainShard) -> PrefetchRun | None:
        """Begin the round after a request's, as far as the request allows it."""
        return begin_prefetch(request, self._trainer_for(request))

    def _trainer_for(self, request: TrainShard) -> Trainer:
        if not self._floor.floor_s:
            return self._trainer
        return SlowedTrainer(self._trainer, self._floor, request.task.usual_batch_size)


class _KeptTrainer(NamedTuple):
    key: str
    """Jobs with equal keys share the trainer."""
    trainer: NullShards | TrainedShards


class Trainers:
    """Trains shards one after the other. The newest job's trainer is kept, with its dataset."""

    def __init__(self, kind: str, limits: Limits) -> None:
        self._torch = _torch_engine(limits) if kind == "torch" else None
        self._kind = kind
        self._memory_bytes = limits.memory_bytes
        self._floor = StepFloor(limits.step_floor_ms / 1000, limits.slowness_path)
        self._entries = {entry.name: entry for entry in entries() if entry.kind in _ABILITIES[kind]}
        self._kept: _KeptTrainer | None = None
        self._prefetch: PrefetchRun | NullPrefetch | None = None
        self._last_request: TrainShard | None = None
        """The last request, until its prefetch is begun."""

    def capabilities(self) -> WorkerCapabilities:
        """Device and workloads, for the daemon."""
        workloads = {name: entry.version for name, entry in self._entries.items()}
        if self._torch is not None:
            return self._torch.capabilities(self._kind, workloads)
        return WorkerCapabilities(
            device="cpu",
            device_name=f"CPU, {several(psutil.cpu_count() or 1, 'thread')}",
            memory_bytes=Bytes(self._memory_bytes or psutil.virtual_memory().total),
            kind=self._kind,
            workloads=workloads,
        )

    def train(self, request: TrainShard, callbacks: ShardCallbacks) -> TrainedUpdate:
        """Train one shard.

        Raises:
            ShardError: It cannot be trained here.
            ShardAbortedError: It is not wanted any more.
        """
        early: Any = self._stop_prefetch()
        if early is not None and early.work != own_prefetch(request):
            early = None  # frees its model
        task = request.task
        entry = self._entry(task.workload, task.workload_version)
        key = json.dumps([task.workload, sorted(task.options.items()), request.data_dir])
        if self._kept is None or self._kept.key != key:
            self._kept = None  # frees the last job's model before the next takes memory
            self._kept = _KeptTrainer(key, self._make_trainer(entry, request))
        try:
            update = self._kept.trainer.train(request, callbacks, early)
        except DatasetError as error:
            raise ShardError(str(error)) from error
        self._last_request = request
        return update

    def advance_prefetch(self, log: Callable[[str], None]) -> bool:
        """Take one inner step of the round after the last one; False: there is none to take.

        A failure is left to the training itself, which will report it.
        """
        try:
            if self._last_request is not None and self._kept is not None:
                request, self._last_request = self._last_request, None
                self._prefetch = self._kept.trainer.begin_prefetch(request)
            if self._prefetch is None or self._prefetch.is_done:
                return False
            self._prefetch.advance()
        except Exception as error:  # noqa: BLE001 - a workload of another package may raise anything
            self._stop_prefetch()
            log(f"the next round is not begun: {error}")
            return False
        return True

    def _stop_prefetch(self) -> PrefetchRun | NullPrefetch | None:
        """Begin no prefetch any more; gives the one begun so far."""
        prefetch, self._prefetch, self._last_request = self._prefetch, None, None
        return prefetch

    def write_initial_model(self, request: WriteInitialModel) -> None:
        """Write the first model of a job.

        Raises:
            ShardError: It cannot be computed here.
        """
        self._stop_prefetch()  # computing the model advances the dice that steps may throw
        entry = self._entry(request.workload, request.workload_version)
        try:
            if entry.kind == "torch" and self._torch is not None:
                model = self._torch.initial_model(entry, request)
            else:
                model = numpy_initial(build(entry, request.options), request.seed)
        except (OptionError, BuilderMissingError) as error:
            raise ShardError(str(error)) from error
        with Path(request.model_path).open("wb") as file:
            for vector in model:
                vector.tofile(file)

    def _entry(self, workload: str, version: int) -> WorkloadEntry:
        entry = self._entries.get(workload)
        if entry is None:
            raise ShardError(f"a {self._kind} worker here has no workload {workload!r}")
        if entry.version != version:
            raise ShardError(
                f"workload {entry.name} has version {entry.version} here and"
                f" {version} in the job. Fix: upgrade the older side"
            )
        return entry

    def _make_trainer(
        self, entry: WorkloadEntry, request: TrainShard
    ) -> NullShards | TrainedShards:
        try:
            if entry.kind == "torch" and self._torch is not None:
                return TrainedShards(self._torch.trainer(entry, request), self._floor)
            workload = build(entry, request.task.options)
            if entry.kind == "null":
                return NullShards(numpy_layout(workload), self._floor)
            trainer = NumpyTrainer(workload, workload.load(request.data_dir).train)
            return TrainedShards(trainer, self._floor)
        except (OptionError, DatasetError, BuilderMissingError) as error:
            raise ShardError(str(error)) from error


def _torch_engine(limits: Limits) -> "TorchEngine":
    from gpu_node.shell.worker.torch_engine import TorchEngine

    return TorchEngine(limits)
