"""The page's server under load: how long its loop stands still, and what a client costs.

The server runs in this process on a state that is told as a coordinator would tell it; clients run
in another one. Levels and events come at the pace of a real coordinator.
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import uvicorn

from benchmarks.ours.feed_clients import ClientsReport
from benchmarks.ours.table import BenchmarkParts, PartFigures
from dashboard_api.config import DashboardSettings
from dashboard_api.shell.follower import Follower
from dashboard_api.shell.server import build_app, listening_socket, open_services, uvicorn_config
from hypergpu.client import ConnectionTarget, JobEvent
from hypergpu.client.values import EstimateView, JobView, NodeView, ReadingView
from hypergpu.ids import Digest, TokenId
from hypergpu.streams import unix_ms
from hypergpu.wire.credentials import Role, Token, token_text

JOB = "job-0123456789ab"
ROUND_S = 30.0
NODES_EVERY_S = 2.0
LAG_STEP_S = 0.002
TOKEN = Token(("127.0.0.1:1",), Digest(""), Role.OPERATOR, TokenId("0123456789ab"), "s" * 22)


class FeedLoad(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    nodes: int
    readers: int
    silent: int
    measured_s: float


class LoadOutcome(msgspec.Struct):
    """Figures of a run."""

    lags_ms: list[float]
    growth_bytes: int
    """Memory of the server's process with its clients, less that without them."""
    report: ClientsReport

    def lag_ms(self, hundredths: int) -> float:
        """Percentile of the loop's lag."""
        return statistics.quantiles(self.lags_ms, n=100)[hundredths - 1]


class ToldCluster:
    """Nodes and one job, told to a follower in place of a coordinator."""

    def __init__(self, follower: Follower, nodes: int) -> None:
        self._follower = follower
        self._rng = Random(1)
        self._ids = [f"0x{number:040x}" for number in range(nodes)]
        self._sequence = 0

    async def run(self) -> None:
        """Tell until cancelled."""
        await asyncio.gather(self._tell_nodes(), self._tell_rounds())

    async def _tell_nodes(self) -> None:
        while True:
            await self._follower.take_nodes([self._node(each) for each in self._ids])
            await asyncio.sleep(NODES_EVERY_S)

    async def _tell_rounds(self) -> None:
        self._tell("JobCreated", spec={"workload": "digits-softmax"})
        for number in range(1_000_000):
            plan = {"inner_steps": 20, "codec": "int4", "reason": "normal: H=20, int4"}
            nodes = dict.fromkeys(self._ids, plan)
            self._tell("RoundPlanned", plan={"round": number, "nodes": nodes, "resting": {}})
            for node in self._ids:
                await asyncio.sleep(ROUND_S / len(self._ids))
                update = {"blob": {"size_bytes": 1300}, "inner_steps": 20, "compute_ms": 900}
                self._tell("UpdateReceived", node=node, round=number, update=update)
            self._tell("AggregateReady", round=number, model={"blob": {"digest": "x"}})
            self._tell("RoundRecorded", round=number, duration_ms=int(ROUND_S * 1000), loss=1.0)

    def _tell(self, kind: str, **body: Any) -> None:
        event = JobEvent(self._sequence, unix_ms(), kind, body)
        self._sequence += 1
        self._follower.projection.take_event(JOB, event, unix_ms())
        self._follower.feed.publish()

    def _node(self, node_id: str) -> NodeView:
        wander = EstimateView(40_000 * (1 + self._rng.random() / 50), 900.0, 9, 10)
        steady = EstimateView(6e6, 1e5, 9, 10)
        reading = ReadingView(wander, 39_000, None, steady, steady, steady, "bbr")
        return NodeView(
            id=node_id,
            state="working",
            reason="",
            device="cuda",
            device_name="GPU",
            memory_bytes=8 << 30,
            worker="torch",
            workloads={},
            job=JOB,
            last_seen_ms_ago=self._rng.randrange(5_000),
            software="hypergpu",
            updates_accepted=self._sequence // 100,
            updates_refused=0,
            reading=reading,
            health="normal",
            health_reason="normal: H=20",
        )


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Follower, str]]:
    """A server in this process, with its follower and the feed's address."""
    with tempfile.TemporaryDirectory() as folder:
        settings = DashboardSettings(data_dir=Path(folder), port=0)
        bound = listening_socket(settings)
        port = bound.getsockname()[1]
        target = ConnectionTarget("127.0.0.1:1", TOKEN, 1.0)
        services = open_services(settings, target, port)
        server = uvicorn.Server(uvicorn_config(build_app(services)))
        task = asyncio.create_task(server.serve([bound]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        try:
            yield services.views.own, f"ws://127.0.0.1:{port}/feed"
        finally:
            server.should_exit = True
            await task


async def measure(load: FeedLoad) -> LoadOutcome:
    """One run."""
    async with serving() as (follower, address):
        await follower.take_jobs_told([_job()])
        telling = asyncio.create_task(ToldCluster(follower, load.nodes).run())
        await asyncio.sleep(1.0)
        before = psutil.Process().memory_info().rss
        words = [address, token_text(TOKEN), str(load.readers), str(load.silent)]
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.ours.feed_clients", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert clients.stdout is not None  # noqa: S101 - it was asked for
        await clients.stdout.readline()
        lags_ms = await loop_lags_ms(load.measured_s)
        growth = psutil.Process().memory_info().rss - before
        said, _ = await clients.communicate(b"\n")
        telling.cancel()
        report = msgspec.json.decode(said, type=ClientsReport)
        return LoadOutcome(lags_ms, growth, report)


async def loop_lags_ms(measured_s: float) -> list[float]:
    """How much later than asked for the loop came back, again and again."""
    loop = asyncio.get_running_loop()
    end_s, lags_ms = loop.time() + measured_s, []
    while (now_s := loop.time()) < end_s:
        await asyncio.sleep(LAG_STEP_S)
        lags_ms.append(max(0.0, (loop.time() - now_s - LAG_STEP_S) * 1000))
    return lags_ms


def _job() -> JobView:
    return JobView(
        id=JOB,
        name="load",
        phase="training",
        reason="round 1 is open",
        round=0,
        rounds=1000,
        nodes=0,
        loss=None,
        metric=None,
        metric_name="",
        bytes_up=0,
        bytes_down=0,
        updates_accepted=0,
        updates_refused=0,
        samples=0,
        model=None,
        at_ms=0,
    )


def lag_figures(*, measured_s: float) -> PartFigures:
    """The loop with a thousand nodes and two hundred clients, of which twenty never read."""
    outcome = asyncio.run(measure(FeedLoad(1_000, 180, 20, measured_s)))
    rows = [
        ["loop lag p50, ms", f"{outcome.lag_ms(50):.1f}"],
        ["loop lag p99, ms", f"{outcome.lag_ms(99):.1f}"],
        ["loop lag worst, ms", f"{max(outcome.lags_ms):.1f}"],
    ]
    return PartFigures(rows=rows, metrics={"loop_lag_p99_ms": outcome.lag_ms(99)})


def client_figures(*, measured_s: float) -> PartFigures:
    """Memory of a client that never reads, which costs the most."""
    outcome = asyncio.run(measure(FeedLoad(1_000, 0, 50, min(8.0, measured_s))))
    each_mb = outcome.growth_bytes / 50 / 1e6
    return PartFigures(
        rows=[["memory of a client that never reads, MB", f"{each_mb:.2f}"]],
        metrics={"client_mb_max": each_mb},
    )


def feed_figures(*, measured_s: float) -> PartFigures:
    """Traffic of a client with fifty nodes."""
    outcome = asyncio.run(measure(FeedLoad(50, 4, 0, measured_s)))
    sent = outcome.report.received_bytes / outcome.report.readers
    each_mb = sent / measured_s * 60 / 1e6
    return PartFigures(
        rows=[["feed of a client at 50 nodes, MB/min", f"{each_mb:.2f}"]],
        metrics={"feed_mb_per_minute": each_mb},
    )


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts."""
    measured_s = 10.0 if is_quick else 60.0
    measures: dict[str, Callable[[], PartFigures]] = {
        "loop_lag": lambda: lag_figures(measured_s=measured_s),
        "client_mb": lambda: client_figures(measured_s=measured_s),
        "feed_mb": lambda: feed_figures(measured_s=measured_s),
    }
    return BenchmarkParts(
        title="The page's server",
        columns=("", "figure"),
        parts=measures,
        notes=lambda: [f"A round of {ROUND_S:.0f} s; readings every {NODES_EVERY_S:.0f} s."],
    )
