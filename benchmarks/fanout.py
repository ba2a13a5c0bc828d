"""A thousand sessions of the real daemon on one coordinator: what a heartbeat takes, who computes.

Beside it bare streams of the same library that echo as many messages of the same size.
"""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.ours.cluster import LOOPBACK, BenchmarkError, Running, running
from benchmarks.ours.session_processes import cpu_seconds, read_answer, session_process, tell
from benchmarks.ours.sessions import SessionSpread
from benchmarks.ours.table import ResultTable

PROCESSES = 4
_SESSIONS = "benchmarks.ours.sessions"


class Load(NamedTuple):
    """How many sessions, and how long they are watched."""

    sessions: int
    start_over_s: float
    measured_s: float


class FanoutFigures(NamedTuple):
    """Round trips in milliseconds, and shares of one core while they were measured."""

    trips_ms: Sequence[float]
    server_cpu: float
    clients_cpu: float
    server_mb: float

    def percentile_ms(self, hundredths: int) -> float:
        """Percentile of the round trips."""
        return statistics.quantiles(self.trips_ms, n=100)[hundredths - 1]


def run(is_quick: bool) -> ResultTable:
    """Measure the coordinator, then the bare server."""
    load = Load(200, 4.0, 10.0) if is_quick else Load(1000, 20.0, 40.0)
    with tempfile.TemporaryDirectory() as name:
        ours = coordinator_outcome(Path(name), load)
        bare = bare_outcome(Path(name), load)
    columns = ("", "p50 ms", "p99 ms", "worst ms", "server CPU", "clients CPU", "server MB")
    return ResultTable(
        title=f"Heartbeats of {load.sessions:,} sessions in {PROCESSES} processes, every 5 s",
        columns=columns,
        rows=[_row("HyperGPU, the real daemon", ours), _row("bare grpc.aio streams", bare)],
        metrics={
            "heartbeat_p99_ms": ours.percentile_ms(99),
            "coordinator_cpu_share": ours.server_cpu,
            "heartbeat_p99_over_bare": ours.percentile_ms(99) / bare.percentile_ms(99),
        },
        notes=(
            "A TCP connection each, no TLS, all on this machine. CPU: share of one core.",
            f"{len(ours.trips_ms):,} heartbeats in {load.measured_s:.0f} s.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def _row(name: str, outcome: FanoutFigures) -> list[str]:
    return [
        name,
        f"{outcome.percentile_ms(50):.1f}",
        f"{outcome.percentile_ms(99):.1f}",
        f"{max(outcome.trips_ms):.1f}",
        f"{outcome.server_cpu:.0%}",
        f"{outcome.clients_cpu:.0%}",
        f"{outcome.server_mb:.0f}",
    ]


def _beside_nothing(_cluster: Running) -> AbstractContextManager[None]:
    return nullcontext()


def coordinator_outcome(
    folder: Path,
    load: Load,
    beside: Callable[[Running], AbstractContextManager[None]] = _beside_nothing,
) -> FanoutFigures:
    """Let daemons join a real coordinator and watch their heartbeats, while something else runs."""
    with running(folder, is_plaintext=True) as cluster, beside(cluster):
        return _outcome(folder, load, cluster.coordinator, token=cluster.node_token())


def bare_outcome(folder: Path, load: Load) -> FanoutFigures:
    """The same traffic with nothing behind it."""
    with session_process(folder, "echo", _SESSIONS, "--echo") as server:
        address = f"{LOOPBACK}:{read_answer(server, int)}"
        return _outcome(folder, load, server, address=address)


def _outcome(
    folder: Path,
    load: Load,
    server: "subprocess.Popen[str]",
    *,
    address: str = "",
    token: str = "",
) -> FanoutFigures:
    with ExitStack() as owner:
        names = [f"{'daemons' if token else 'bare'}-{number}" for number in range(PROCESSES)]
        clients = [owner.enter_context(session_process(folder, name, _SESSIONS)) for name in names]
        for name, client in zip(names, clients, strict=True):
            spread = SessionSpread(
                load.sessions // PROCESSES, load.start_over_s, str(folder / name), address, token
            )
            tell(client, msgspec.json.encode(spread).decode())
        answers = [read_answer(client, bool) for client in clients]
        if not all(answers):
            raise BenchmarkError(f"a session ended; see {folder}")
        processes = [psutil.Process(each.pid) for each in (server, *clients)]
        before_s = [cpu_seconds(each) for each in processes]
        started_s = time.monotonic()
        for client in clients:
            tell(client, str(load.measured_s))
        trips_us = [trip for client in clients for trip in read_answer(client, list[int])]
        passed_s = time.monotonic() - started_s
        shares = [
            (cpu_seconds(each) - before) / passed_s
            for each, before in zip(processes, before_s, strict=True)
        ]
        server_mb = processes[0].memory_info().rss / 1e6
    trips_ms = [trip / 1000 for trip in trips_us]
    return FanoutFigures(trips_ms, shares[0], sum(shares[1:]), server_mb)
