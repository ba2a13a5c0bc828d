"""Sessions of the real daemon through two gateways that share an address; one of them is killed.

Heartbeats are timed by the daemons. Beside them a job trains on a few of the nodes: it is to go on
as if nothing had happened.
"""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.ours.cluster import LOOPBACK, ONE_THREAD, BenchmarkError, Running, running
from benchmarks.ours.scale.gateway_sessions import LinkCount
from benchmarks.ours.session_processes import cpu_seconds, read_answer, session_process, tell
from benchmarks.ours.sessions import SessionSpread
from benchmarks.ours.table import PartFigures
from hypergpu.command_line import program
from hypergpu.jobfile.spec import JobSpec, NodeSelection, TrainingSettings
from hypergpu.user.client import JobEvent, JobUpdate, JobView
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.wire.credentials import with_addresses

PROCESSES = 4
GATEWAYS = 2
_LOOK_S = 0.5
_BACK_WITHIN_S = 300.0
_NOTICED_S = 3.0
"""By then every node has seen its stream end."""
_SESSIONS_MODULE = "benchmarks.ours.scale.gateway_sessions"
_JOB_NODES = 3


class GatewayLoad(NamedTuple):
    """How many sessions there are, and how long they are watched."""

    sessions: int
    start_over_s: float
    measured_s: float


class _Ready(msgspec.Struct, frozen=True):
    address: str
    node_port: int
    bulk_port: int


class _Gateway(NamedTuple):
    child: "subprocess.Popen[str]"
    ready: _Ready


class _Measured(NamedTuple):
    """What one load came to. CPU is in cores, while heartbeats were measured."""

    trips_ms: Sequence[float]
    gateways_cpu: float
    coordinator_cpu: float
    clients_cpu: float
    gateways_mb: float
    lost: int
    """Links that broke when a gateway was killed."""
    back_s: float
    """From the kill to the moment at which all of them were there again."""
    job: JobView

    @property
    def p99_ms(self) -> float:
        """99th percentile of the heartbeats."""
        return statistics.quantiles(self.trips_ms, n=100)[98]


def gateways(load: GatewayLoad, *, is_plaintext: bool = False) -> PartFigures:
    """Measure one load."""
    with tempfile.TemporaryDirectory() as name:
        figures = _measure(Path(name), load, is_plaintext=is_plaintext)
    per_core = load.sessions / figures.gateways_cpu
    security = "no TLS" if is_plaintext else "mutual TLS"
    return PartFigures(
        rows=[
            ["heartbeat p50, p99, worst ms", _trips(figures)],
            ["gateways: CPU cores, MB", f"{figures.gateways_cpu:.2f}, {figures.gateways_mb:.0f}"],
            ["coordinator: CPU cores", f"{figures.coordinator_cpu:.3f}"],
            ["sessions: CPU cores", f"{figures.clients_cpu:.2f}"],
            ["sessions a core of gateways", f"{per_core:,.0f}"],
            [f"{figures.lost:,} nodes lose a gateway: all back s", f"{figures.back_s:.1f}"],
        ],
        metrics={
            "sessions": load.sessions,
            "heartbeat_p99_ms": figures.p99_ms,
            "gateway_cpu_cores": figures.gateways_cpu,
            "reconnect_all_s": figures.back_s,
            "reconnect_lost": figures.lost,
            "coordinator_cpu_cores": figures.coordinator_cpu,
        },
        notes=[
            f"{load.sessions:,} daemons in {PROCESSES} processes, {GATEWAYS} gateways, {security}.",
            "The daemons yield to all else and run no cyclic GC: each stands for a machine.",
            f"{len(figures.trips_ms):,} heartbeats in {load.measured_s:.0f} s.",
            f"The job beside them {figures.job.phase} after {figures.job.round} rounds.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ],
    )


def _trips(found: _Measured) -> str:
    p50 = statistics.median(found.trips_ms)
    return f"{p50:.1f}, {found.p99_ms:.1f}, {max(found.trips_ms):.1f}"


def _measure(folder: Path, load: GatewayLoad, *, is_plaintext: bool) -> _Measured:
    with ExitStack() as owner:
        cluster = owner.enter_context(running(folder, is_plaintext=is_plaintext))
        fronts = _started_gateways(cluster, owner)
        clients = _started_sessions(cluster, fronts[0].ready, load, owner)
        with cluster.client() as client:
            job_id = client.submit(_job(rounds=100_000))
            next(each for each in client.watch(job_id) if _is_round(each))
            readings = _watch(fronts, clients, cluster.coordinator, load)
            lost_nodes, back_s = _kill_one(fronts, clients)
            after = client.job(job_id).job.round
            client.set_parameters(job_id, {"training.rounds": str(after + 5)})
            for _ in client.watch(job_id):
                pass
            job = client.job(job_id).job
        if job.phase != "finished":
            raise BenchmarkError(f"the job is {job.phase}: {job.reason}")
        return _Measured(*readings, lost_nodes, back_s, job)


def _is_round(update: JobUpdate) -> bool:
    return isinstance(update, JobEvent) and update.kind == "RoundRecorded"


def _job(rounds: int) -> JobSpec:
    return JobSpec(
        workload="null",
        training=TrainingSettings(rounds=rounds, inner_steps=2, nodes=_JOB_NODES),
        nodes=NodeSelection(max=_JOB_NODES),
    )


def _started_gateways(cluster: Running, owner: ExitStack) -> list[_Gateway]:
    token = Path(cluster.ready.operator_token_file).read_text("utf-8").strip()
    gateway_list: list[_Gateway] = []
    for number in range(GATEWAYS):
        ports = (0, 0, 0)
        if gateway_list:
            first = gateway_list[0].ready
            ports = (int(first.address.rpartition(":")[2]), first.node_port, first.bulk_port)
        names = ("--port", "--node-port", "--bulk-port")
        flags = [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
        child = start(
            program("coordinator.shell.gateway", f"--listen={LOOPBACK}", *flags),
            secret=token,
            log=cluster.folder / f"gateway-{number}.log",
            is_read=True,
            environment=ONE_THREAD,
        )
        owner.callback(kill_group, child)
        gateway_list.append(_Gateway(child, read_answer(child, _Ready)))
    return gateway_list


def _started_sessions(
    cluster: Running, ready: _Ready, load: GatewayLoad, owner: ExitStack
) -> "list[subprocess.Popen[str]]":
    token = with_addresses(cluster.node_token(), (ready.address,))
    names = [f"daemons-{number}" for number in range(PROCESSES)]
    clients = [
        owner.enter_context(session_process(cluster.folder, name, _SESSIONS_MODULE))
        for name in names
    ]
    for name, client in zip(names, clients, strict=True):
        folder = str(cluster.folder / name)
        spread = SessionSpread(
            load.sessions // PROCESSES, load.start_over_s, folder, address="", token=token
        )
        tell(client, msgspec.json.encode(spread).decode())
    if not all(read_answer(client, bool) for client in clients):
        raise BenchmarkError(f"a session ended; see {cluster.folder}")
    return clients


def _watch(
    fronts: "Sequence[_Gateway]",
    clients: "Sequence[subprocess.Popen[str]]",
    coordinator: "subprocess.Popen[str]",
    load: GatewayLoad,
) -> tuple[list[float], float, float, float, float]:
    processes = [*(front.child for front in fronts), coordinator, *clients]
    programs = [psutil.Process(each.pid) for each in processes]
    before = [cpu_seconds(each) for each in programs]
    started_s = time.monotonic()
    for client in clients:
        tell(client, str(load.measured_s))
    trips_ms = [trip / 1000 for client in clients for trip in read_answer(client, list[int])]
    passed_s = time.monotonic() - started_s
    cores = [
        (cpu_seconds(each) - cpu) / passed_s for each, cpu in zip(programs, before, strict=True)
    ]
    megabytes = sum(each.memory_info().rss for each in programs[:GATEWAYS]) / 1e6
    return trips_ms, sum(cores[:GATEWAYS]), cores[GATEWAYS], sum(cores[GATEWAYS + 1 :]), megabytes


def _kill_one(
    fronts: Sequence[_Gateway], clients: "Sequence[subprocess.Popen[str]]"
) -> tuple[int, float]:
    """Kill a gateway and wait until all of its nodes are there again: their number, the time."""
    before = _links(clients)
    killed_s = time.monotonic()
    kill_group(fronts[0].child)
    while True:
        time.sleep(_LOOK_S)
        now = _links(clients)
        lost_links, missing_links = now.lost - before.lost, before.connected - now.connected
        if lost_links and missing_links <= 0 and time.monotonic() - killed_s > _NOTICED_S:
            return lost_links, now.connected_s - killed_s
        if time.monotonic() - killed_s > _BACK_WITHIN_S:
            raise BenchmarkError(f"{missing_links} of {lost_links} nodes did not come back")


def _links(clients: "Sequence[subprocess.Popen[str]]") -> LinkCount:
    for client in clients:
        tell(client, "links")
    counts = [read_answer(client, LinkCount) for client in clients]
    return LinkCount(
        connected=sum(each.connected for each in counts),
        lost=sum(each.lost for each in counts),
        connected_s=max(each.connected_s for each in counts),
    )
