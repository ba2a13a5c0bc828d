"""Samples to a held-out loss: rounds of local steps against synchronising every step, each with
both inner optimizers.

Eight nodes share this process; trainer, codec, outer step and fold are the product's own, and only
the network between them is left out. Learning rates are the best of a search by factors of two: on
seed 1, and of the CNN by rounds on all seeds, since the best on seed 1 was no good on another.
"""

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.lowcomm import SimulatedNode
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import BenchmarkParts, PartFigures
from coordinator.core.training.outer_step import outer_step
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.assignment import SampleRange
from hypergpu.digests import digest_of
from hypergpu.jobfile.spec import Inner, JobSpec
from hypergpu.optimizer import OptimizerRule
from hypergpu.partitions import Indices, stream_indices
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.registry import build, find

NODES = 8
BATCH = 2
"""Samples of a node's inner step: the global batch of the prototype's tables, 16."""
CODEC = "int4"
HELD_OUT_MOST = 400
SYNC_EVALUATED_EVERY = 10
ADAMW, MUON = "adamw", "muon"
OPTIMIZERS = (ADAMW, MUON)


class SampleTask(NamedTuple):
    """A workload with the loss to reach and the best learning rates."""

    title: str
    workload: str
    options: Mapping[str, int]
    target: float
    inner_steps: int
    samples_most: int
    sync_rates: Mapping[str, float]
    round_rates: Mapping[str, float]


TASKS = {
    "text": SampleTask(
        "byte GPT, width 64",
        "text-gpt",
        {"width": 64, "layers": 2, "heads": 4, "block_length": 64, "corpus_bytes": 8 << 20},
        2.5,
        30,
        9_600,
        {ADAMW: 0.002, MUON: 0.004},
        {ADAMW: 0.002, MUON: 0.004},
    ),
    "mlp": SampleTask(
        "digits MLP, width 64",
        "digits-mlp",
        {"width": 64},
        0.15,
        28,
        18_000,
        {ADAMW: 0.01, MUON: 0.02},
        {ADAMW: 0.01, MUON: 0.02},
    ),
    "cnn": SampleTask(
        "digits CNN, 32 channels",
        "digits-cnn",
        {},
        0.05,
        28,
        18_000,
        {ADAMW: 0.001, MUON: 0.001},
        {ADAMW: 0.0005, MUON: 0.001},
    ),
}


class LossPoint(NamedTuple):
    """Held-out loss after some samples of all nodes together."""

    samples: int
    loss: float


def samples_to(target: float, points: Iterator[LossPoint]) -> int | None:
    """Samples where the loss first reaches the target, on a straight line from the point before;
    None: it never does.
    """
    before = next(points)
    for point in points:
        if point.loss <= target:
            share = (before.loss - target) / (before.loss - point.loss)
            return round(before.samples + share * (point.samples - before.samples))
        before = point
    return None


class TrainingRun:
    """One task with one seed, and a trainer that plays every node in turn."""

    def __init__(self, task: SampleTask, optimizer: str, seed: int) -> None:
        workload = build(find(task.workload), dict(task.options))
        self._task, self._seed = task, seed
        self._judge = TorchEvaluator(workload, "")
        samples = self._judge.dataset.train
        device = Device("cpu", "CPU", Bytes(0), has_bf16=False)
        self._trainer = TorchTrainer(workload, device, samples)
        self._layout = self._trainer.layout
        self._rule: OptimizerRule = Inner(optimizer=optimizer).rule
        self._members = np.arange(len(samples.labels), dtype=np.int64)

    def synchronous(self, learning_rate: float) -> Iterator[LossPoint]:
        """Every node sends its gradient and gets the mean back, as float32, at every step: one step
        on the joint batch.
        """
        first = self._judge.initial(self._seed)
        self._trainer.begin(InitialState(first, self._seed, None, self._rule))
        yield self._point(0, first)
        joint, model = NODES * BATCH, Flat.empty(self._layout)
        for step in range(1, self._task.samples_most // joint + 1):
            self._trainer.step(self._indices((step - 1) * joint, joint), learning_rate)
            if step % SYNC_EVALUATED_EVERY == 0:
                self._trainer.store(model)
                yield self._point(step * joint, model)

    def rounds(self, learning_rate: float) -> Iterator[LossPoint]:
        """Rounds of inner steps, encoded updates, the coordinator's fold and its delta."""
        with tempfile.TemporaryDirectory() as name:
            yield from self._rounds_in(Path(name), learning_rate)

    def _rounds_in(self, folder: Path, learning_rate: float) -> Iterator[LossPoint]:
        path = folder / "model"
        first = self._judge.initial(self._seed)
        path.write_bytes(b"".join(vector.tobytes() for vector in first))
        base, outer_state = StoredBlob(path, digest_of(path.read_bytes())), None
        yield self._point(0, first)
        nodes = [SimulatedNode() for _ in range(NODES)]
        shard = self._task.inner_steps * BATCH
        for number in range(self._task.samples_most // (NODES * shard)):
            before = Flat.view(self._layout, np.fromfile(base.path, np.uint8))
            updates = []
            for slot, node in enumerate(nodes):
                start = (number * NODES + slot) * shard
                payload = self._update(before, node, self._indices(start, shard), learning_rate)
                update_path = folder / f"update-{slot}"
                update_path.write_bytes(payload)
                digest = digest_of(payload)
                updates.append(StoredUpdate(update_path, digest, Samples(shard), CODEC))
            choice = outer_step(
                JobSpec(""), round_number=number, participants=NODES, is_sparse=False
            )
            result = fold(
                FoldRequest(
                    layout=self._layout,
                    down=CODEC,
                    outer=choice.step,
                    base_model=base,
                    outer_state=outer_state,
                    updates=tuple(updates),
                    output_dir=folder,
                )
            )
            base = StoredBlob(result.model.path, result.model.digest)
            state = result.outer_state
            outer_state = None if state is None else StoredBlob(state.path, state.digest)
            model = Flat.view(self._layout, np.fromfile(base.path, np.uint8))
            yield self._point((number + 1) * NODES * shard, model)

    def _update(
        self, before: Flat, node: SimulatedNode, indices: Indices, learning_rate: float
    ) -> bytes:
        self._trainer.begin(InitialState(before, self._seed, node.optimizer, self._rule))
        for start in range(0, len(indices), BATCH):
            self._trainer.step(indices[start : start + BATCH], learning_rate)
        after = Flat.empty(self._layout)
        self._trainer.store(after)
        np.subtract(before.parameters, after.parameters, out=after.parameters)
        encoded_update = encode_update(self._layout, CODEC, after, node.residual)
        node.residual = encoded_update.residual
        node.optimizer = {name: array.copy() for name, array in self._trainer.optimizer().items()}
        return encoded_update.payload.tobytes()

    def _indices(self, start: int, count: int) -> Indices:
        """A stretch of the one sample stream that all nodes share."""
        return stream_indices(self._members, 0, self._seed, [SampleRange(start, Samples(count))])

    def _point(self, samples: int, model: Flat) -> LossPoint:
        return LossPoint(samples, self._judge.evaluate(model, HELD_OUT_MOST).metric("loss"))


def task_figures(name: str, seeds: int) -> PartFigures:
    """Samples of both optimizers, synchronised every step and by rounds.

    Raises:
        BenchmarkError: Synchronous AdamW, which all else is compared with, missed the target.
    """
    torch.set_num_threads(1)
    task = TASKS[name]
    counts: dict[tuple[str, str], list[int | None]] = {}
    for optimizer in OPTIMIZERS:
        for way, rates in (("sync", task.sync_rates), ("rounds", task.round_rates)):
            counts[way, optimizer] = [
                _samples(task, way, optimizer, rates[optimizer], seed)
                for seed in range(1, seeds + 1)
            ]
    baseline = _median(counts["sync", ADAMW])
    if baseline is None:
        raise BenchmarkError(f"synchronous AdamW missed a loss of {task.target:g}")
    rows, metrics = [], {}
    for (way, optimizer), sample_counts in counts.items():
        middle = _median(sample_counts)
        over_adamw = None if middle is None else middle / baseline
        row_name = "every step" if way == "sync" else f"H={task.inner_steps}, {CODEC}"
        cells = [", ".join("missed" if each is None else f"{each:,}" for each in sample_counts)]
        cells.append("" if over_adamw is None else f"{over_adamw:.2f}x")
        if over_adamw is not None and (way, optimizer) != ("sync", ADAMW):
            metrics[f"{name}_{way}_{optimizer}_over_sync_adamw"] = over_adamw
        rows.append((f"{task.title}: {row_name}, {optimizer}", *cells))
    rounds_muon, sync_muon = (_median(counts[way, MUON]) for way in ("rounds", "sync"))
    if rounds_muon is not None and sync_muon is not None:
        metrics[f"{name}_rounds_muon_over_sync_muon"] = rounds_muon / sync_muon
    return PartFigures(rows=rows, metrics=metrics, notes=[_note(task)])


def _samples(
    task: SampleTask, way: str, optimizer: str, learning_rate: float, seed: int
) -> int | None:
    run = TrainingRun(task, optimizer, seed)
    points = run.synchronous(learning_rate) if way == "sync" else run.rounds(learning_rate)
    return samples_to(task.target, points)


def _median(counts: list[int | None]) -> float | None:
    """The median; None: half of the seeds or more never came to the target."""
    far = float("inf")
    middle = median(far if each is None else each for each in counts)
    return None if middle == far else middle


def _note(task: SampleTask) -> str:
    rates = "; ".join(
        f"{way} {', '.join(f'{name} {rate:g}' for name, rate in rates.items())}"
        for way, rates in (("every step", task.sync_rates), ("rounds", task.round_rates))
    )
    return f"{task.title}: loss {task.target:g}; learning rates: {rates}."


def parts(is_quick: bool) -> BenchmarkParts:
    """A part for each task."""
    seeds = 1 if is_quick else 3
    return BenchmarkParts(
        title=f"Samples to a held-out loss, {NODES} nodes of batch {BATCH}",
        columns=("task and way", "samples, by seed", "over every-step AdamW"),
        parts={name: partial(task_figures, name, seeds) for name in TASKS},
        notes=lambda: [
            f"{seeds} seeds; loss of {HELD_OUT_MOST} held-out samples.",
            "The outer step is the project's own choice of each round.",
        ],
    )
