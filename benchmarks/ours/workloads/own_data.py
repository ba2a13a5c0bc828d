"""A job whose samples stay on five nodes, and the same job with the same samples uploaded.

Digits are dealt to the nodes by Dirichlet label skew, as the product deals an uploaded set; where
they are uploaded any node trains on any of them. The nodes share this process: the round machine
that gives out shards, batches, trainer, codec and fold are the product's own. Updates weigh by
their samples alone (the rule ``mean``).
"""

import math
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch

from benchmarks.ours.table import PartFigures
from coordinator.core.training.job import events
from coordinator.core.training.job.commands import (
    Aggregate,
    AssignShard,
    Command,
    EvaluateModel,
    InitialiseModel,
)
from coordinator.core.training.job.state import AcceptedUpdate, Job, Model
from coordinator.core.training.transition import transition
from coordinator.core.work import work_events
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.shell.worker.batches import batches_of
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, OptimizerState
from hypergpu.assignment import Assignment
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import (
    CodecChoice,
    Data,
    Evaluation,
    Inner,
    JobSpec,
    RoundRule,
    TrainingSettings,
    Trust,
)
from hypergpu.partitions import Sharding, partition_indices
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.workloads.datasets import ArraySamples, SampleSource
from hypergpu.workloads.digits import digits
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.registry import build, find

NODES = 5
ALPHA = 0.5
ROUNDS, INNER_STEPS, BATCH = 30, 20, 32
OWN = Data(source="node", name="digits", path="held-out")
_NOW = Milliseconds(0)


def own_data_figures(*, is_quick: bool) -> PartFigures:
    """Train with each seed: uploaded, left on nodes, and left there with equal weights."""
    torch.set_num_threads(1)
    seeds = range(1, 2 if is_quick else 4)
    accuracy_rows = [_accuracies(seed) for seed in seeds]
    rows = [
        _row(f"seed {seed}", accuracies)
        for seed, accuracies in zip(seeds, accuracy_rows, strict=True)
    ]
    means = [fmean(column) for column in zip(*accuracy_rows, strict=True)]
    rows.append(_row("mean", means))
    points = [uploaded_accuracy - own for uploaded_accuracy, own, _ in accuracy_rows]
    error = stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 0.0
    metrics = {
        "private_data_points": means[0] - means[1],
        "private_data_points_error": error,
        "private_data_accuracy": means[1],
        "private_data_uploaded_accuracy": means[0],
        "private_data_equal_accuracy": means[2],
    }
    note = (
        f"Data left on nodes: {NODES} nodes, Dirichlet {ALPHA}; uploaded, any node trains on any"
        f" sample. {ROUNDS} rounds of {INNER_STEPS} steps of {BATCH}, int4, {len(seeds)} seeds;"
        f" standard error of the difference {error:.2f}. Where nodes do not tell how many"
        f" samples they have, all weigh the same, and {means[2]:.2f} % are reached."
    )
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def _row(name: str, accuracies: Sequence[float]) -> list[str]:
    uploaded_accuracy, own, equal = accuracies
    points = f"{uploaded_accuracy - own:+.2f} points"
    return [
        f"data on nodes, {name}",
        f"{uploaded_accuracy:.2f} %",
        f"{own:.2f} %",
        points,
        f"{equal:.2f} % by equal weights",
    ]


def _accuracies(seed: int) -> tuple[float, float, float]:
    """Held-out accuracies in percent after the last round."""
    train = digits().train
    partitions = partition_indices(train.labels, Sharding(NODES, ALPHA, seed))
    own = [_subset(train, indices) for indices in partitions]
    arms = ((Data(), [train] * NODES, 0), (OWN, own, 1), (OWN, own, 0))
    percents = []
    for source, samples, count_share in arms:
        with tempfile.TemporaryDirectory(prefix="hypergpu-bench-") as folder:
            run = _JobInProcess(
                _spec(seed, source), samples, Path(folder), tells_counts=count_share > 0
            )
            percents.append(100 * run.accuracy())
    return percents[0], percents[1], percents[2]


def _spec(seed: int, source: Data) -> JobSpec:
    return JobSpec(
        workload="digits-mlp",
        training=TrainingSettings(ROUNDS, INNER_STEPS, BATCH, seed, NODES),
        inner=Inner(learning_rate=1e-3),
        codec=CodecChoice("int4", "int4"),
        round=RoundRule(quorum=1.0),
        data=source,
        evaluation=Evaluation(every=ROUNDS),
        trust=Trust(rule="mean"),
    )


def _subset(
    samples: SampleSource, indices: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> ArraySamples:
    inputs, targets = samples.batch(indices)
    return ArraySamples(inputs, targets, targets)


class _JobInProcess:
    """One job with its nodes, played to its end.

    Args:
        spec: Its settings.
        samples: What each node trains on, by slot.
        folder: Holds models and updates.
        tells_counts: Whether nodes tell how many samples they have.
    """

    def __init__(
        self,
        spec: JobSpec,
        samples: Sequence[SampleSource],
        folder: Path,
        *,
        tells_counts: bool,
    ) -> None:
        workload = build(find("digits-mlp"), {"width": 64})
        self._judge = TorchEvaluator(workload, "")
        device = Device("cpu", "CPU", Bytes(0), has_bf16=False)
        self._trainer = TorchTrainer(workload, device, samples[0])
        self._spec, self._samples, self._folder = spec, samples, folder
        self._tells_counts = tells_counts
        self._optimizers: dict[NodeId, OptimizerState] = {}
        self._residuals: dict[NodeId, Float32s] = {}
        self._paths: dict[Digest, Path] = {}
        self._accuracy = 0.0

    def accuracy(self) -> float:
        """Held-out accuracy of the last model."""
        creation = events.JobCreated(at_ms=_NOW, job_id=JobId("job-000000000000"), spec=self._spec)
        joins = (work_events.NodeJoined(at_ms=_NOW, node=NodeId(f"n{n}")) for n in range(NODES))
        job: Job | None = None
        queue: deque[events.Event] = deque([creation, *joins])
        while queue:
            step = transition(job, queue.popleft())
            job = step.job
            answers = (self._answer(command) for command in step.commands)
            queue.extend(each for each in answers if each is not None)
        return self._accuracy

    def _answer(self, command: Command) -> events.Event | None:
        match command:
            case InitialiseModel():
                blob = self._write(
                    "first", _model_bytes(self._judge.initial(self._spec.training.seed))
                )
                sizes = (Samples(len(self._samples[0].labels)),)
                model = Model(0, blob)
                return events.ModelInitialised(at_ms=_NOW, model=model, partition_sizes=sizes)
            case AssignShard(node=node, assignment=assignment):
                return self._train(node, assignment)
            case Aggregate():
                return self._fold(command)
            case EvaluateModel(round=number, model=model):
                self._accuracy = self._judge.evaluate(self._model(model)).metric("accuracy")
                return events.EvaluationFailed(at_ms=_NOW, round=number, reason="it is kept here")
            case _:
                return None

    def _train(self, node: NodeId, assignment: Assignment) -> events.Event:
        """The node's update, as its worker makes it."""
        task, trainer = assignment.task, self._trainer
        trainer.samples = own = self._samples[assignment.slot]
        before = Flat.view(trainer.layout, np.fromfile(self._paths[task.model.digest], np.uint8))
        state = self._optimizers.get(node)
        trainer.begin(InitialState(before, task.seed, state, task.optimizer))
        batches = batches_of(task, trainer)
        for number in range(len(batches.indices)):
            trainer.step(*batches.at(number))
        after = Flat.empty(trainer.layout)
        trainer.store(after)
        np.subtract(before.parameters, after.parameters, out=after.parameters)
        encoded_update = encode_update(trainer.layout, task.codec, after, self._residuals.get(node))
        self._residuals[node] = encoded_update.residual
        self._optimizers[node] = {key: each.copy() for key, each in trainer.optimizer().items()}
        lease = assignment.lease
        blob = self._write(f"update-{assignment.slot}", encoded_update.payload.tobytes())
        data_samples = Samples(len(own.labels) if self._tells_counts else 0)
        update = AcceptedUpdate(blob, Samples(0), 0, data_samples=data_samples)
        return events.UpdateReceived(
            at_ms=_NOW, node=node, round=lease.round, lease=lease.number, update=update
        )

    def _fold(self, command: Aggregate) -> events.Event:
        base = command.base
        outer_file = base.outer_state
        fold_result = fold(
            FoldRequest(
                layout=self._trainer.layout,
                down=command.down,
                outer=command.outer,
                scale=command.scale,
                base_model=self._stored_blob(base.blob),
                outer_state=None if outer_file is None else self._stored_blob(outer_file),
                updates=tuple(
                    StoredUpdate(
                        self._paths[each.blob.digest], each.blob.digest, each.weight, each.codec
                    )
                    for each in command.updates
                ),
                output_dir=self._folder,
            )
        )
        model_file, outer = fold_result.model, fold_result.outer_state
        self._paths[model_file.digest] = model_file.path
        if outer is not None:
            self._paths[outer.digest] = outer.path
        state = None if outer is None else BlobRef(outer.digest, outer.size_bytes)
        model = Model(command.round + 1, BlobRef(model_file.digest, model_file.size_bytes), state)
        return events.AggregateReady(at_ms=_NOW, round=command.round, model=model)

    def _model(self, model: Model) -> Flat:
        return Flat.view(
            self._trainer.layout, np.fromfile(self._paths[model.blob.digest], np.uint8)
        )

    def _stored_blob(self, blob: BlobRef) -> StoredBlob:
        return StoredBlob(self._paths[blob.digest], blob.digest)

    def _write(self, name: str, content: bytes) -> BlobRef:
        digest = digest_of(content)
        self._paths[digest] = self._folder / name
        self._paths[digest].write_bytes(content)
        return BlobRef(digest, Bytes(len(content)))


def _model_bytes(model: Flat) -> bytes:
    return b"".join(vector.tobytes() for vector in model)
