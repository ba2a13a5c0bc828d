"""The trainers of a worker: what each kind can train, and the newest job's trainer.

Here are those that need no torch: numpy's, the null workload's, which only lets time pass, and the
one that plays a slower device.
"""

import json
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat, cast

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from gpu_node.core.events import TrainedUpdate
from gpu_node.shell.worker.flat_optimizer import FlatOptimizer
from gpu_node.shell.worker.prefetch import PrefetchRun, PrefetchWork, next_prefetch, own_prefetch
from gpu_node.shell.worker.protocol import Limits, TrainShard, WorkerCapabilities, WriteInitialModel
from gpu_node.shell.worker.trainer import (
    DeviceMemory,
    InitialState,
    ShardCallbacks,
    ShardError,
    Trainer,
)
from gpu_node.shell.worker.training import begin_prefetch, train_shard
from hypergpu.crypto import digest_of
from hypergpu.optimizer import pass_sizes
from hypergpu.statements import Task
from hypergpu.tensors.codec import sections_of
from hypergpu.tensors.layout import Flat, Float32s, Layout, Octets, unpack
from hypergpu.tensors.quantisation import RECORD
from hypergpu.units import Bytes, Milliseconds, several
from hypergpu.workloads.datasets import DatasetError, Samples
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
from hypergpu.workloads.workload import NumpyWorkload, Parameters

if TYPE_CHECKING:
    from gpu_node.shell.worker.torch_engine import TorchEngine


class NumpyTrainer:
    """One flat parameter vector and its optimizer. Implements `Trainer`."""

    def __init__(self, workload: NumpyWorkload, samples: Samples) -> None:
        self._workload = workload
        self.samples = samples
        self.memory = DeviceMemory()
        self.layout = numpy_layout(workload)
        self._flat = Flat.empty(self.layout)
        self._gradient = Flat.empty(self.layout)
        self._optimizer = FlatOptimizer(self.layout)
        self._micro_batch = 0

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        self._flat.parameters[:] = start.model.parameters
        self._micro_batch = start.rule.micro_batch
        self._optimizer.begin(start.rule, start.optimizer)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> float:
        """See `Trainer`."""
        loss, ends = 0.0, np.cumsum(pass_sizes(len(indices), self._micro_batch))
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            share = (end - start) / len(indices)
            loss += share * self._add_gradient(indices[start:end], share, is_first=not start)
        gradient = self._gradient.parameters
        self._optimizer.step(self._flat.parameters, gradient, learning_rate)
        return loss

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        out.parameters[:] = self._flat.parameters

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return self._optimizer.state()

    def _add_gradient(self, indices: NDArray[np.int64], share: float, *, is_first: bool) -> float:
        """Add a part of the batch's gradient; the loss of that part."""
        inputs, targets = self.samples.batch(indices)
        named = cast(Parameters, unpack(self.layout, self._flat))
        loss, gradients = self._workload.gradient(named, inputs, targets)
        flat = unpack(self.layout, self._gradient)
        for name, gradient in gradients.items():
            if is_first:
                flat[name][...] = gradient if share == 1 else gradient * np.float32(share)
            else:
                np.add(flat[name], gradient * np.float32(share), out=flat[name])
        return loss


class StepFloor(NamedTuple):
    """The least time of an inner step with a full batch."""

    floor_s: float
    slowness_path: str = ""
    """File with a factor by which steps take longer at the moment; none, or no number in it: 1."""

    @property
    def step_s(self) -> float:
        """The least time at the moment."""
        if not self.slowness_path:
            return self.floor_s
        try:
            return self.floor_s * float(Path(self.slowness_path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self.floor_s


class SlowedTrainer:
    """A trainer whose inner steps take a least time; their results are the same.

    Args:
        trainer: Does the work.
        floor: Least time of a step with a full batch; one with fewer samples takes less.
        full_batch: Samples in a full batch.
    """

    def __init__(self, trainer: Trainer, floor: StepFloor, full_batch: int) -> None:
        self._trainer = trainer
        self._floor = floor
        self._full_batch = full_batch
        self.layout, self.samples = trainer.layout, trainer.samples

    @property
    def memory(self) -> DeviceMemory:
        """See `Trainer`."""
        return self._trainer.memory

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        self._trainer.begin(start)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> SupportsFloat:
        """See `Trainer`. Waits for the device: its work is part of the step's time."""
        due_s = time.monotonic() + self._floor.step_s * len(indices) / self._full_batch
        loss = float(self._trainer.step(indices, learning_rate))
        time.sleep(max(0.0, due_s - time.monotonic()))
        return loss

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        self._trainer.store(out)

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return self._trainer.optimizer()


_TILE = 1 << 18


class NullPrefetch:
    """A prefetch that lets the time of its steps pass."""

    def __init__(self, work: PrefetchWork, floor: StepFloor) -> None:
        self.work = work
        self._floor = floor
        self.steps_taken = 0

    @property
    def is_done(self) -> bool:
        """Whether no step is left to take."""
        return self.steps_taken == self.work.task.inner_steps

    def advance(self) -> None:
        """Let the time of one step pass."""
        time.sleep(_step_s(self._floor, self.work.task))
        self.steps_taken += 1


class NullShards:
    """Answers the shards of a job without training. Used like `TrainedShards`."""

    def __init__(self, layout: Layout, floor: StepFloor) -> None:
        self.layout = layout
        self._floor = floor

    def train(
        self, request: TrainShard, callbacks: ShardCallbacks, early: NullPrefetch | None
    ) -> TrainedUpdate:
        """See `TrainedShards`."""
        task, started_s = request.task, time.monotonic()
        taken = 0 if early is None else early.steps_taken
        if self._floor.floor_s:
            for _ in range(task.inner_steps - taken):
                callbacks.raise_if_aborted()
                time.sleep(_step_s(self._floor, task))
        compute_s = time.monotonic() - started_s + taken * _step_s(self._floor, task)
        callbacks.raise_if_aborted()
        if self.layout.digest != task.layout:
            raise ShardError("options.parameters is not the job's: the layouts differ")
        payload = _payload(self.layout, task)
        Path(request.update_path).parent.mkdir(parents=True, exist_ok=True)
        payload.tofile(request.update_path)
        return TrainedUpdate(
            digest=digest_of(payload.data),
            size_bytes=Bytes(payload.size),
            inner_steps=task.inner_steps,
            samples=task.samples,
            compute_ms=Milliseconds(round(compute_s * 1000)),
            loss_first=0.0,
            loss_last=0.0,
        )

    def begin_prefetch(self, request: TrainShard) -> NullPrefetch | None:
        """See `TrainedShards`."""
        work = next_prefetch(request)
        if work is None or not self._floor.floor_s:
            return None
        return NullPrefetch(work, self._floor)


def _step_s(floor: StepFloor, task: Task) -> float:
    return floor.step_s * task.batch_size / task.usual_batch_size


def _payload(layout: Layout, task: Task) -> Octets:
    """An update of the right size whose first values depend on the seed."""
    payload = _pattern(layout, task.codec)
    sections = sections_of(layout, task.codec)
    section = sections.large if sections.large.values_count else sections.small
    values = _noise(min(RECORD, section.values_count), task.seed)
    section.codec.encode(values, payload[section.bytes_of(0, values.size)])
    return payload


def _noise(count: int, seed: int) -> Float32s:
    bits = np.random.Philox(key=seed & (2**64 - 1)).random_raw(count)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-34) - np.float32(2**-11)


@lru_cache(maxsize=1)
def _pattern(layout: Layout, codec: str) -> Octets:
    """An encoded pseudo-gradient of repeated noise, made once: later rounds rewrite its start.

    One tile is encoded, and its bytes repeated: the values would take eight times as many.
    """
    sections, tile = sections_of(layout, codec), _noise(_TILE, 0)
    payload = np.empty(sections.integers.stop, np.uint8)
    for section in (sections.large, sections.small):
        encoded = np.empty(section.codec.encoded_bytes(_TILE), np.uint8)
        section.codec.encode(tile, encoded)
        octets, tiles = payload[section.bytes], section.values_count // _TILE
        octets[: tiles * encoded.size].reshape(tiles, encoded.size)[:] = encoded
        section.codec.encode(tile[: section.values_count % _TILE], octets[tiles * encoded.size :])
    return payload


_ABILITIES = {"torch": ("torch", "numpy", "null"), "numpy": ("numpy", "null"), "null": ("null",)}


class TrainedShards:
    """Trains with a trainer, slowed down where this device plays a slower one."""

    def __init__(self, trainer: Trainer, floor: StepFloor) -> None:
        self.layout = trainer.layout
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
            found = self._torch.capabilities(self._kind, workloads)
            return msgspec.structs.replace(found, workload_kinds=kinds)
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
        key = json.dumps([task.workload, sorted(task.options.items()), *folders])
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
            known = [each for each in entries() if each.name == workload and each.install]
            if known:
                fix = f"Fix: pip install '{known[0].install}' on the node"
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
