"""A browser for tests of the page: Debian's Chromium, and what holds for every page it shows."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.programs import CHROMIUM_NAMES, find_program

AXE = Path(__file__).parent.parent / "node_modules" / "axe-core" / "axe.min.js"
LAYOUT_FAULTS = Path(__file__).parent / "browser" / "layout_faults.js"
WIDTHS_PX = (1440, 768, 390)
AXE_WIDTHS_PX = (1440, 390)
HEIGHT_PX = 900
# Boxes, names and roles are those of light; colours are judged in both.
ALL_RULES: dict[str, Any] = {"resultTypes": ["violations"]}
COLOUR_RULES: dict[str, Any] = {**ALL_RULES, "runOnly": ["color-contrast"]}
GRAVE = ("serious", "critical")
EXPECT_MS = 240_000
"""Longest wait for what a test expects; it is a bound on failure, not a pause."""
expect.set_options(timeout=EXPECT_MS)


def launch_options() -> dict[str, Any]:
    """How Chromium is started here."""
    program = find_program(*CHROMIUM_NAMES)
    assert program, "tests of the page carry the marker needs"
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return {"executable_path": program, "args": ["--disable-dev-shm-usage", *sandbox]}


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser while the block runs."""
    options = launch_options()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**options)
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page of a context of its own, with what its console complained of.

    Args:
        browser: Where it is opened.
        scheme: Colours that the system is said to prefer, light or dark.
    """

    def __init__(self, browser: Browser, scheme: Any = "light") -> None:
        viewport: Any = {"width": WIDTHS_PX[0], "height": HEIGHT_PX}
        self.context: BrowserContext = browser.new_context(viewport=viewport, color_scheme=scheme)
        self.context.set_default_timeout(EXPECT_MS)
        self._is_light = scheme == "light"
        self.complaints: list[str] = []
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def settle(self) -> None:
        """Wait until the page has its parts and what follows from its width is drawn."""
        self.page.wait_for_selector("main h1")
        self.page.wait_for_selector("main [aria-busy=true]", state="detached")
        self.page.evaluate(TWO_FRAMES)

    def open(self, address: str) -> None:
        """Show a page by the part of its address behind `#`."""
        self.page.evaluate("(hash) => { location.hash = hash; }", address)
        self.settle()

    def first_link(self, row: re.Pattern[str]) -> str:
        """Where the first row of that name leads."""
        first_link = self.page.get_by_role("rowheader").get_by_role("link", name=row).first
        return str(first_link.get_attribute("href"))

    def faults(self) -> list[str]:
        """Find the page's faults: boxes at every width, and what axe finds at two of them."""
        fault_list = []
        for width_px in WIDTHS_PX if self._is_light else AXE_WIDTHS_PX:
            self.page.set_viewport_size({"width": width_px, "height": HEIGHT_PX})
            self.settle()
            faults = self.axe_faults() if width_px in AXE_WIDTHS_PX else []
            if self._is_light:
                faults += map(str, self.page.evaluate(LAYOUT_FAULTS.read_text("utf-8")))
            fault_list += [f"at {width_px} px: {each}" for each in faults]
        return fault_list

    def axe_faults(self) -> list[str]:
        """Serious and critical violations that axe finds, a line for each element."""
        if not self.page.evaluate("typeof axe === 'object'"):
            self.page.evaluate(AXE.read_text("utf-8"))
        rules = ALL_RULES if self._is_light else COLOUR_RULES
        axe_report = self.page.evaluate("(rules) => axe.run(document, rules)", rules)
        return [
            f"{each['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
            for each in axe_report["violations"]
            if each["impact"] in GRAVE
            for node in each["nodes"]
        ]


TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
