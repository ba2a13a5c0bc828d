"""A long history, opened on the page: from the click to the frame in which its curve is drawn."""

import asyncio
import sqlite3
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.page.browser import chromium, open_page, show
from benchmarks.ours.page.scripted import node_id
from benchmarks.ours.page.server import served_page
from benchmarks.ours.table import PartFigures
from dashboard_api.core.series import SeriesPoint
from dashboard_api.shell.history import FILE_NAME, HistoryStore
from dashboard_api.shell.recorder import NODE_POINT_MS

TRIES = 5
CHUNK = 20_000
USUAL_US, MOST_US, LEAST_US = 40_000.0, 400_000.0, 1_000.0
OPEN = """
async (route) => {
  const start = performance.now();
  location.hash = route;
  while (performance.now() - start < 20000) {
    await new Promise(requestAnimationFrame);
    if (document.querySelector("section[aria-label=Line] .uplot canvas"))
      return performance.now() - start;
  }
  return null;
}
"""
# Least and greatest height of coloured pixels as shares of the canvas; grid and text are grey.
DRAWN = """
() => {
  const canvas = document.querySelector("section[aria-label=Line] .uplot canvas");
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  let top = height, bottom = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue] = data.subarray(at, at + 3);
    if (data[at + 3] < 24 || Math.max(red, green, blue) - Math.min(red, green, blue) < 40) continue;
    const row = Math.floor(at / 4 / width);
    top = Math.min(top, row);
    bottom = Math.max(bottom, row);
  }
  return [top / height, bottom / height];
}
"""
TOLD = """
async (node) => {
  const answer = await fetch(`/api/v1/nodes/${node}/history?names=rtt_us&points=300`);
  const { x, series } = await answer.json();
  return [x.length, Math.min(...series.rtt_us.min), Math.max(...series.rtt_us.max)];
}
"""


class HistoryTimes(NamedTuple):
    """Milliseconds, medians."""

    open_ms: float
    all_points_ms: float
    """Time to read and encode every point, with no browser."""


async def measure_history(points: int) -> HistoryTimes:
    """Open the history of a node with so many readings, of which two are extreme."""
    node = node_id(0)
    async with served_page(1, 30.0) as page_server, chromium() as context:
        await asyncio.to_thread(_fill, page_server.services.history, node, points)
        page = await open_page(context, page_server.link())
        open_times_ms = []
        for _ in range(TRIES):
            await show(page, "#/nodes", "main table")
            await page.wait_for_selector("section[aria-label=Line]", state="detached")
            open_times_ms.append(await page.evaluate(OPEN, f"#/nodes/{node}"))
        if None in open_times_ms:
            raise BenchmarkError("the page did not draw the history within 20 s")
        _check(await page.evaluate(TOLD, node), await page.evaluate(DRAWN))
        folder = page_server.services.settings.data_dir
        all_ms = await asyncio.to_thread(_all_points_ms, str(folder / FILE_NAME), node)
    return HistoryTimes(statistics.median(open_times_ms), all_ms)


def _fill(history: HistoryStore, node: str, points: int) -> None:
    first = int(time.time() * 1000) // NODE_POINT_MS - points
    for at in range(0, points, CHUNK):
        readings = list(_readings(first, at, min(points, at + CHUNK), points))
        history.add_readings({f"node/{node}": readings})


def _readings(first: int, start: int, end: int, points: int) -> Iterator[SeriesPoint]:
    extremes = {points // 3: MOST_US, points // 2: LEAST_US}
    for at in range(start, end):
        value = extremes.get(at, USUAL_US + at % 97)
        yield SeriesPoint("rtt_us", first + at, (first + at) * NODE_POINT_MS, value)


def _check(told: Any, drawn: Any) -> None:
    buckets, least, greatest = told
    top, bottom = drawn
    is_drawn = top < 0.15 and bottom > 0.7
    if (least, greatest) != (LEAST_US, MOST_US) or not is_drawn:
        detail = (
            f"{buckets} buckets from {least} to {greatest}, drawn from {top:.2f} to {bottom:.2f}"
        )
        raise BenchmarkError(f"an extreme is missing: {detail}")


def _all_points_ms(database: str, node: str) -> float:
    started_s = time.monotonic()
    query = "SELECT at_ms, least FROM dashboard_points WHERE scope = ? AND name = ? AND level = 0"
    connection = sqlite3.connect(database)
    rows = connection.execute(query, (f"node/{node}", "rtt_us")).fetchall()
    msgspec.json.encode(rows)
    connection.close()
    return (time.monotonic() - started_s) * 1000


def history_figures(*, points: int) -> PartFigures:
    """Time to open a long history."""
    times = asyncio.run(measure_history(points))
    ratio = times.open_ms / times.all_points_ms
    return PartFigures(
        rows=[
            [
                f"opening {points:,} points, ms",
                f"{times.open_ms:.0f}",
                f"{ratio:.2f} of reading all",
            ],
            ["reading and encoding all of them, ms", f"{times.all_points_ms:.0f}", ""],
        ],
        metrics={"open_1m_points_ms": times.open_ms, "open_1m_over_all_points": ratio},
        notes=["Both planted extremes were in the answer and in the drawn curve."],
    )
