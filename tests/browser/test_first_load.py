"""What a browser fetches until it has drawn a page."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from playwright.async_api import BrowserContext, async_playwright

from dashboard_api.core.recording import decode_recording, encode_recording
from dashboard_api.shell.recording import Recording
from tests.browser_page import launch_options
from tests.dashboard_server import dashboard

pytestmark = pytest.mark.needs("chromium")

FIXTURE = Path(__file__).parents[2] / "dashboard_api" / "web" / "fixtures" / "demo.json"
FIRST_LOAD_BYTES_MAX = 60 << 10
PAGES = ("nodes", "compare", "mine")
# Notes when the page's first content is there: for a job, when its timeline is painted.
WATCH = """
const isJob = location.hash.startsWith("#/job/");
const note = () => {
  performance.mark("drawn");
  document.documentElement.dataset.drawn = "";
};
const fill = CanvasRenderingContext2D.prototype.fillRect;
CanvasRenderingContext2D.prototype.fillRect = function (...given) {
  if (isJob && this.canvas.closest("[aria-label=Rounds]")) note();
  return fill.apply(this, given);
};
if (!isJob) new MutationObserver(() => {
  if (document.querySelector("main .card:not([aria-busy]), main h1, main table")) note();
}).observe(document, { childList: true, subtree: true });
"""
FETCHED = """
() => {
  const drawn = performance.getEntriesByName("drawn")[0].startTime;
  return ["navigation", "resource"].flatMap((kind) => performance.getEntriesByType(kind))
    .filter((each) => each.startTime <= drawn)
    .map((each) => [new URL(each.name).pathname, each.encodedBodySize]);
}
"""


def one_moment(folder: Path) -> tuple[Path, str]:
    """A recording of the demo's end alone, and its job."""
    state = Recording(decode_recording(FIXTURE.read_bytes())).state
    snapshot = {"type": "snapshot", "seq": 0, "at_ms": 0, "state": state}
    path = folder / "end.json"
    path.write_bytes(encode_recording([(0, snapshot)]))
    jobs = msgspec.convert(state["jobs"], dict[str, object])
    return path, next(iter(jobs))


async def first_load(browser: BrowserContext, address: str) -> dict[str, int]:
    """Compressed bytes by path of what was asked for before the page was drawn.

    A part that the browser has already counts, too.
    """
    page = await browser.new_page()
    await page.add_init_script(WATCH)
    await page.goto(address)
    await page.wait_for_selector("html[data-drawn]", state="attached")
    parts = dict(await page.evaluate(FETCHED))
    await page.close()
    return {path: size for path, size in parts.items() if not path.startswith("/api/")}


async def test_the_first_load_of_every_page_is_small(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    recording, job = one_moment(tmp_path)
    async with (
        dashboard(tmp_path, recording=recording) as under_test,
        async_playwright() as playwright,
    ):
        chromium = await playwright.chromium.launch(**launch_options())
        browser = await chromium.new_context(viewport={"width": 1440, "height": 900})
        sizes = {
            page: await first_load(browser, f"{under_test.origin}/#/{page}")
            for page in (f"job/{job}", *PAGES)
        }
        await chromium.close()
    totals = {page.partition("/")[0]: sum(parts.values()) for page, parts in sizes.items()}
    record_property("said", f"first load, bytes: {totals}")
    assert max(totals.values()) <= FIRST_LOAD_BYTES_MAX, sizes
    # Were nothing counted, the bound would hold for nothing.
    assert all(len(parts) >= 3 and all(parts.values()) for parts in sizes.values()), sizes
