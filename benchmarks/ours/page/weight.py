"""What the page weighs, and whether everybody can use it: first load, export, axe."""

import asyncio
import gzip
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.page.browser import chromium, open_page
from benchmarks.ours.page.scripted import JOB
from benchmarks.ours.page.server import served_page
from benchmarks.ours.table import PartFigures
from dashboard_api.core.page_file import page_with_recording
from dashboard_api.shell.export import read_page_parts
from dashboard_api.shell.page import PAGE_FOLDER

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

ROOT = Path(__file__).parents[3]
NODES = 5
KILOBYTE = 1000
GZIP_KB = 60
HTML_KB = 1024
ROUTES = (
    *("jobs", f"job/{JOB}", "nodes", "network", "compare"),
    *("payments", "mine", "control", "alerts"),
)
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
AXE = ("dashboard_api/web/node_modules/axe-core/axe.min.js", "node_modules/axe-core/axe.min.js")
RECORDED_DEMO = "dashboard_api/web/fixtures/demo.json"
# The page's own parts that were asked for until it had drawn something.
FETCHED = """
async () => {
  while (!document.querySelector("main .card:not([aria-busy]), main h1, main table"))
    await new Promise(requestAnimationFrame);
  const drawn = performance.now();
  return ["navigation", "resource"].flatMap((kind) => performance.getEntriesByType(kind))
    .filter((each) => each.startTime <= drawn).map((each) => each.name.split("#")[0]);
}
"""
BREACHES = """
async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
    .flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.target}`));
}
"""


async def first_loads_kb() -> dict[str, float]:
    """Kilobytes, each part by gzip, of the first load of each page."""
    sizes = {}
    async with served_page(NODES, 3.0) as page_server, chromium() as context:
        await (await open_page(context, page_server.link())).close()
        for route in ROUTES:
            page = await context.new_page()
            await page.goto(f"{page_server.origin}#/{route}")
            names = {name for name in await page.evaluate(FETCHED) if "/api/" not in name}
            parts = [await asyncio.to_thread(_gzip_bytes, name) for name in names]
            sizes[route.partition("/")[0]] = sum(parts) / KILOBYTE
            await page.close()
    return sizes


def _gzip_bytes(address: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address) as answer:
        return len(gzip.compress(answer.read()))


def weight_figures() -> PartFigures:
    """First load of the heaviest page."""
    sizes = asyncio.run(first_loads_kb())
    heaviest = max(sizes, key=lambda name: sizes[name])
    rows = [
        [f"first load of {name}, kB by gzip", f"{size:.1f}", f"{size / GZIP_KB:.0%} of {GZIP_KB}"]
        for name, size in sizes.items()
    ]
    return PartFigures(rows=rows, metrics={"page_gzip_kb": sizes[heaviest]})


async def axe_breaches() -> list[str]:
    """Serious and critical breaches on every page, in both themes."""
    script = next((ROOT / path for path in AXE if (ROOT / path).is_file()), None)
    if script is None:
        raise BenchmarkError("axe-core is missing. Fix: make web")
    source = script.read_text("utf-8")
    async with served_page(NODES, 3.0) as page_server, chromium() as context:
        await (await open_page(context, page_server.link())).close()
        return [
            f"{route} {theme} {breach}"
            for route in ROUTES
            for theme in THEMES
            for breach in await _breaches(context, f"{page_server.origin}#/{route}", theme, source)
        ]


async def _breaches(
    context: "BrowserContext", address: str, theme: Literal["light", "dark"], source: str
) -> list[str]:
    page = await context.new_page()
    await page.emulate_media(color_scheme=theme)
    await page.goto(address)
    await page.evaluate(FETCHED)
    await page.evaluate(source)
    breaches: list[str] = await page.evaluate(BREACHES)
    await page.close()
    return breaches


def axe_figures() -> PartFigures:
    """Breaches that axe calls serious or critical."""
    breaches = asyncio.run(axe_breaches())
    pages = len(ROUTES) * len(THEMES)
    return PartFigures(
        rows=[["serious breaches by axe", str(len(breaches)), f"on {pages} pages and themes"]],
        metrics={"axe_serious": len(breaches)},
        notes=breaches,
    )


def export_figures() -> PartFigures:
    """The demo's job as one file, from its recording."""
    recording = Path(ROOT / RECORDED_DEMO).read_bytes()
    size = len(page_with_recording(read_page_parts(PAGE_FOLDER), recording).encode())
    size_kb = size / 1024
    return PartFigures(
        rows=[["the demo as one file, KiB", f"{size_kb:.0f}", f"{size_kb / HTML_KB:.0%} of 1024"]],
        metrics={"export_html_kb": size_kb},
        notes=["The recorded demo of the page's tests, as `hypergpu job export-page` writes it."],
    )
