"""A job whose first rounds the feed has let go of opens whole."""

from pathlib import Path

import pytest
from playwright.async_api import Page, async_playwright

from dashboard_api.core.state import EventLine
from tests.browser_page import launch_options
from tests.dashboard_journal import JOB, START_MS, journal, summary
from tests.dashboard_server import DashboardUnderTest, dashboard

pytestmark = pytest.mark.needs("chromium")

ROUNDS = 300
SEEK = """
(slider, at_ms) => {
  slider.value = at_ms;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}
"""


async def tell_job(under_test: DashboardUnderTest) -> int:
    """Fold a long journal into feed and history; returns the length of the job in ms."""
    services = under_test.services
    projection, recorder = services.views.own.projection, services.recorder
    await recorder.clock(JOB)
    events = journal(7, rounds=ROUNDS)
    for event in events:
        line: EventLine = projection.take_event(JOB, event, START_MS + event.at_ms)
        recorder.take_event(projection, JOB, event, line)
    await recorder.flush()
    projection.take_jobs([summary(phase="finished", rounds=ROUNDS, round=ROUNDS)])
    under_test.feed.publish()
    return events[-1].at_ms


async def rounds_in_table(page: Page) -> list[int]:
    cells = await page.locator("section[aria-label=Rounds] tbody td:first-child").all_inner_texts()
    return [int(each) for each in cells]


async def test_the_scrubber_fetches_rounds_of_long_ago_and_curves_begin_at_the_first(
    tmp_path: Path,
) -> None:
    async with dashboard(tmp_path) as under_test, async_playwright() as playwright:
        length_ms = await tell_job(under_test)
        kept_rounds = under_test.services.views.own.projection.state["jobs"][JOB][
            "rounds_by_number"
        ]
        assert min(map(int, kept_rounds)) == ROUNDS - 200
        browser = await playwright.chromium.launch(**launch_options())
        page = await browser.new_page()
        await page.goto(f"{under_test.origin}/#code={under_test.code()}")
        await page.wait_for_selector("main h1")
        await page.goto(f"{under_test.origin}/#/job/{JOB}")
        await page.get_by_role("button", name="Rounds as a table").click()
        assert max(await rounds_in_table(page)) == ROUNDS
        slider = page.get_by_role("slider", name="Moment of the job")
        await slider.evaluate(SEEK, START_MS + length_ms * 30 // ROUNDS)
        await page.wait_for_selector("section[aria-label=Rounds] tbody")
        assert 20 <= max(await rounds_in_table(page)) <= 40
        await page.get_by_role("button", name="Loss as a table").click()
        # The first round's loss is the greatest of all: it must not have been sampled away.
        table = page.get_by_role("region", name="Loss, table")
        assert "2.00" in await table.locator("tbody").inner_text()
        await browser.close()
