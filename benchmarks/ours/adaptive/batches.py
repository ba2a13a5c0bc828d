"""What a job's loss is where nodes have batches of their own, at equal samples: rounds of several
nodes in this process, by the product's own trainer, codec and fold.
"""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.ours.table import PartFigures
from coordinator.core.training.outer_step import outer_step
from coordinator.core.training.plan.agreement import update_agreement
from coordinator.core.training.plan.batches import BatchBounds, batch_rate, growth_for_round
from coordinator.core.training.plan.decision import (
    BatchGrowth,
    NodePlan,
    NodeResult,
    PlanMemory,
    PlanRequest,
)
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.shell.worker.batches import Schedule, learning_rate
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, OptimizerState
from hypergpu.assignment import SampleRange
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Aware, Inner, JobSpec, TrainingSettings
from hypergpu.partitions import stream_indices
from hypergpu.tensors.codec import decode_parameters, encode_update
from hypergpu.tensors.layout import Flat, Float32s
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.registry import build, find

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
        8,
        32,
        8,
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
STATED = (1.0, 1.0, 1.0, 1.0)
UNLIKE = (4.0, 4.0, 1.0, 0.25)
"""Two devices that larger batches fill, one that the stated one does, and one that is too slow."""
ALL_UNFILLED = (4.0, 4.0, 4.0, 4.0)
_SEEDS = 3


def loss_gaps(*, is_quick: bool) -> PartFigures:
    """Compare jobs of unlike devices with jobs of stated batches, seed by seed."""
    kinds, rows, gaps = KINDS[:1] if is_quick else KINDS[:3], [], []
    for kind in KINDS[:1] if is_quick else KINDS:
        stated_losses = [train_job(kind, STATED, seed, "scaled").loss for seed in range(_SEEDS)]
        spread = stdev(stated_losses) / fmean(stated_losses)
        rows.append([kind.name, "as stated", "", "", f"{spread:.3f}"])
        for name, shares, rate in _FLEETS:
            jobs = [train_job(kind, shares, seed, rate) for seed in range(_SEEDS)]
            gap = fmean(job.loss / own - 1 for job, own in zip(jobs, stated_losses, strict=True))
            grown_batches = fmean(job.grown for job in jobs)
            rows.append([kind.name, name, rate, f"{grown_batches:.2f}", f"{gap:+.3f}"])
            if shares == UNLIKE and rate == "scaled" and kind in kinds:
                gaps.append(gap)
    return PartFigures(
        rows=rows,
        metrics={"batch_loss_gap": fmean(gaps), "batch_loss_gap_most": max(gaps)},
        notes=(
            f"Held-out loss over that of stated batches at equal samples, {_SEEDS} paired seeds;",
            "beside stated ones the spread between seeds (standard deviation over mean).",
            "Unlike: two of four devices are faster by larger batches, one has a quarter of one.",
        ),
    )


_FLEETS = (
    ("unlike", UNLIKE, "scaled"),
    ("unlike", UNLIKE, "stated"),
    ("all faster by larger ones", ALL_UNFILLED, "scaled"),
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
    round: int
    slot: int


class TrainedJob(NamedTuple):
    """What a job came to."""

    loss: float
    """Held-out loss of its last model, the sum over samples."""
    grown: float
    """Part of the nodes' rounds in which the batch was larger than the stated one."""


def train_job(kind: TrainedKind, shares: Sequence[float], seed: int, rate: str) -> TrainedJob:
    """Train: each node takes as many samples a round, in batches of its own.

    Args:
        kind: What is trained.
        shares: Of each node's device: the batch, over the stated one, up to which it is faster by
            the sample, or below 1 the one that it has to make do with.
        seed: Of the first model and of the stream.
        rate: As ``aware.batch_rate``.
    """
    bench, spec, grown_count = _bench(kind.name), _spec(kind, rate), 0
    nodes, memory = [_NodeState() for _ in shares], PlanMemory(kind.inner_steps, 0, is_sparse=False)
    sizes = [kind.batch_size for _ in shares]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model"
        path.write_bytes(b"".join(each.tobytes() for each in bench.judge.initial(seed)))
        files: _OuterFiles = (StoredBlob(path, digest_of(path.read_bytes())), None)
        for number in range(kind.rounds):
            before = Flat.view(bench.layout, np.fromfile(files[0].path, np.uint8))
            sizes = _batches(kind, shares, sizes, memory.noise_share)
            grown_count += sum(size > kind.batch_size for size in sizes)
            payloads = [
                _update(bench, spec, before, (node, size), _Place(seed, number, slot))
                for slot, (node, size) in enumerate(zip(nodes, sizes, strict=True))
            ]
            share = update_agreement(_request(bench, spec, memory, payloads, sizes)).noise_share
            memory = replace(memory, noise_share=share)
            files = _take_outer_step(bench, spec, files, payloads, number)
        model = Flat.view(bench.layout, np.fromfile(files[0].path, np.uint8))
        loss = bench.judge.evaluate(model).loss
        return TrainedJob(loss, grown_count / kind.rounds / len(shares))


_OuterFiles = tuple[StoredBlob, StoredBlob | None]
"""A model and the state of the outer step."""


def _spec(kind: TrainedKind, rate: str) -> JobSpec:
    return JobSpec(
        workload=kind.workload,
        strategy="aware",
        inner=kind.inner,
        training=TrainingSettings(
            rounds=kind.rounds,
            inner_steps=kind.inner_steps,
            batch_size=kind.batch_size,
            nodes=kind.nodes,
        ),
        aware=Aware(batch_rate=rate),
    )


def _batches(
    kind: TrainedKind, shares: Sequence[float], before: Sequence[int], noise: float
) -> list[int]:
    """Each node's batch, as plans have it once trials have shown what its device is."""
    sizes, stated_batch = [], kind.batch_size
    for share, size in zip(shares, before, strict=True):
        batch_growth = BatchGrowth(size if size > stated_batch else 0, 1.0, 2, 1)
        bounds = BatchBounds(stated_batch, int(max(1, share) * stated_batch))
        growth = growth_for_round(
            batch_growth, bounds, stated_batch, number=0, steps=kind.inner_steps, noise_share=noise
        )
        grown_batch = growth.trial or growth.size or stated_batch
        sizes.append(grown_batch if share >= 1 else int(share * stated_batch))
    return sizes


def _request(
    bench: _Bench,
    spec: JobSpec,
    memory: PlanMemory,
    payloads: Sequence[bytes],
    sizes: Sequence[int],
) -> PlanRequest:
    """What the next plan is told of a round."""
    updates = np.stack([decode_parameters(bench.layout, CODEC, each) for each in payloads])
    squares = float(np.square(updates).sum())
    samples = spec.training.batch_size * spec.training.inner_steps
    plans = [NodePlan(samples // size, CODEC, "", batch_size=size) for size in sizes]
    return PlanRequest(
        round=1,
        at_ms=Milliseconds(0),
        spec=spec,
        candidates={},
        samples_done=Samples(0),
        samples_total=Samples(0),
        previous=memory,
        results={
            NodeId(str(slot)): NodeResult(plan, Milliseconds(1)) for slot, plan in enumerate(plans)
        },
        agreement=float(np.square(updates.sum(axis=0)).sum()) / squares if squares else None,
    )


def _take_outer_step(
    bench: _Bench, spec: JobSpec, before: _OuterFiles, payloads: Sequence[bytes], number: int
) -> _OuterFiles:
    """The next model and the state of the outer step, beside the model before."""
    updates, folder, nodes = [], before[0].path.parent, spec.training.nodes
    for slot, payload in enumerate(payloads):
        update_file = folder / f"update-{slot}"
        update_file.write_bytes(payload)
        updates.append(StoredUpdate(update_file, digest_of(payload), 1, CODEC))
    choice = outer_step(spec, round_number=number, participants=nodes, is_sparse=False)
    fold_result = fold(
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
    state = fold_result.outer_state
    return (
        StoredBlob(fold_result.model.path, fold_result.model.digest),
        None if state is None else StoredBlob(state.path, state.digest),
    )


def _update(
    bench: _Bench, spec: JobSpec, before: Flat, worker: tuple[_NodeState, int], place: _Place
) -> bytes:
    (node, size), trainer, training = worker, bench.trainer, spec.training
    shard = training.batch_size * training.inner_steps
    done_samples = place.round * training.nodes * shard
    total = Samples(training.rounds * training.nodes * shard)
    peak = batch_rate(spec, size) or spec.inner.learning_rate
    schedule = Schedule(peak, spec.inner.schedule, Samples(0), total)
    start = done_samples + place.slot * shard
    trainer.begin(InitialState(before, place.seed + start, node.optimizer, spec.inner.rule))
    stretch = [SampleRange(start, Samples(shard))]
    indices = stream_indices(bench.members, 0, place.seed, stretch)
    for first in range(0, shard, size):
        rate = learning_rate(schedule, Samples(done_samples + first + size))
        trainer.step(indices[first : first + size], rate)
    after = Flat.empty(bench.layout)
    trainer.store(after)
    np.subtract(before.parameters, after.parameters, out=after.parameters)
    encoded_update = encode_update(bench.layout, CODEC, after, node.residual)
    node.residual = encoded_update.residual
    node.optimizer = {name: array.copy() for name, array in trainer.optimizer().items()}
    return encoded_update.payload.tobytes()
