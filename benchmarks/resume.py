"""Seconds from SIGKILL to serving again: a 100 MB model, 1,000 journalled rounds of 8 nodes."""

import os
import sqlite3
import statistics
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2

from benchmarks.ours.cluster import LOOPBACK, ONE_THREAD, BenchmarkError
from benchmarks.ours.history import JOB, PreparedJob, make_history, spec_of
from benchmarks.ours.wire import assigned_round
from benchmarks.peers.measured import free_port
from benchmarks.table import ResultTable
from hypergpu.cluster.coordinator import (
    Listen,
    ReadyLine,
    coordinator_command,
    operator,
    wait_until_ready,
)
from hypergpu.cluster.processes import kill_group, start
from hypergpu.digest import digest_of_file
from hypergpu.workloads.registry import find

PARAMETERS = 25_000_000
SNAPSHOT_EVERY = 50
"""The fewest snapshots that a job can have, and the kill comes just before the next one."""


class LongHistory(NamedTuple):
    """A data folder with a long past, and where its coordinator listens."""

    folder: Path
    at: Listen
    stage: PreparedJob
    rounds: int

    @property
    def node_address(self) -> str:
        """Address of the listener for nodes."""
        return f"{LOOPBACK}:{self.at.node_port}"


class Resumed(NamedTuple):
    """Seconds from the kill until each was there."""

    health: float
    job: float
    assignment: float


def run(is_quick: bool) -> ResultTable:
    """Make the past once, then kill and start again, several times."""
    rounds = 149 if is_quick else 1049
    with tempfile.TemporaryDirectory() as name:
        kept = _prepare(Path(name), PARAMETERS, rounds)
        limits = [physical_limit_s(kept) for _ in range(3)]
        resumed = killed_and_started(kept, 3 if is_quick else 7)
        journal_mb = (kept.at.data_dir / "journal.sqlite").stat().st_size / 1e6
    medians = Resumed(*(statistics.median(each) for each in zip(*resumed, strict=True)))
    seconds, limit_s = max(medians), statistics.median(limits)
    least = Resumed(*(min(each) for each in zip(*resumed, strict=True)))
    rows = {
        "health says SERVING": (medians.health, least.health),
        "GetJob answers": (medians.job, least.job),
        "a node has its assignment": (medians.assignment, least.assignment),
        "reading and digesting what is checked, nothing else": (limit_s, min(limits)),
    }
    return ResultTable(
        title=f"Seconds from SIGKILL, {rounds:,} rounds of {len(kept.stage.nodes)} nodes",
        columns=("", "median", "least"),
        rows=[[label, *(f"{seconds:.2f}" for seconds in each)] for label, each in rows.items()],
        metrics={
            "seconds_to_serving": seconds,
            "seconds_to_health": medians.health,
            "serving_over_physical_limit": seconds / limit_s,
        },
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
    at = Listen(
        data_dir=folder / "coordinator",
        listen=LOOPBACK,
        port=free_port(),
        node_port=free_port(),
        is_plaintext=True,
    )
    return LongHistory(folder, at, make_history(at.data_dir, spec, rounds), rounds)


def killed_and_started(kept: LongHistory, times: int) -> list[Resumed]:
    """Start it, then kill it and start it again, so often."""
    child = _start_coordinator(kept)
    found = []
    try:
        wait_until_ready(child)
        for _ in range(times):
            killed_at_s = time.monotonic()
            _end(child)
            child = _start_coordinator(kept)
            found.append(_until_serving(kept, wait_until_ready(child), killed_at_s))
    finally:
        _end(child)
    return found


def _start_coordinator(kept: LongHistory) -> "subprocess.Popen[str]":
    log = kept.folder / "coordinator.log"
    return start(coordinator_command(kept.at), log=log, is_read=True, environment=ONE_THREAD)


def _end(child: "subprocess.Popen[str]") -> None:
    kill_group(child)
    if child.stdout is not None:
        child.stdout.close()


def _until_serving(kept: LongHistory, ready: ReadyLine, killed_at_s: float) -> Resumed:
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
    number = assigned_round(kept.node_address, kept.stage.nodes[0], (workload, version))
    if answer.status != health_pb2.HealthCheckResponse.SERVING or number != kept.rounds:
        raise BenchmarkError(f"resumed at round {number}, {summary.phase}: {summary.reason}")
    return Resumed(health_s, job_s, time.monotonic() - killed_at_s)


def physical_limit_s(kept: LongHistory) -> float:
    """Read and digest the newest model's files, and read every journalled row."""
    model = kept.stage.models[1]
    newest = model.newest_delta
    blobs = (model.blob, model.outer_state, newest.blob if newest else None)
    started_s = time.monotonic()
    for blob in blobs:
        if blob is not None:
            digest_of_file(kept.at.data_dir / "blobs" / blob.digest[:2] / blob.digest)
    with closing(sqlite3.connect(kept.at.data_dir / "journal.sqlite")) as journal:
        journal.execute("SELECT * FROM entries").fetchall()
    return time.monotonic() - started_s
