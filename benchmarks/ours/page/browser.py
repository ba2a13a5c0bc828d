"""Chromium on the page of a server of this machine."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.ours.cluster import BenchmarkError

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession, Page

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE: Any = {"width": 1440, "height": 900}
FRAME_MS = 1000 / 60


@asynccontextmanager
async def chromium() -> "AsyncIterator[BrowserContext]":
    """A browser with a profile of its own.

    Raises:
        BenchmarkError: There is no Chromium, or no playwright to drive it.
    """
    try:
        from playwright.async_api import async_playwright
    except ImportError as error:
        raise BenchmarkError("playwright is missing. Fix: make setup") from error
    path = next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)
    if path is None:
        raise BenchmarkError("there is no Chromium. Fix: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        try:
            yield await browser.new_context(viewport=SIZE)
        finally:
            await browser.close()


async def open_page(context: "BrowserContext", link: str) -> "Page":
    """Open the page by its link, which logs the whole browser in, and wait for its state."""
    page = await context.new_page()
    await page.goto(link)
    await page.wait_for_selector("main h1")
    return page


async def show(page: "Page", route: str, selector: str) -> None:
    """Go to a route of the page and wait for something there."""
    await page.evaluate("route => { location.hash = route; }", route)
    await page.wait_for_selector(selector)


async def metrics_of(session: "CDPSession") -> dict[str, float]:
    """Counters of the page's process since it began; durations in seconds."""
    answer = await session.send("Performance.getMetrics")
    return {each["name"]: each["value"] for each in answer["metrics"]}
