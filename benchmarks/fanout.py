"""A thousand sessions of the real daemon on one coordinator: what a heartbeat takes, who computes.

Beside it bare streams of the same library that echo as many messages of the same size.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import psutil

from benchmarks.ours.cluster import LOOPBACK, ONE_THREAD, BenchmarkError, Running, running
from benchmarks.ours.sessions import SessionSpread
from benchmarks.ours.table import ResultTable
from hypergpu.cluster.processes import kill_group

PROCESSES = 4
Said = TypeVar("Said")


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
    with _run_child(folder, "echo", "--echo") as server:
        address = f"{LOOPBACK}:{_read_message(server, int)}"
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
        clients = [owner.enter_context(_run_child(folder, name)) for name in names]
        for name, client in zip(names, clients, strict=True):
            spread = SessionSpread(
                load.sessions // PROCESSES, load.start_over_s, str(folder / name), address, token
            )
            _tell(client, msgspec.json.encode(spread).decode())
        heard = [_read_message(client, bool) for client in clients]
        if not all(heard):
            raise BenchmarkError(f"a session ended; see {folder}")
        measured = [psutil.Process(each.pid) for each in (server, *clients)]
        before_s = [_cpu_s(each) for each in measured]
        started_s = time.monotonic()
        for client in clients:
            _tell(client, str(load.measured_s))
        trips_us = [trip for client in clients for trip in _read_message(client, list[int])]
        passed_s = time.monotonic() - started_s
        shares = [
            (_cpu_s(each) - before) / passed_s
            for each, before in zip(measured, before_s, strict=True)
        ]
        server_mb = measured[0].memory_info().rss / 1e6
    trips_ms = [trip / 1000 for trip in trips_us]
    return FanoutFigures(trips_ms, shares[0], sum(shares[1:]), server_mb)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _run_child(folder: Path, name: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "benchmarks.ours.sessions", *arguments]
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=os.environ | ONE_THREAD,
        )
    try:
        yield child
    finally:
        kill_group(child)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def _tell(child: "subprocess.Popen[str]", line: str) -> None:
    if child.stdin is None:
        raise AssertionError("the child was spawned with a pipe")
    child.stdin.write(line + "\n")
    child.stdin.flush()


def _read_message(child: "subprocess.Popen[str]", said: type[Said]) -> Said:
    line = child.stdout.readline() if child.stdout is not None else ""
    if not line:
        raise BenchmarkError("a process ended before it had said what it measured")
    return msgspec.json.decode(line, type=said)
