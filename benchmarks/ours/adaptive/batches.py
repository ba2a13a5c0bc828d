"""What a job's loss is where nodes have batches of their own, at equal samples: rounds of several
nodes in this process, by the product's own trainer, codec and fold.
"""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from coordinator.core.round.outer_step import outer_step
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_files import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.shell.worker.batches import Schedule, learning_rate
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, OptimizerState
from hypergpu.crypto import digest_of
from hypergpu.dataset import stream_indices
from hypergpu.jobfile.spec import Inner, JobSpec, TrainingSettings
from hypergpu.statements import SampleRange
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.workload import build, find

CODEC = "int4"


class TrainedKind(NamedTuple):
    """A model and the settings that it trains with."""

    name: str
    workload: str
    options: dict[str, Any]
    inner: Inner
    batch_size: int
    inner_steps: int
    rounds: int
    nodes: int = 4


class NodeBatch(NamedTuple):
    """A node's batch and rate."""

    batch_size: int
    learning_rate: float


KINDS = (
    TrainedKind("MLP", "digits-mlp", {"width": 64}, Inner(learning_rate=0.003), 32, 16, 30),
    TrainedKind(
        "CNN", "digits-cnn", {}, Inner(learning_rate=0.0007, schedule="cosine"), 32, 16, 12
    ),
    TrainedKind(
        "GPT",
        "text-gpt",
        {"width": 32, "layers": 2},
        Inner(learning_rate=0.003, schedule="cosine"),
        16,
        8,
        20,
    ),
    TrainedKind(
        "MLP, SGD",
        "digits-mlp",
        {"width": 64},
        Inner(optimizer="sgd", learning_rate=0.1, momentum=0.9),
        32,
        16,
        30,
    ),
)


class _NodeState:
    """What stays on a node between rounds."""

    def __init__(self) -> None:
        self.optimizer: OptimizerState | None = None
        self.residual: Float32s | None = None


class _Bench:
    """The workload, with one trainer that plays every node in turn."""

    def __init__(self, kind: TrainedKind) -> None:
        torch.set_num_threads(1)
        workload = build(find(kind.workload), kind.options)
        self.judge = TorchEvaluator(workload, "")
        device = Device("cpu", "CPU", Bytes(0), has_bf16=False)
        self.trainer = TorchTrainer(workload, device, self.judge.dataset.train)
        self.layout = self.trainer.layout
        self.members = np.arange(len(self.trainer.samples.labels), dtype=np.int64)


@cache
def _bench(name: str) -> _Bench:
    return _Bench(next(each for each in KINDS if each.name == name))


class _Place(NamedTuple):
    """Where in the job a shard begins."""

    seed: int
    start: int
    """Its first position in the stream of samples."""
    done: int
    """Samples of the rounds before."""


def held_out_loss(kind: TrainedKind, batches: Sequence[NodeBatch], seed: int) -> float:
    """Held-out loss of the last model: each node trains as many samples, in batches of its own.

    Args:
        kind: What is trained.
        batches: Of each node; their sizes divide ``batch_size * inner_steps``.
        seed: Of the first model and of the stream.
    """
    bench, shard = _bench(kind.name), kind.batch_size * kind.inner_steps
    nodes = [_NodeState() for _ in batches]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model"
        path.write_bytes(b"".join(each.tobytes() for each in bench.judge.initial(seed)))
        base, state = StoredBlob(path, digest_of(path.read_bytes())), None
        for number in range(kind.rounds):
            before = Flat.view(bench.layout, np.fromfile(base.path, np.uint8))
            updates = []
            done = number * kind.nodes * shard
            for slot, (node, own) in enumerate(zip(nodes, batches, strict=True)):
                place = _Place(seed, done + slot * shard, done)
                payload = _update(bench, kind, before, (node, own), place)
                stored = folder / f"update-{slot}"
                stored.write_bytes(payload)
                updates.append(StoredUpdate(stored, digest_of(payload), shard, CODEC))
            base, state = _folded(bench, kind, (base, state), updates, number, folder)
        model = Flat.view(bench.layout, np.fromfile(base.path, np.uint8))
        return bench.judge.evaluate(model).loss


def _folded(
    bench: _Bench,
    kind: TrainedKind,
    before: tuple[StoredBlob, StoredBlob | None],
    updates: Sequence[StoredUpdate],
    number: int,
    folder: Path,
) -> tuple[StoredBlob, StoredBlob | None]:
    """The next model and the state of the outer step."""
    training = TrainingSettings(rounds=kind.rounds, inner_steps=kind.inner_steps, nodes=kind.nodes)
    spec = JobSpec(workload=kind.workload, strategy="aware", inner=kind.inner, training=training)
    choice = outer_step(spec, round_number=number, participants=kind.nodes, is_sparse=False)
    folded = fold(
        FoldRequest(
            layout=bench.layout,
            down=CODEC,
            outer=choice.step,
            base_model=before[0],
            outer_state=before[1],
            updates=tuple(updates),
            output_dir=folder,
        )
    )
    state = folded.outer_state
    return (
        StoredBlob(folded.model.path, folded.model.digest),
        None if state is None else StoredBlob(state.path, state.digest),
    )


def _update(
    bench: _Bench,
    kind: TrainedKind,
    before: Flat,
    worker: tuple[_NodeState, NodeBatch],
    place: _Place,
) -> bytes:
    (node, own), trainer = worker, bench.trainer
    shard = kind.batch_size * kind.inner_steps
    total = Samples(kind.rounds * kind.nodes * shard)
    schedule = Schedule(own.learning_rate, kind.inner.schedule, Samples(0), total)
    seed = place.seed + place.start
    trainer.begin(InitialState(before, seed, node.optimizer, kind.inner.rule))
    stretch = [SampleRange(place.start, Samples(shard))]
    indices = stream_indices(bench.members, 0, place.seed, stretch)
    for first in range(0, shard, own.batch_size):
        rate = learning_rate(schedule, Samples(place.done + first + own.batch_size))
        trainer.step(indices[first : first + own.batch_size], rate)
    after = Flat.empty(bench.layout)
    trainer.store(after)
    np.subtract(before.parameters, after.parameters, out=after.parameters)
    encoded = encode_update(bench.layout, CODEC, after, node.residual)
    node.residual = encoded.residual
    node.optimizer = {name: array.copy() for name, array in trainer.optimizer().items()}
    return encoded.payload.tobytes()
