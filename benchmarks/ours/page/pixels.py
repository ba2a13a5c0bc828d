"""From an event of a coordinator to the frame of the browser that shows it."""

import asyncio
import contextlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import websockets

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.page.browser import FRAME_MS, chromium, metrics_of, open_page
from benchmarks.ours.page.scripted import JOB, update_sequence
from benchmarks.ours.page.server import served_page
from benchmarks.ours.table import PartFigures
from hypergpu.clock import unix_ms

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

NODES = 50
ECHO_GAP_S = 0.05
ROUND_S = 3.0
SETTLE_S = 1.0
SHOWN_LEAST = 50
# Notes the frame in which each update's line in the plan of the newest round says that it is in.
WATCH_UPDATES = """
const waiting = new Map();
window.shown = [];
const Plain = WebSocket;
window.WebSocket = class extends Plain {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", ({ data }) => {
      for (const [kind, path, lane] of JSON.parse(data).changes ?? [])
        if (kind === "set" && path.at(-2) === "lanes" && lane.result === "accepted")
          waiting.set(path.at(-1), Number(path.at(-3)));
    });
  }
};
new MutationObserver((changes) => {
  const drawn = [];
  for (const { target } of changes) {
    const changed = target instanceof Element ? target : target.parentElement;
    const row = changed?.closest("td.result")?.closest("tr");
    const node = row?.querySelector("th a").hash.split("/").at(-1);
    if (!waiting.has(node)) continue;
    drawn.push([waiting.get(node), node]);
    waiting.delete(node);
  }
  if (drawn.length) requestAnimationFrame(() => {
    const at = performance.timeOrigin + performance.now();
    for (const [round, node] of drawn) window.shown.push([round, node, at]);
  });
}).observe(document, { characterData: true, childList: true, subtree: true });
"""
# Frames in which the page took a message, changed or drew something.
COUNT_FRAMES = """
window.frames_used = 0;
let newest = 0;
const plainRequest = window.requestAnimationFrame;
window.requestAnimationFrame = (call) => plainRequest.call(window, (time) => {
  if (time !== newest) window.frames_used += 1;
  newest = time;
  call(time);
});
let isDue = false;
const note = () => {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; });
};
new MutationObserver(note).observe(document, {
  attributes: true, characterData: true, childList: true, subtree: true,
});
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...given) {
  note();
  return clear.apply(this, given);
};
"""
# The least that a browser can do: a message, a text, a frame.
ECHO = """
(address) => {
  window.shown = [];
  const line = document.body.appendChild(document.createElement("p"));
  new WebSocket(address).onmessage = ({ data }) => {
    line.textContent = data;
    requestAnimationFrame(() => {
      window.shown.push(performance.timeOrigin + performance.now() - Number(data));
    });
  };
}
"""


class PixelTimes(NamedTuple):
    """Milliseconds from an event, or a bare message, to its frame; script time of frames."""

    events_ms: Sequence[float]
    echoes_ms: Sequence[float]
    script_ms: dict[str, float]
    """Script of a frame that had any, by page."""


async def measure_pixels(measured_s: float) -> PixelTimes:
    """Let fifty nodes report while a browser shows their job."""
    async with served_page(NODES, ROUND_S) as page_server, chromium() as context:
        await (await open_page(context, page_server.link())).close()
        addresses = {
            "job": f"{page_server.origin}#/job/{JOB}",
            "nodes": f"{page_server.origin}#/nodes",
        }
        events = await _shown_events(context, addresses["job"], measured_s)
        script_ms = {
            name: await _script_ms(context, address, measured_s / 2)
            for name, address in addresses.items()
        }
        echoes_ms = await _echoes_ms(context, measured_s / 2)
        times_ms = await asyncio.to_thread(page_server.coordinator.end)
    taken_ms = [
        shown_ms - times_ms[update_sequence(number, int(node, 16), NODES)]
        for number, node, shown_ms in events
    ]
    if min(len(taken_ms), len(echoes_ms)) < SHOWN_LEAST:
        raise BenchmarkError(f"the page showed only {len(taken_ms)} events")
    return PixelTimes(taken_ms, echoes_ms, script_ms)


async def _shown_events(
    context: "BrowserContext", address: str, measured_s: float
) -> list[tuple[int, str, float]]:
    page = await context.new_page()
    await page.add_init_script(WATCH_UPDATES)
    await page.goto(address)
    await page.wait_for_selector("td.result")
    await asyncio.sleep(SETTLE_S)
    await page.evaluate("() => { window.shown = []; }")
    await asyncio.sleep(measured_s)
    shown_events: list[tuple[int, str, float]] = await page.evaluate("() => window.shown")
    await page.close()
    return shown_events


async def _script_ms(context: "BrowserContext", address: str, measured_s: float) -> float:
    """Script's time over the number of frames in which the page had something to do."""
    page = await context.new_page()
    await page.add_init_script(COUNT_FRAMES)
    await page.goto(address)
    await page.wait_for_selector("main table")
    await asyncio.sleep(SETTLE_S)
    session = await context.new_cdp_session(page)
    await session.send("Performance.enable")
    before, first = await metrics_of(session), await page.evaluate("() => window.frames_used")
    await asyncio.sleep(measured_s)
    after, last = await metrics_of(session), await page.evaluate("() => window.frames_used")
    await page.close()
    script_s = after["ScriptDuration"] - before["ScriptDuration"]
    return float(script_s * 1000 / max(1, last - first))


async def _echoes_ms(context: "BrowserContext", measured_s: float) -> list[float]:
    """A bare WebSocket and an empty page, beside the same work."""

    async def tell(connection: Any) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await connection.send(str(unix_ms()))
                await asyncio.sleep(ECHO_GAP_S)

    async with websockets.serve(tell, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        page = await context.new_page()
        await page.evaluate(ECHO, f"ws://127.0.0.1:{port}")
        await asyncio.sleep(measured_s)
        echo_times_ms: list[float] = await page.evaluate("() => window.shown")
        await page.close()
    return echo_times_ms


def pixel_figures(*, measured_s: float) -> PartFigures:
    """Time from event to frame, and the script in a frame."""
    times = asyncio.run(measure_pixels(measured_s))
    p50_ms, p95_ms = _percentile(times.events_ms, 50), _percentile(times.events_ms, 95)
    echo_ms = _percentile(times.echoes_ms, 95)
    script_ms = max(times.script_ms.values())
    return PartFigures(
        rows=[
            ["event to pixel p50, ms", f"{p50_ms:.0f}", ""],
            ["event to pixel p95, ms", f"{p95_ms:.0f}", f"{p95_ms / echo_ms:.1f}x a bare message"],
            ["the same of a bare message p95, ms", f"{echo_ms:.0f}", ""],
            *(
                [f"script of a frame, {page}, ms", f"{each:.1f}", f"{each / FRAME_MS:.0%} of 16.7"]
                for page, each in times.script_ms.items()
            ),
        ],
        metrics={
            "event_to_pixel_p95_ms": p95_ms,
            "event_to_pixel_over_bare": p95_ms / echo_ms,
            "script_ms_per_frame": script_ms,
            "script_share_of_frame": script_ms / FRAME_MS,
        },
        notes=[f"{len(times.events_ms):,} events; {NODES} nodes in rounds of {ROUND_S:.0f} s."],
    )


def _percentile(values: Sequence[float], hundredths: int) -> float:
    return statistics.quantiles(values, n=100)[hundredths - 1]
