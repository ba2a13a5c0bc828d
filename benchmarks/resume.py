"""Seconds from SIGKILL to serving again: a 100 MB model, 1,000 journalled rounds of 8 nodes.

The past is made in seconds: real events, journal, snapshots and blobs by the product's machine and
driver. Where a node would train and the coordinator fold, each round answers with a digest at once;
the two newest models are folded for real.
"""

import asyncio
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec
import numpy as np
from grpc_health.v1 import health_pb2

from benchmarks.ours.cluster import LOOPBACK, BenchmarkError, running
from benchmarks.ours.table import ResultTable
from benchmarks.peers.measured import free_port
from coordinator.core.training.job.commands import Aggregate, AssignShard, Command, EvaluateModel
from coordinator.core.training.job.events import (
    AggregateReady,
    EvaluationReady,
    JobCreated,
    ModelInitialised,
    UpdateReceived,
)
from coordinator.core.training.job.state import AcceptedUpdate, Model
from coordinator.core.work.work_events import NodeJoined
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import (
    FoldRequest,
    FoldResult,
    StoredBlob,
    StoredUpdate,
)
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import NodeRecord
from coordinator.shell.store.layouts import save_layout
from hypergpu.assignment import Delta
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import Evaluation, JobSpec, Outer, TrainingSettings
from hypergpu.protocol import PROTOCOL, PROTOCOL_ENTRY
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.cluster.cluster import ReadyLine, operator
from hypergpu.v1 import node_pb2, node_pb2_grpc
from hypergpu.workloads.layouts import numpy_layout
from hypergpu.workloads.registry import build, find

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
    stored_update = StoredUpdate(blobs.path(update.digest), update.digest, samples, spec.codec.up)
    request = FoldRequest(
        layout=layout,
        down=spec.codec.down,
        outer=Outer(),
        base_model=StoredBlob(blobs.path(base.digest), base.digest),
        outer_state=None,
        updates=(stored_update,) * spec.training.nodes,
        output_dir=blobs.work_path("fold").parent,
    )
    before = _adopt_model(blobs, fold(request), base, rounds - 1, spec)
    if before.outer_state is None:
        raise AssertionError("the default outer optimizer leaves an outer state")
    state = before.outer_state.digest
    again = msgspec.structs.replace(
        request,
        base_model=StoredBlob(blobs.path(before.blob.digest), before.blob.digest),
        outer_state=StoredBlob(blobs.path(state), state),
    )
    newest = _adopt_model(blobs, fold(again), before.blob, rounds, spec)
    keys = (IdentityKey.generate() for _ in range(spec.training.nodes))
    return PreparedJob(tuple(key.node_id for key in keys), spec, layout, update, (before, newest))


def _adopt_model(
    blobs: BlobStore, result: FoldResult, base: BlobRef, number: int, spec: JobSpec
) -> Model:
    blobs_by_file = {file: BlobRef(file.digest, file.size_bytes) for file in result.files}
    for file, blob in blobs_by_file.items():
        blobs.adopt(file.path, blob)
    if result.outer_state is None or result.delta is None:
        raise AssertionError("compression both ways leaves an outer state and a delta")
    delta = Delta(base.digest, blobs_by_file[result.delta], spec.codec.down)
    return Model(number, blobs_by_file[result.model], blobs_by_file[result.outer_state], (delta,))


class _Past:
    """Answers every command with the event that a healthy world would answer with."""

    def __init__(self, journal: Journal, stage: PreparedJob, rounds: int) -> None:
        self._stage = stage
        self._rounds = rounds
        self._driver = Driver(journal, KINDS)

    async def happen(self) -> None:
        """Begin the job; it ends with its last round open and every node at work in it."""
        driver_task = asyncio.create_task(self._driver.run(self._perform, lambda _decision: None))
        stage = self._stage
        await self._driver.submit(JOB, JobCreated(at_ms=_NOW, job_id=JOB, spec=stage.spec))
        first = Model(0, BlobRef(digest_of(b"first"), stage.models[0].blob.size_bytes))
        sizes = (_PARTITION_SAMPLES,)
        await self._driver.submit(
            JOB, ModelInitialised(at_ms=_NOW, model=first, partition_sizes=sizes)
        )
        for node in stage.nodes:
            self._driver.submit(JOB, NodeJoined(at_ms=_NOW, node=node))
        await driver_task

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


_DEADLINE_S = 60.0
_OPTIONS = (
    # Dial again at once: what is waited for is the other side.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 20),
)


def assigned_round(address: str, node: NodeId, workload: tuple[str, int]) -> int:
    """Dial until the plaintext listener answers, say hello and wait for an assignment.

    Raises:
        grpc.RpcError: The coordinator refuses, or gives no work within a minute.
    """
    name, version = workload
    capabilities = node_pb2.Capabilities(
        workloads=[node_pb2.WorkloadVersion(name=name, version=version)]
    )
    protocol_version = node_pb2.Version(protocol=PROTOCOL, software="benchmark")
    hello = node_pb2.Hello(version=protocol_version, capabilities=capabilities)
    requests: queue.SimpleQueue[node_pb2.ControlRequest | None] = queue.SimpleQueue()
    requests.put(node_pb2.ControlRequest(hello=hello))
    metadata = (PROTOCOL_ENTRY, ("hypergpu-node", node))
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        call = stub.Control(
            _requests(requests), metadata=metadata, timeout=_DEADLINE_S, wait_for_ready=True
        )
        try:
            for message in call:
                if message.HasField("assignment"):
                    return int(message.assignment.lease.round)
        finally:
            requests.put(None)
    raise RuntimeError("the coordinator closed the stream without an assignment")


def _requests(
    said: "queue.SimpleQueue[node_pb2.ControlRequest | None]",
) -> Iterator[node_pb2.ControlRequest]:
    while (message := said.get()) is not None:
        yield message


PARAMETERS = 25_000_000
SNAPSHOT_EVERY = 50
"""The fewest snapshots that a job can have, and the kill comes just before the next one."""


class LongHistory(NamedTuple):
    """A coordinator's folder with a long past."""

    folder: Path
    stage: PreparedJob
    rounds: int


class Resumed(NamedTuple):
    """Seconds from the kill until each was there."""

    health: float
    job: float
    assignment: float


def run(is_quick: bool) -> ResultTable:
    """Make the past once, then kill and start again, several times."""
    rounds = 149 if is_quick else 1049
    with tempfile.TemporaryDirectory() as name:
        history = _prepare(Path(name), PARAMETERS, rounds)
        restarts = killed_and_started(history, 3 if is_quick else 7)
        journal_mb = (history.folder / "coordinator" / "journal.sqlite").stat().st_size / 1e6
    medians = Resumed(*(statistics.median(each) for each in zip(*restarts, strict=True)))
    least = Resumed(*(min(each) for each in zip(*restarts, strict=True)))
    rows = {
        "health says SERVING": (medians.health, least.health),
        "GetJob answers": (medians.job, least.job),
        "a node has its assignment": (medians.assignment, least.assignment),
    }
    return ResultTable(
        title=f"Seconds from SIGKILL, {rounds:,} rounds of {len(history.stage.nodes)} nodes",
        columns=("", "median", "least"),
        rows=[[label, *(f"{seconds:.2f}" for seconds in each)] for label, each in rows.items()],
        metrics={"seconds_to_serving": max(medians)},
        notes=(
            f"A model of {4 * PARAMETERS / 1e6:.0f} MB, its outer state is twice that.",
            f"The journal has {journal_mb:.0f} MB.",
            f"Snapshots every {SNAPSHOT_EVERY} rounds, the kill 49 rounds after the last.",
            "The process's own start is in it; files are in the system's cache.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def _prepare(folder: Path, parameters: int, rounds: int) -> LongHistory:
    spec = spec_of(parameters, nodes=8, every=SNAPSHOT_EVERY)
    return LongHistory(folder, make_history(folder / "coordinator", spec, rounds), rounds)


def killed_and_started(kept: LongHistory, times: int) -> list[Resumed]:
    """Start it, then kill it and start it again, so often."""
    restarts: list[Resumed] = []
    killed_at_s, node_port = 0.0, free_port()
    for turn in range(times + 1):
        with running(kept.folder, is_plaintext=True, node_port=node_port) as cluster:
            if turn:
                restarts.append(_until_serving(kept, cluster.ready, node_port, killed_at_s))
            killed_at_s = time.monotonic()
    return restarts


def _until_serving(
    kept: LongHistory, ready: ReadyLine, node_port: int, killed_at_s: float
) -> Resumed:
    with grpc.insecure_channel(ready.address) as channel:
        request = health_pb2.HealthCheckRequest()
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(request, wait_for_ready=True, timeout=60)
    health_s = time.monotonic() - killed_at_s
    with operator(ready) as client:
        summary = client.job(JOB).job
    job_s = time.monotonic() - killed_at_s
    workload = kept.stage.spec.workload
    version = find(workload).version
    address = f"{LOOPBACK}:{node_port}"
    number = assigned_round(address, kept.stage.nodes[0], (workload, version))
    if answer.status != health_pb2.HealthCheckResponse.SERVING or number != kept.rounds:
        raise BenchmarkError(f"resumed at round {number}, {summary.phase}: {summary.reason}")
    return Resumed(health_s, job_s, time.monotonic() - killed_at_s)
