"""A job with a mixture of experts, played to its end in this process.

The round machine, the experts of each node, trainers, codecs, trust rule, fold, parts and evaluator
are the product's own; there are no processes and no network. Nodes may lie.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

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
from coordinator.core.training.trust.own_samples import USE_LEAST
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import WriteRecord
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.evaluator.answer import Evaluator
from coordinator.shell.evaluator.process import EvaluatorFailure
from coordinator.shell.kinds.training.aggregation import Aggregation
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.part_folding import first_parts
from coordinator.shell.kinds.training.weighing import UpdateWeighing
from coordinator.shell.store.blobs.pins import Pins
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.storage import Storage
from gpu_node.shell.worker.batches import batches_of
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, OptimizerState
from hypergpu.assignment import Assignment
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s, Layout
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.workloads.datasets import SampleSource
from hypergpu.workloads.networks.measuring import measure_module
from hypergpu.workloads.networks.mixture import ByteMixture
from hypergpu.workloads.networks.task import (
    Device,
    load_module,
    module_initial,
    workload_layout,
)
from hypergpu.workloads.registry import build, find

WORKLOAD = "text-mixture"
Lie = Callable[[Layout, Flat], None]
"""Changes an update in its place: pseudo-gradient, statistics and integers after training."""
_NOW = Milliseconds(0)
_QUOTA_BYTES = 8 << 30
_CPU = Device("cpu", "CPU", Bytes(0), has_bf16=False)


@dataclass
class MixtureNode:
    """What a node keeps between rounds, and what it moved."""

    optimizer: OptimizerState | None = None
    residual: Float32s | None = None
    held: set[Digest] = field(default_factory=set)
    """Models in its cache."""
    up_bytes: int = 0
    down_bytes: int = 0
    pay: int = 0
    """Samples times quality, in 1/10,000."""


class _Evaluators:
    """The evaluator, in this process."""

    def __init__(self) -> None:
        self._evaluator = Evaluator()

    async def _ask(self, _job: object, request: Any) -> Any:
        answer = self._evaluator.answer(request)
        if isinstance(answer, EvaluatorFailure):
            raise HyperGPUError(Reason[answer.reason], answer.detail)
        return answer

    measure_gradient = measure_shards = try_update = _ask


@dataclass
class MixtureJob:
    """One job with its nodes.

    Args:
        spec: Its settings.
        folder: Holds models and updates.
        lies: Of nodes that lie, by number.
        absent: Nodes that are not there, by number.
    """

    spec: JobSpec
    folder: Path
    lies: Mapping[int, Lie] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Build the workload once, for nodes and judge."""
        self.nodes: dict[NodeId, MixtureNode] = {}
        self.workload: ByteMixture = build(find(WORKLOAD), self.spec.options)
        self._module = self.workload.model()
        self.layout = workload_layout(self.workload, self._module)
        self._dataset = self.workload.load("")
        self._trainers: dict[tuple[int, ...], TorchTrainer] = {}
        self._blobs = BlobStore(self.folder, Space(self.folder, _QUOTA_BYTES))
        self._model: Model | None = None
        absent_part: Any = None
        storage = Storage(self.folder, self._blobs, absent_part, absent_part, Pins(), absent_part)
        evaluators: Any = _Evaluators()
        heavy = HeavyWork()
        weighing = UpdateWeighing(storage, evaluators, heavy, b"s" * 32)
        self._aggregation = Aggregation(absent_part, storage, heavy, weighing)

    def loss(self) -> float:
        """Train to the end; the held-out loss of the last model."""
        asyncio.run(self._play())
        if self._model is None:
            raise AssertionError("a job that has ended has a model")
        octets = np.fromfile(self._blobs.path(self._model.blob.digest), np.uint8)
        load_module(self._module, self.layout, Flat.view(self.layout, octets))
        sums = measure_module(self.workload, self._module.eval(), self._dataset.test, 2_048)
        return sums.loss / sums.samples

    async def _play(self) -> None:
        is_robust = self.spec.trust.rule == "robust"
        creation = events.JobCreated(
            at_ms=_NOW,
            job_id=JobId("job-000000000000"),
            spec=self.spec,
            judges_own_samples=is_robust,
            tries_updates=is_robust,
            counts_looks=is_robust,
            use_least=USE_LEAST if is_robust else 0,
        )
        numbers = (n for n in range(self.spec.training.nodes) if n not in self.absent)
        joins = [work_events.NodeJoined(at_ms=_NOW, node=NodeId(f"n{n}")) for n in numbers]
        job: Job | None = None
        runtime: JobRuntime | None = None
        queue: deque[events.Event] = deque([creation, *joins])
        while queue:
            step = transition(job, queue.popleft())
            job = step.job
            runtime = runtime or self._runtime(job)
            runtime.job, self._model = job, job.model
            for command in step.commands:
                answer = await self._answer(runtime, command)
                queue.extend([] if answer is None else [answer])

    def _runtime(self, job: Job) -> JobRuntime:
        runtime = JobRuntime(job, 0)
        runtime.layout, runtime.is_partial = self.layout, self.workload.mixture.is_partial
        return runtime

    async def _answer(self, runtime: JobRuntime, command: Command) -> events.Event | None:
        match command:
            case InitialiseModel():
                return self._first_model()
            case AssignShard(node=node, assignment=assignment):
                return self._train(node, assignment)
            case Aggregate():
                aggregated_round = await self._aggregation.weigh_and_fold(runtime, command)
                draw = self._aggregation.weighing.round_draw(runtime.job.job_id, command.round + 1)
                self._aggregation.storage.pins.drop(aggregated_round.pinned)
                return replace(aggregated_round.event, draw=draw)
            case EvaluateModel(round=number):
                return events.EvaluationFailed(at_ms=_NOW, round=number, reason="it is kept here")
            case WriteRecord(record=events.RoundMeasured(updates=updates)):
                for each in updates:
                    score = each.contribution.samples * each.quality_bps
                    self._node(each.contribution.node).pay += score
            case _:
                pass
        return None

    def _first_model(self) -> events.Event:
        flat = module_initial(self.workload.model, self.spec.training.seed)
        blob = self._blobs.put(b"".join(vector.tobytes() for vector in flat), keep_s=-1)
        parts = first_parts(self.workload.mixture, self._blobs.path(blob.digest), self.layout)
        for file in parts.files:
            self._blobs.adopt(file.path, BlobRef(file.digest, file.size_bytes), keep_s=-1)
        model = Model(0, blob)
        if parts.parts:
            model = Model(0, blob, parts=parts.parts)
        return events.ModelInitialised(
            at_ms=_NOW,
            model=model,
            partition_sizes=(Samples(len(self._dataset.train.labels)),),
            layout=self.layout.digest,
            mixture=self.workload.mixture,
        )

    def _node(self, node: NodeId) -> MixtureNode:
        return self.nodes.setdefault(node, MixtureNode())

    def trainer(self, experts: tuple[int, ...]) -> TorchTrainer:
        """A trainer that holds these experts; all for none."""
        if experts not in self._trainers:
            workload = self.workload.holding(experts) if experts else self.workload
            samples: SampleSource = self._dataset.train
            self._trainers[experts] = TorchTrainer(workload, _CPU, samples)
        return self._trainers[experts]

    def _train(self, node: NodeId, assignment: Assignment) -> events.Event:
        """The node's update, as its worker makes it."""
        task, state = assignment.task, self._node(node)
        trainer = self.trainer(task.experts or ())
        state.down_bytes += _fetched_bytes(state, assignment)
        state.held.add(task.model.digest)
        octets = np.fromfile(self._blobs.path(task.model.digest), np.uint8)
        before = Flat.view(trainer.layout, octets)
        trainer.begin(InitialState(before, task.seed, state.optimizer, task.optimizer))
        batches = batches_of(task, trainer)
        for number in range(len(batches.indices)):
            trainer.step(*batches.at(number))
        after = Flat.empty(trainer.layout)
        trainer.store(after)
        np.subtract(before.parameters, after.parameters, out=after.parameters)
        if lie := self.lies.get(int(node[1:])):
            lie(trainer.layout, after)
        encoded_update = encode_update(trainer.layout, task.codec, after, state.residual)
        state.residual = encoded_update.residual
        state.optimizer = {key: each.copy() for key, each in trainer.optimizer().items()}
        blob = self._blobs.put(encoded_update.payload.tobytes(), keep_s=-1)
        state.up_bytes += blob.size_bytes
        lease = assignment.lease
        update = AcceptedUpdate(blob, Samples(0), 0, compute_ms=Milliseconds(1))
        return events.UpdateReceived(
            at_ms=_NOW, node=node, round=lease.round, lease=lease.number, update=update
        )


def _fetched_bytes(state: MixtureNode, assignment: Assignment) -> int:
    """Bytes of the model that a node lacks: deltas from what it has, or the whole; none of a first
    model that it computes for itself.
    """
    model, initial = assignment.task.model, assignment.initial
    if model.digest in state.held or (initial is not None and initial.digest == model.digest):
        return 0
    deltas = assignment.deltas
    bases = [
        at
        for at, delta in enumerate(deltas)
        if delta.base in state.held or _is_first(delta.base, assignment)
    ]
    if not bases:
        return model.size_bytes
    return sum(each.blob.size_bytes for each in deltas[bases[-1] :])


def _is_first(digest: Digest, assignment: Assignment) -> bool:
    """Whether it is a first model that nodes compute for themselves."""
    return assignment.initial is not None and assignment.initial.digest == digest
