"""The page's server under load: how long its loop stands still, and what a client costs."""

import asyncio
import statistics
import sys

import msgspec
import psutil

from benchmarks.ours.feed_clients import ClientsReport
from benchmarks.ours.page.server import ServedPage, served_page
from benchmarks.ours.table import PartFigures
from hypergpu.wire.credentials import token_text

ROUND_S = 30.0
LAG_STEP_S = 0.002
IDLE_S = 5.0
MEGABYTE = 1e6
CLIENT_MB = 1.0
"""A client's queue, which is the most that it may cost by itself."""


class FeedLoad(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    nodes: int
    readers: int
    silent: int
    measured_s: float


class LoadOutcome(msgspec.Struct):
    """Figures of a run."""

    idle_ms: list[float]
    """Lags of the loop while it has nothing to do."""
    lags_ms: list[float]
    growth_bytes: int
    """Memory of the server's process with its clients, less that without them."""
    report: ClientsReport


async def measure_load(load: FeedLoad) -> LoadOutcome:
    """Let clients come to a server that follows nodes."""
    idle_ms = await loop_lags_ms(IDLE_S)
    async with served_page(load.nodes, ROUND_S) as page_server:
        await _all_nodes(page_server, load.nodes)
        before = psutil.Process().memory_info().rss
        words = [
            page_server.feed,
            token_text(page_server.token),
            str(load.readers),
            str(load.silent),
        ]
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.ours.feed_clients", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert clients.stdout is not None  # noqa: S101 - it was asked for
        await clients.stdout.readline()
        lags_ms = await loop_lags_ms(load.measured_s)
        growth = psutil.Process().memory_info().rss - before
        output, _ = await clients.communicate(b"\n")
        report = msgspec.json.decode(output, type=ClientsReport)
        return LoadOutcome(idle_ms, lags_ms, growth, report)


async def _all_nodes(served: ServedPage, count: int) -> None:
    state = served.services.views.own.projection.state
    while len(state["nodes"]) < count:  # noqa: ASYNC110 - looked at a few times, once
        await asyncio.sleep(0.1)


async def loop_lags_ms(measured_s: float) -> list[float]:
    """How much later than asked for the loop came back, again and again."""
    loop = asyncio.get_running_loop()
    end_s, lags_ms = loop.time() + measured_s, []
    while (now_s := loop.time()) < end_s:
        await asyncio.sleep(LAG_STEP_S)
        lags_ms.append(max(0.0, (loop.time() - now_s - LAG_STEP_S) * 1000))
    return lags_ms


def percentile(values: list[float], hundredths: int) -> float:
    """A percentile."""
    return statistics.quantiles(values, n=100)[hundredths - 1]


def lag_figures(*, measured_s: float) -> PartFigures:
    """The loop with a thousand nodes and two hundred clients, of which twenty never read."""
    outcome = asyncio.run(measure_load(FeedLoad(1_000, 180, 20, measured_s)))
    p99_ms, idle_ms = percentile(outcome.lags_ms, 99), percentile(outcome.idle_ms, 99)
    rows = [
        ["loop lag p50, ms", f"{percentile(outcome.lags_ms, 50):.1f}", ""],
        ["loop lag p99, ms", f"{p99_ms:.1f}", f"{p99_ms / idle_ms:.1f}x an idle loop"],
        ["the same of an idle loop p99, ms", f"{idle_ms:.1f}", ""],
        ["loop lag worst, ms", f"{max(outcome.lags_ms):.1f}", ""],
    ]
    return PartFigures(
        rows=rows, metrics={"loop_lag_p99_ms": p99_ms, "loop_lag_over_idle": p99_ms / idle_ms}
    )


def client_figures(*, measured_s: float) -> PartFigures:
    """Memory of a client that never reads, which costs the most."""
    outcome = asyncio.run(measure_load(FeedLoad(1_000, 0, 50, min(8.0, measured_s))))
    each_mb = outcome.growth_bytes / 50 / MEGABYTE
    share = f"{each_mb / CLIENT_MB:.0%} of a whole queue"
    return PartFigures(
        rows=[["memory of a client that never reads, MB", f"{each_mb:.2f}", share]],
        metrics={"client_mb_max": each_mb},
    )


def feed_figures(*, measured_s: float) -> PartFigures:
    """Traffic of a client with fifty nodes."""
    outcome = asyncio.run(measure_load(FeedLoad(50, 4, 0, measured_s)))
    sent_bytes = outcome.report.received_bytes / outcome.report.readers
    each_mb = sent_bytes / measured_s * 60 / MEGABYTE
    share = f"{each_mb:.0%} of 1 MB/min"
    return PartFigures(
        rows=[["feed of a client at 50 nodes, MB/min", f"{each_mb:.2f}", share]],
        metrics={"feed_mb_per_minute": each_mb},
    )
