"""The past of a long job, made in seconds: real events, journal, snapshots and blobs; no training.

The machine and the driver are the product's. Where a node would train and the coordinator fold,
each round answers with a digest at once; the two newest models are folded for real.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coordinator.core.job.commands import Aggregate, AssignShard, Command, EvaluateModel
from coordinator.core.job.events import (
    AggregateReady,
    EvaluationReady,
    JobCreated,
    ModelInitialised,
    NodeJoined,
    UpdateReceived,
)
from coordinator.core.job.state import AcceptedUpdate, Model
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.request import FoldRequest, FoldResult, StoredBlob, StoredUpdate
from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.commands.preparation import save_layout
from coordinator.shell.journal.journal import Journal
from coordinator.shell.journal.records import NodeRecord
from coordinator.shell.runtime.driver import Driver
from coordinator.shell.runtime.job_runtime import JobRuntime
from hypergpu.digest import digest_of
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings
from hypergpu.keys.signature import IdentityKey
from hypergpu.statements.assignment import BlobRef, Delta
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.workloads.registry import build, find
from hypergpu.workloads.workload import numpy_layout

JOB = JobId("long-job")
_NOW = Milliseconds(0)
_PARTITION_SAMPLES = Samples(1 << 16)


class PreparedJob(NamedTuple):
    """What the job's data folder holds."""

    nodes: tuple[NodeId, ...]
    spec: JobSpec
    layout: Layout
    update: BlobRef
    """Every participant of every round sent this one."""
    models: tuple[Model, Model]
    """The last two, on disk."""


def spec_of(parameters: int, nodes: int, every: int) -> JobSpec:
    """Default compression and outer optimizer, so that there are outer states and deltas too."""
    return JobSpec(
        workload="null",
        options={"parameters": parameters},
        training=TrainingSettings(rounds=1_000_000, inner_steps=1, nodes=nodes),
        evaluation=Evaluation(every=every),
    )


def make_history(data_dir: Path, spec: JobSpec, rounds: int) -> PreparedJob:
    """Leave in ``data_dir`` what a coordinator leaves that dies after so many rounds."""
    data_dir.mkdir(parents=True)
    stage = _prepare_folder(data_dir, spec, rounds)
    save_layout(data_dir / "jobs" / JOB, stage.layout)
    journal = Journal(str(data_dir / "journal.sqlite"))
    try:
        for node in stage.nodes:
            journal.record_node(NodeRecord(node, b"", b"{}", "benchmark", 0, 0))
        asyncio.run(_Past(journal, stage, rounds).happen())
    finally:
        journal.close()
    return stage


def _prepare_folder(data_dir: Path, spec: JobSpec, rounds: int) -> PreparedJob:
    blobs = BlobStore(data_dir, Space(data_dir))
    entry = find(spec.workload)
    layout = numpy_layout(build(entry, spec.options))
    values = np.random.default_rng(0).standard_normal(layout.parameters_count, np.float32)
    flat = Flat(values, np.empty(0, np.float32), np.empty(0, np.int64))
    base = blobs.put(bytes(values.data))
    update = blobs.put(bytes(encode_update(layout, spec.codec.up, flat).payload.data))
    samples = Samples(spec.training.inner_steps)
    stored = StoredUpdate(blobs.path(update.digest), update.digest, samples, spec.codec.up)
    request = FoldRequest(
        layout=layout,
        down=spec.codec.down,
        outer=spec.outer,
        base_model=StoredBlob(blobs.path(base.digest), base.digest),
        outer_state=None,
        updates=(stored,) * spec.training.nodes,
        output_dir=blobs.work_path("fold").parent,
    )
    before = _adopt_model(blobs, fold(request), base, rounds - 1, spec)
    if before.outer_state is None:
        raise AssertionError("the default outer optimizer leaves an outer state")
    state = before.outer_state.digest
    again = FoldRequest(
        layout=layout,
        down=request.down,
        outer=request.outer,
        base_model=StoredBlob(blobs.path(before.blob.digest), before.blob.digest),
        outer_state=StoredBlob(blobs.path(state), state),
        updates=request.updates,
        output_dir=request.output_dir,
    )
    newest = _adopt_model(blobs, fold(again), before.blob, rounds, spec)
    keys = (IdentityKey.generate() for _ in range(spec.training.nodes))
    return PreparedJob(tuple(key.node_id for key in keys), spec, layout, update, (before, newest))


def _adopt_model(
    blobs: BlobStore, result: FoldResult, base: BlobRef, number: int, spec: JobSpec
) -> Model:
    kept = {file: BlobRef(file.digest, file.size_bytes) for file in result.files}
    for file, blob in kept.items():
        blobs.adopt(file.path, blob)
    if result.outer_state is None or result.delta is None:
        raise AssertionError("compression both ways leaves an outer state and a delta")
    delta = Delta(base.digest, kept[result.delta], spec.codec.down)
    return Model(number, kept[result.model], kept[result.outer_state], (delta,))


class _Past:
    """Answers every command with the event that a healthy world would answer with."""

    def __init__(self, journal: Journal, stage: PreparedJob, rounds: int) -> None:
        self._stage = stage
        self._rounds = rounds
        self._driver = Driver(journal)

    async def happen(self) -> None:
        """Begin the job; it ends with its last round open and every node at work in it."""
        running = asyncio.create_task(self._driver.run(self._perform, lambda _decision: None))
        stage = self._stage
        await self._driver.submit(JOB, JobCreated(at_ms=_NOW, job_id=JOB, spec=stage.spec))
        first = Model(0, BlobRef(digest_of(b"first"), stage.models[0].blob.size_bytes))
        sizes = (_PARTITION_SAMPLES,)
        await self._driver.submit(
            JOB, ModelInitialised(at_ms=_NOW, model=first, partition_sizes=sizes)
        )
        for node in stage.nodes:
            self._driver.submit(JOB, NodeJoined(at_ms=_NOW, node=node))
        await running

    def _perform(self, room: JobRuntime, command: Command) -> None:
        match command:
            case AssignShard() if command.assignment.lease.round < self._rounds:
                self._driver.submit(JOB, self._update(command))
            case AssignShard():
                self._driver.close()
            case Aggregate():
                event = AggregateReady(
                    at_ms=_NOW, round=command.round, model=self._model(command.round + 1)
                )
                self._driver.submit(JOB, event)
            case EvaluateModel():
                self._driver.submit(JOB, _score(command))
            case _:
                pass

    def _update(self, command: AssignShard) -> UpdateReceived:
        lease, task = command.assignment.lease, command.assignment.task
        samples = sum(range_.count for range_ in task.ranges)
        update = AcceptedUpdate(self._stage.update, Samples(samples), task.inner_steps)
        return UpdateReceived(
            at_ms=_NOW,
            node=command.node,
            round=lease.round,
            lease=lease.number,
            update=update,
        )

    def _model(self, number: int) -> Model:
        for model in self._stage.models:
            if model.round == number:
                return model
        size_bytes = self._stage.models[0].blob.size_bytes
        return Model(number, BlobRef(digest_of(b"%d" % number), Bytes(size_bytes)))


def _score(command: EvaluateModel) -> EvaluationReady:
    return EvaluationReady(
        at_ms=_NOW,
        round=command.round,
        model=command.model.blob.digest,
        loss=0.0,
        metric=0.0,
        metric_name="score",
    )
