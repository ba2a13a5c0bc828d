"""Every page on a recording: boxes at three widths, contrast and names in both colours, replay."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from dashboard_api.core.page_file import PageParts, page_with_recording
from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.recording import encode_recording
from hypergpu.user.client import JobEvent
from tests.browser_page import WatchedPage, chromium

pytestmark = pytest.mark.needs("chromium")

DASHBOARD = Path(__file__).parents[2] / "dashboard_api"
NAMES = ("index.html", "page.js", "page.css")
JOB, NODE = re.compile("^demo$"), re.compile(".")
BEGUN_MS = 1_700_000_000_000
PAGES = ("jobs", "nodes", "network", "compare", "payments", "mine", "control", "alerts", "events")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    recording = (DASHBOARD / "web" / "fixtures" / "demo.json").read_bytes()
    return page_of(tmp_path_factory.mktemp("page"), recording)


def page_of(folder: Path, recording: bytes) -> str:
    """A page in one file, as `hypergpu job export-page` writes it."""
    built_folder = DASHBOARD / "dist" / "recorded"
    parts = PageParts(*((built_folder / name).read_text("utf-8") for name in NAMES))
    path = folder / "page.html"
    path.write_text(page_with_recording(parts, recording), "utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def open_recording(browser: Browser, address: str, scheme: str = "light") -> WatchedPage:
    """The recording at its end."""
    watched_page = WatchedPage(browser, scheme)
    watched_page.page.goto(address)
    watched_page.settle()
    return watched_page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_keeps_its_boxes_and_is_accessible(
    browser: Browser, address: str, scheme: str
) -> None:
    watched_page = open_recording(browser, address, scheme)
    job = watched_page.first_link(JOB)
    watched_page.open("#/nodes")
    node = watched_page.first_link(NODE)
    faults = []
    for route in (job, node, *(f"#/{each}" for each in PAGES)):
        watched_page.open(route)
        faults += [f"{route} {each}" for each in watched_page.faults()]
    watched_page.context.close()
    assert not faults, "\n".join(faults)
    assert not watched_page.complaints


def test_a_recording_is_replayed_from_its_beginning_to_its_end(
    browser: Browser, address: str
) -> None:
    watched_page = open_recording(browser, address)
    page = watched_page.page
    watched_page.open(watched_page.first_link(JOB))
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
    watched_page.open("#/nodes")
    whole = page.get_by_role("slider", name="Moment of the recording")
    nodes = page.get_by_role("rowheader")
    joined_count = nodes.count()
    whole.press("Home")
    expect(nodes).not_to_have_count(joined_count)
    whole.press("End")
    expect(nodes).to_have_count(joined_count)
    watched_page.context.close()
    assert not watched_page.complaints


def test_a_served_model_has_no_rounds(browser: Browser, tmp_path: Path) -> None:
    projection = FeedProjection("somewhere:7700")
    body: dict[str, object] = {"job_id": "job-s", "model": "tiny"}
    projection.take_event("job-s", JobEvent(0, 0, "ServeCreated", body), BEGUN_MS)
    snapshot = {"type": "snapshot", "seq": 0, "at_ms": BEGUN_MS, "state": projection.state}
    watched_page = open_recording(
        browser, page_of(tmp_path, encode_recording([(BEGUN_MS, snapshot)]))
    )
    watched_page.open("#/job/job-s")
    content = watched_page.page.get_by_role("main")
    expect(content.get_by_text("a served model")).to_be_visible()
    expect(content.get_by_text("a job that serves tiny was created")).to_be_visible()
    expect(content.get_by_text("Round")).to_have_count(0)
    faults = watched_page.faults()
    watched_page.context.close()
    assert not faults, "\n".join(faults)
    assert not watched_page.complaints
