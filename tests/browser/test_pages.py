"""Every page on a recording: boxes at three widths, contrast and names in both colours, replay."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from dashboard_api.core.page_file import PageParts, page_with_recording
from tests.browser_page import WatchedPage, chromium

pytestmark = pytest.mark.needs("chromium")

DASHBOARD = Path(__file__).parents[2] / "dashboard_api"
NAMES = ("index.html", "page.js", "page.css")
JOB, NODE = re.compile("^demo$"), re.compile(".")
PAGES = ("jobs", "nodes", "network", "compare", "payments", "mine", "control", "alerts", "events")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page in one file, as `hypergpu job export-page` writes it."""
    built = DASHBOARD / "dist" / "recorded"
    parts = PageParts(*((built / name).read_text("utf-8") for name in NAMES))
    recording = (DASHBOARD / "web" / "fixtures" / "demo.json").read_bytes()
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_with_recording(parts, recording), "utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def open_recording(browser: Browser, address: str, scheme: str = "light") -> WatchedPage:
    """The recording at its end."""
    watched = WatchedPage(browser, scheme)
    watched.page.goto(address)
    watched.settle()
    return watched


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_keeps_its_boxes_and_is_accessible(
    browser: Browser, address: str, scheme: str
) -> None:
    watched = open_recording(browser, address, scheme)
    job = watched.first_link(JOB)
    watched.open("#/nodes")
    node = watched.first_link(NODE)
    faults = []
    for shown in (job, node, *(f"#/{each}" for each in PAGES)):
        watched.open(shown)
        faults += [f"{shown} {each}" for each in watched.faults()]
    watched.context.close()
    assert not faults, "\n".join(faults)
    assert not watched.complaints


def test_a_recording_is_replayed_from_its_beginning_to_its_end(
    browser: Browser, address: str
) -> None:
    watched = open_recording(browser, address)
    page = watched.page
    watched.open(watched.first_link(JOB))
    title, moment = page.get_by_role("main"), page.get_by_role("slider", name="Moment of the job")
    figure = title.get_by_text(re.compile(r"^[1-9]\d*, \d+ %$"))
    expect(figure).to_be_visible()
    moment.press("Home")
    expect(figure).to_be_hidden()
    none = title.get_by_text(re.compile(r"^0 of \d+$"))
    expect(none).to_be_visible()
    page.get_by_label("Speed of the replay").select_option("20")
    page.get_by_role("button", name="Replay the job").click()
    expect(none).to_be_hidden()
    moment.press("End")
    expect(figure).to_be_visible()
    watched.open("#/nodes")
    whole = page.get_by_role("slider", name="Moment of the recording")
    nodes = page.get_by_role("rowheader")
    joined = nodes.count()
    whole.press("Home")
    expect(nodes).not_to_have_count(joined)
    whole.press("End")
    expect(nodes).to_have_count(joined)
    watched.context.close()
    assert not watched.complaints
