"""Bytes and inner steps to 97 % on the digits, against synchronising every step.

Eight nodes share this process; trainer, codec and fold are the product's own, and only the network
between them is left out.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.ours.samples.training import SimulatedNode
from benchmarks.ours.table import ResultTable
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.assignment import SampleRange
from hypergpu.digests import digest_of
from hypergpu.jobfile.spec import Outer
from hypergpu.optimizer import OptimizerRule
from hypergpu.partitions import Indices, stream_indices
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.registry import build, find

NODES = 8
BATCH = 32
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
TARGET = 0.97
SYNC_EVALUATED_EVERY = 5


class TrainingSetting(NamedTuple):
    """One row of the table. ``inner_steps`` 1 averages gradients instead of pseudo-gradients."""

    name: str
    inner_steps: int
    codec: str


SETTINGS = (
    TrainingSetting("every step, fp32", 1, "fp32"),
    TrainingSetting("H=20, fp32", 20, "fp32"),
    TrainingSetting("H=20, int4", 20, "int4"),
    TrainingSetting("H=50, int4", 50, "int4"),
)


class AccuracyPoint(NamedTuple):
    """Held-out accuracy after some inner steps of each node, and what moved until then."""

    steps: int
    total_bytes: float
    accuracy: float


def crossing(points: Sequence[AccuracyPoint]) -> AccuracyPoint:
    """Where the accuracy first reaches the target, on a straight line from the point before.

    Raises:
        ValueError: It never does.
    """
    before = AccuracyPoint(0, 0.0, 0.0)
    for point in points:
        if point.accuracy >= TARGET:
            share = (TARGET - before.accuracy) / (point.accuracy - before.accuracy)
            return AccuracyPoint(
                round(before.steps + share * (point.steps - before.steps)),
                before.total_bytes + share * (point.total_bytes - before.total_bytes),
                TARGET,
            )
        before = point
    raise ValueError(f"{TARGET:.0%} was not reached in {before.steps} inner steps")


class DigitsTrainer:
    """The workload, with one trainer that plays every node in turn."""

    def __init__(self) -> None:
        workload = build(find("digits-cnn"), {})
        self.judge = TorchEvaluator(workload, "")
        samples = self.judge.dataset.train
        device = Device("cpu", "CPU", Bytes(0), has_bf16=False)
        self.trainer = TorchTrainer(workload, device, samples)
        self.layout = self.trainer.layout
        self._members = np.arange(len(samples.labels), dtype=np.int64)

    def indices(self, seed: int, start: int, count: int) -> Indices:
        """A stretch of the one sample stream that all nodes share."""
        return stream_indices(self._members, 0, seed, [SampleRange(start, Samples(count))])

    def accuracy(self, model: Flat) -> float:
        """Over the held-out samples."""
        return self.judge.evaluate(model).metric("accuracy")


def synchronous(digits: DigitsTrainer, seed: int, steps: int) -> Iterator[AccuracyPoint]:
    """Every node sends its gradient and gets the mean back, as float32, at every step.

    The mean over nodes of mean gradients is the mean over the joint batch, so one step computes it.
    """
    digits.trainer.begin(
        InitialState(
            digits.judge.initial(seed), seed, None, OptimizerRule(weight_decay=WEIGHT_DECAY)
        )
    )
    step_bytes = 2 * NODES * 4 * digits.layout.parameters_count
    joint = NODES * BATCH
    for step in range(1, steps + 1):
        digits.trainer.step(digits.indices(seed, (step - 1) * joint, joint), LEARNING_RATE)
        if step % SYNC_EVALUATED_EVERY == 0:
            model = Flat.empty(digits.layout)
            digits.trainer.store(model)
            yield AccuracyPoint(step, step * step_bytes, digits.accuracy(model))


def low_communication(
    digits: DigitsTrainer, setting: TrainingSetting, *, seed: int, steps: int, folder: Path
) -> Iterator[AccuracyPoint]:
    """Rounds of inner steps, encoded updates, the coordinator's fold and its delta."""
    model_path = folder / "model"
    model_path.write_bytes(b"".join(vector.tobytes() for vector in digits.judge.initial(seed)))
    base = StoredBlob(model_path, digest_of(model_path.read_bytes()))
    outer_state: StoredBlob | None = None
    nodes = [SimulatedNode() for _ in range(NODES)]
    total_bytes = 0.0
    for round in range(steps // setting.inner_steps):
        before = Flat.view(digits.layout, np.fromfile(base.path, np.uint8))
        updates = []
        for slot, node in enumerate(nodes):
            payload = _update(digits, setting, before, node, seed=seed, turn=round * NODES + slot)
            path = folder / f"update-{slot}"
            path.write_bytes(payload)
            samples = Samples(setting.inner_steps * BATCH)
            updates.append(StoredUpdate(path, digest_of(payload), samples, setting.codec))
            total_bytes += len(payload)
        fold_result = fold(
            FoldRequest(
                layout=digits.layout,
                down=setting.codec,
                outer=Outer(),
                base_model=base,
                outer_state=outer_state,
                updates=tuple(updates),
                output_dir=folder,
            )
        )
        total_bytes += NODES * (fold_result.delta or fold_result.model).size_bytes
        base = StoredBlob(fold_result.model.path, fold_result.model.digest)
        outer_file = fold_result.outer_state
        outer_state = None if outer_file is None else StoredBlob(outer_file.path, outer_file.digest)
        model = Flat.view(digits.layout, np.fromfile(base.path, np.uint8))
        yield AccuracyPoint((round + 1) * setting.inner_steps, total_bytes, digits.accuracy(model))


def _update(
    digits: DigitsTrainer,
    setting: TrainingSetting,
    before: Flat,
    node: SimulatedNode,
    *,
    seed: int,
    turn: int,
) -> bytes:
    trainer = digits.trainer
    trainer.begin(
        InitialState(before, seed, node.optimizer, OptimizerRule(weight_decay=WEIGHT_DECAY))
    )
    shard = setting.inner_steps * BATCH
    indices = digits.indices(seed, turn * shard, shard)
    for start in range(0, shard, BATCH):
        trainer.step(indices[start : start + BATCH], LEARNING_RATE)
    after = Flat.empty(digits.layout)
    trainer.store(after)
    np.subtract(before.parameters, after.parameters, out=after.parameters)
    encoded_update = encode_update(digits.layout, setting.codec, after, node.residual)
    node.residual = encoded_update.residual
    node.optimizer = {name: array.copy() for name, array in trainer.optimizer().items()}
    return encoded_update.payload.tobytes()


def run(quick: bool) -> ResultTable:
    """Train every setting with every seed."""
    torch.set_num_threads(1)
    seeds, steps = (2, 150) if quick else (5, 200)
    digits = DigitsTrainer()
    curves = {
        setting: [_curve(digits, setting, seed, steps) for seed in range(seeds)]
        for setting in SETTINGS
    }
    return _table(digits, curves, seeds=seeds, steps=steps)


def _curve(
    digits: DigitsTrainer, setting: TrainingSetting, seed: int, steps: int
) -> list[AccuracyPoint]:
    """One seed of one setting."""
    if setting.inner_steps == 1:
        return list(synchronous(digits, seed, steps))
    with tempfile.TemporaryDirectory() as name:
        points = low_communication(digits, setting, seed=seed, steps=steps, folder=Path(name))
        return list(points)


def _table(
    digits: DigitsTrainer,
    curves: dict[TrainingSetting, list[list[AccuracyPoint]]],
    *,
    seeds: int,
    steps: int,
) -> ResultTable:
    crossings = {name: [crossing(points) for points in curves[name]] for name in SETTINGS}
    reached_steps = {name: fmean(c.steps for c in crossings[name]) for name in SETTINGS}
    reached_bytes = {name: fmean(c.total_bytes for c in crossings[name]) for name in SETTINGS}
    final = {name: fmean(c[-1].accuracy for c in curves[name]) for name in SETTINGS}
    sync, fp32, int4, int4_long = SETTINGS
    rows = [
        (
            setting.name,
            f"{reached_steps[setting]:.0f}",
            f"{reached_bytes[setting] / 1e6:.2f} MB",
            f"{reached_bytes[sync] / reached_bytes[setting]:.0f}x",
            f"{final[setting]:.3f}",
        )
        for setting in SETTINGS
    ]
    best_bytes = min(reached_bytes[int4], reached_bytes[int4_long])
    return ResultTable(
        title=f"Digits CNN, {NODES} nodes: to {TARGET:.0%} held-out accuracy",
        columns=("setting", "inner steps", "bytes both ways", "fewer", f"accuracy at {steps}"),
        rows=rows,
        metrics={
            "accuracy_int4": final[int4],
            "steps_int4_over_fp32": reached_steps[int4] / reached_steps[fp32],
            "bytes_sync_over_int4": reached_bytes[sync] / best_bytes,
        },
        notes=(
            f"{digits.layout.parameters_count:,} parameters; batch {BATCH} a node; {seeds} seeds.",
            f"AdamW {LEARNING_RATE:g} on the nodes; Nesterov 0.7 and 0.9 on the coordinator.",
            "Bytes are those of all nodes; the first model, which is the same for all, is not in.",
        ),
    )
