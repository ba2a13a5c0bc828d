"""The trainers of a worker: what each kind can train, and the newest job's trainer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psutil

from gpu_node.core.events import TrainedUpdate
from gpu_node.shell.worker.prefetch import PrefetchRun, own_prefetch
from gpu_node.shell.worker.protocol import Limits, TrainShard, WorkerCapabilities, WriteInitialModel
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, several
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import (
    OLDER_JOB_FIX,
    OptionError,
    WorkloadEntry,
    missing_modules,
    trains_version,
)
from hypergpu.workloads.layouts import numpy_initial, numpy_layout
from hypergpu.workloads.node_data import training_samples
from hypergpu.workloads.registry import BuilderMissingError, build, entries

if TYPE_CHECKING:
    from gpu_node.shell.worker.torch_engine import TorchEngine
from gpu_node.shell.worker.null_shards import NullPrefetch, NullShards
from gpu_node.shell.worker.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.slowed_trainer import StepFloor
from gpu_node.shell.worker.trained_shards import TrainedShards

_ABILITIES = {"torch": ("torch", "numpy", "null"), "numpy": ("numpy", "null"), "null": ("null",)}


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
        self._entries = {
            entry.name: entry
            for entry in entries()
            if entry.kind in _ABILITIES[kind] and not missing_modules(entry)
        }
        self._kept: _KeptTrainer | None = None
        self._prefetch: PrefetchRun | NullPrefetch | None = None
        self._last_request: TrainShard | None = None
        """The last request, until its prefetch is begun."""

    @property
    def layout(self) -> Layout | None:
        """Layout of the newest job's model; None before the first job."""
        return None if self._kept is None else self._kept.trainer.layout

    def capabilities(self) -> WorkerCapabilities:
        """Device and workloads, for the daemon."""
        workloads = {name: entry.version for name, entry in self._entries.items()}
        kinds = {name: entry.kind for name, entry in self._entries.items()}
        if self._torch is not None:
            capabilities = self._torch.capabilities(self._kind, workloads)
            return msgspec.structs.replace(capabilities, workload_kinds=kinds)
        return WorkerCapabilities(
            device="cpu",
            device_name=f"CPU, {several(psutil.cpu_count() or 1, 'thread')}",
            memory_bytes=Bytes(self._memory_bytes or psutil.virtual_memory().total),
            kind=self._kind,
            workloads=workloads,
            workload_kinds=kinds,
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
        folders = [request.data_dir, request.node_dir]
        key = json.dumps(
            [task.workload, sorted(task.options.items()), *folders, task.experts or ()]
        )
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
            installable_entries = [
                each for each in entries() if each.name == workload and each.install
            ]
            if installable_entries:
                fix = f"Fix: pip install '{installable_entries[0].install}' on the node"
                raise ShardError(f"workload {workload} needs packages that are missing. {fix}")
            raise ShardError(f"a {self._kind} worker here has no workload {workload!r}")
        if not trains_version(entry, version):
            is_newer = version > entry.version
            fix = "upgrade the node" if is_newer else OLDER_JOB_FIX
            raise ShardError(
                f"workload {entry.name} has version {entry.version} here and"
                f" {version} in the job. Fix: {fix}"
            )
        return entry

    def _make_trainer(
        self, entry: WorkloadEntry, request: TrainShard
    ) -> NullShards | TrainedShards:
        if entry.kind != "torch" and request.task.experts:
            raise ShardError(f"a workload of kind {entry.kind} cannot hold some experts only")
        try:
            if entry.kind == "torch" and self._torch is not None:
                return TrainedShards(self._torch.trainer(entry, request), self._floor)
            workload = build(entry, request.task.options)
            if entry.kind == "null":
                return NullShards(numpy_layout(workload), self._floor)
            samples = training_samples(workload, request.data_dir, request.node_dir)
            return TrainedShards(NumpyTrainer(workload, samples), self._floor)
        except (OptionError, DatasetError, BuilderMissingError) as error:
            raise ShardError(str(error)) from error


def _torch_engine(limits: Limits) -> "TorchEngine":
    from gpu_node.shell.worker.torch_engine import TorchEngine

    return TorchEngine(limits)
