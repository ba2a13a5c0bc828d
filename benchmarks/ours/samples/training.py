"""Rounds of local steps and every-step training of one task, all nodes in this process.

Trainer, codec, outer step and fold are the product's own, and only the network between the nodes
is left out.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coordinator.core.training.outer_step import outer_step
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, OptimizerState
from hypergpu.assignment import SampleRange
from hypergpu.digests import digest_of
from hypergpu.jobfile.spec import SPARSE_CODECS, Inner, JobSpec
from hypergpu.optimizer import OptimizerRule, schedule_share
from hypergpu.partitions import Indices, stream_indices
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.registry import build, find

NODES = 8
BATCH = 2
"""Samples of a node's inner step: the global batch of the prototype's tables, 16."""
CODEC = "int4"
DENSER = "topk256"
"""Codec of the way down where the way up is sparse: the union of eight sparse updates is denser."""
HELD_OUT_MOST = 400
SYNC_EVALUATED_EVERY = 10
ADAMW, MUON = "adamw", "muon"
OPTIMIZERS = (ADAMW, MUON)
EQUAL = (1.0,) * NODES


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
        {ADAMW: 0.001, MUON: 0.001},
    ),
}


class SimulatedNode:
    """What stays on a node between rounds."""

    def __init__(self) -> None:
        self.optimizer: OptimizerState | None = None
        self.residual: Float32s | None = None


class LossPoint(NamedTuple):
    """Held-out loss after some samples of all nodes together."""

    samples: int
    loss: float


class RoundWay(NamedTuple):
    """How rounds are trained."""

    learning_rate: float
    codec: str = CODEC
    """Codec of updates, and of deltas unless it is sparse: those are then in `DENSER`."""
    step_shares: tuple[float, ...] = EQUAL
    """Inner steps of each node over the task's; `NODES` of them."""
    schedule: str = "constant"
    """One of `hypergpu.optimizer.SCHEDULES`."""
    scheduled_samples: int = 0
    """Samples of all nodes at which the schedule ends."""


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

    def rounds(self, way: RoundWay) -> Iterator[LossPoint]:
        """Rounds of inner steps, encoded updates, the coordinator's fold and its delta."""
        with tempfile.TemporaryDirectory() as name:
            yield from self._rounds_in(Path(name), way)

    def _rounds_in(self, folder: Path, way: RoundWay) -> Iterator[LossPoint]:
        path = folder / "model"
        first = self._judge.initial(self._seed)
        path.write_bytes(b"".join(vector.tobytes() for vector in first))
        base, outer_state = StoredBlob(path, digest_of(path.read_bytes())), None
        yield self._point(0, first)
        nodes = [SimulatedNode() for _ in range(NODES)]
        steps = [max(1, round(self._task.inner_steps * share)) for share in way.step_shares]
        is_sparse = way.codec in SPARSE_CODECS
        round_samples = sum(steps) * BATCH
        for number in range(self._task.samples_most // round_samples):
            before = Flat.view(self._layout, np.fromfile(base.path, np.uint8))
            start, updates = number * round_samples, []
            for slot, node in enumerate(nodes):
                shard = steps[slot] * BATCH
                indices = self._indices(start, shard)
                payload = self._update(before, node, indices, way, number * round_samples)
                start += shard
                update_path = folder / f"update-{slot}"
                update_path.write_bytes(payload)
                digest = digest_of(payload)
                updates.append(StoredUpdate(update_path, digest, Samples(shard), way.codec))
            choice = outer_step(
                JobSpec(""), round_number=number, participants=NODES, is_sparse=is_sparse
            )
            result = fold(
                FoldRequest(
                    layout=self._layout,
                    down=DENSER if is_sparse else way.codec,
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
            yield self._point((number + 1) * round_samples, model)

    def _update(
        self, before: Flat, node: SimulatedNode, indices: Indices, way: RoundWay, processed: int
    ) -> bytes:
        """One node's encoded update.

        Args:
            before: The round's model.
            node: What it keeps between rounds.
            indices: Its shard.
            way: Learning rate, schedule and codec.
            processed: Samples of all nodes before the round.
        """
        self._trainer.begin(InitialState(before, self._seed, node.optimizer, self._rule))
        for start in range(0, len(indices), BATCH):
            done_samples = processed + start * NODES
            progress = done_samples / way.scheduled_samples if way.scheduled_samples else 0.0
            rate = way.learning_rate * schedule_share(way.schedule, progress)
            self._trainer.step(indices[start : start + BATCH], rate)
        after = Flat.empty(self._layout)
        self._trainer.store(after)
        np.subtract(before.parameters, after.parameters, out=after.parameters)
        encoded_update = encode_update(self._layout, way.codec, after, node.residual)
        node.residual = encoded_update.residual
        node.optimizer = {name: array.copy() for name, array in self._trainer.optimizer().items()}
        return encoded_update.payload.tobytes()

    def _indices(self, start: int, count: int) -> Indices:
        """A stretch of the one sample stream that all nodes share."""
        return stream_indices(self._members, 0, self._seed, [SampleRange(start, Samples(count))])

    def _point(self, samples: int, model: Flat) -> LossPoint:
        return LossPoint(samples, self._judge.evaluate(model, HELD_OUT_MOST).metric("loss"))
