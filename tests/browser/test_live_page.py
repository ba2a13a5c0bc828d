"""The page beside a real cluster, by its links and buttons: nothing is reloaded but where it says.

The tests share one cluster and one open page, and follow each other.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, WebSocket, expect

from hypergpu.jobfile.reading import parse_job
from hypergpu.user.cluster.cluster import ReadyLine
from hypergpu.user.cluster.dashboard import DashboardProcess
from hypergpu.wire.free_ports import free_ports
from tests.browser_page import WatchedPage, chromium
from tests.npz_workload import FILE, NAME, digits_file, install
from tests.processes import Cluster, NodeProcess

pytestmark = pytest.mark.needs("chromium")

JOB = """
workload = "digits-softmax"
name = "long"
[training]
rounds = 5000
nodes = 2
"""
UNHURRIED = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "20"}
"""A job without end would keep every core busy beside the browser."""
# Tests close the newest socket, as a network that fails would.
KEEP_SOCKETS = """
window.sockets = [];
window.WebSocket = class extends WebSocket {
  constructor(...given) {
    super(...given);
    window.sockets.push(this);
  }
};
"""


class LivePage:
    """A cluster of two nodes, its page's server, and a browser that looks at it."""

    def __init__(self, cluster: Cluster, browser: Browser) -> None:
        self.cluster = cluster
        self.browser = browser
        self.port = free_ports(1)[0]
        self.link = self.start_server()
        self.watched = WatchedPage(browser)
        self.page: Page = self.watched.page
        self.page.add_init_script(KEEP_SOCKETS)
        self.sockets: list[tuple[str, list[dict[str, Any]]]] = []
        self.page.on("websocket", self._note)

    def start_server(self) -> str:
        """Start the page's server; gives the link that it prints."""
        data_dir = self.cluster.coordinator.data_dir
        ready = ReadyLine(self.cluster.coordinator.address, str(data_dir / "operator.token"))
        self.server = DashboardProcess(ready, data_dir, self.port)
        page_line = self.server.wait_for_line(60)
        assert page_line.link, page_line
        return page_line.link

    def _note(self, socket: WebSocket) -> None:
        frames: list[dict[str, Any]] = []
        self.sockets.append((socket.url, frames))
        socket.on("framereceived", lambda payload: frames.append(json.loads(payload)))

    @property
    def status(self) -> Locator:
        """How fresh the page says it is."""
        return self.page.get_by_role("banner").get_by_role("status")

    def word(self, text: str) -> Locator:
        """Words that stand alone in the page's main part."""
        return self.page.get_by_role("main").get_by_text(text, exact=True).first

    def button(self, name: str) -> Locator:
        """A button by its name."""
        return self.page.get_by_role("button", name=name, exact=True)

    @property
    def rounds(self) -> Locator:
        """The job's figure of rounds, as in "3 of 40" and "3, 8 %"."""
        figure = re.compile(r"^\d+(?:(?: of |/)\d+|, \d+ %)$")
        return self.page.get_by_role("main").get_by_text(figure).first

    def wait_for_more_rounds(self) -> None:
        """Wait until another round is counted."""
        expect(self.rounds).not_to_have_text(self.rounds.inner_text())


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePage]:
    folder = tmp_path_factory.mktemp("live")
    cluster = Cluster(folder)
    path = {"PYTHONPATH": install(folder / "package")}
    cluster.coordinator.environment |= path
    with pytest.MonkeyPatch.context() as patch, cluster, chromium() as browser:
        patch.setenv("PYTHONPATH", path["PYTHONPATH"])
        cluster.add_nodes(2, settings=path | UNHURRIED)
        live_page = LivePage(cluster, browser)
        try:
            yield live_page
        finally:
            live_page.server.end()


@pytest.fixture(scope="module")
def job(live: LivePage) -> str:
    """A job without end, on the page."""
    job_id = live.cluster.submit(parse_job(JOB))
    if live.page.url == "about:blank":
        # No test before has opened the page: this one runs alone.
        live.page.goto(live.link)
        expect(live.status).to_have_text("Live")
    live.watched.open(f"#/job/{job_id}")
    return job_id


def test_the_link_opens_the_page_once_and_a_token_does_so_always(live: LivePage) -> None:
    live.page.goto(live.link)
    expect(live.status).to_have_text("Live")
    assert "code" not in live.page.url

    other = WatchedPage(live.browser)
    page = other.page
    page.goto(live.link)
    expect(page.get_by_text("used already")).to_be_visible()
    assert "code" not in page.url
    token = page.get_by_label("Or paste your token")
    token.fill("hgpu1.nothing")
    page.get_by_role("button", name="Enter").click()
    expect(page.get_by_role("alert")).to_contain_text("Fix:")
    assert not other.faults()
    folder = live.cluster.coordinator.data_dir
    token.fill((folder / "operator.token").read_text("utf-8"))
    page.get_by_role("button", name="Enter").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    other.context.close()


def test_a_job_with_uploaded_data_is_made_on_the_page_and_seen_to_its_end(live: LivePage) -> None:
    page = live.page
    page.get_by_role("link", name="Control").click()
    form = page.get_by_role("region", name="New job")
    form.get_by_label("Workload").select_option(NAME)
    form.get_by_label("Name", exact=False).first.fill("uploaded")
    form.get_by_label(re.compile("^Nodes")).fill("2")
    form.get_by_label(re.compile("^Rounds")).fill("4")
    form.get_by_label(re.compile("^Evaluate every")).fill("2")
    content = digits_file()
    form.get_by_label(re.compile("^Data")).set_input_files(
        {"name": FILE, "mimeType": "application/zip", "buffer": content}
    )
    expect(form.get_by_role("img", name="sent")).to_be_visible()
    form.get_by_role("button", name="Check").click()
    expect(form.get_by_text("Checked: these are all its settings")).to_be_visible()
    form.get_by_role("button", name="Start the job").click()
    expect(page.get_by_role("heading", name="uploaded")).to_be_visible()
    expect(live.word("finished")).to_be_visible()
    # The strategy is the default one, so plans decide how many rounds there are.
    with live.cluster.coordinator.client() as client:
        job = client.job(client.find_job("uploaded")).job
    expect(live.word(f"{job.round}, 100 %")).to_be_visible()
    table_button = page.get_by_role("region", name="Rounds").get_by_role(
        "button", name="Rounds as a table"
    )
    table_button.click()
    lanes = page.get_by_role("region", name="Rounds, table").get_by_role("row")
    assert lanes.filter(has_text="accepted").count() == job.updates_accepted


def test_an_estimate_is_told_by_the_form_and_what_is_left_by_the_jobs_page(
    live: LivePage, job: str
) -> None:
    page = live.page
    live.watched.open("#/control")
    form = page.get_by_role("region", name="New job")
    form.get_by_role("button", name="Estimate").click()
    estimate_field = form.get_by_label("Estimate", exact=True)
    expect(estimate_field).to_contain_text(re.compile(r"Time\s*.+ \(.+ to .+\)"), timeout=60_000)
    expect(estimate_field).to_contain_text("samples in about")
    live.watched.open(f"#/job/{job}")
    time_left = page.get_by_role("main").get_by_text(re.compile(r"^\d+.* to \d+.*$")).first
    expect(time_left).to_be_visible(timeout=60_000)


@pytest.mark.usefixtures("job")
def test_a_job_is_paused_and_resumed_by_clicks(live: LivePage) -> None:
    live.wait_for_more_rounds()
    live.button("Pause…").click()
    live.button("Pause it").click()
    expect(live.word("paused")).to_be_visible()
    live.button("Resume").click()
    expect(live.word("training")).to_be_visible()
    live.wait_for_more_rounds()


@pytest.mark.usefixtures("job")
def test_the_feed_goes_on_after_a_dropped_socket_without_a_new_snapshot(live: LivePage) -> None:
    before = live.sockets[-1][1]
    with live.page.expect_websocket():
        live.page.evaluate("sockets.at(-1).close()")
    expect(live.status).to_have_text("Live")
    address, frames = live.sockets[-1]
    assert f"epoch={before[0]['epoch']}" in address
    resume_sequence = int(address.partition("seq=")[2])
    assert [each["type"] for each in frames[:2]] == ["hello", "delta"]
    assert frames[1]["seq"] == resume_sequence + 1


@pytest.mark.usefixtures("job")
def test_a_node_that_is_killed_and_started_again_is_seen_to_go_and_to_come_back(
    live: LivePage,
) -> None:
    live.watched.open("#/nodes")
    rows = live.page.get_by_role("region", name="Table of nodes").get_by_role("row")
    away = rows.filter(has=live.page.get_by_text("away", exact=True))
    expect(away).to_have_count(0)
    live.cluster.nodes[1].kill()
    expect(away).to_have_count(1)
    live.cluster.nodes[1].run()
    expect(away).to_have_count(0)
    expect(rows.filter(has=live.page.get_by_text("working", exact=True))).to_have_count(2)


def test_an_open_page_outlives_the_coordinator_and_its_own_server(live: LivePage, job: str) -> None:
    page = live.page
    live.watched.open(f"#/job/{job}")
    page.evaluate("window.isTheSame = true")
    live.cluster.coordinator.kill()
    absence_note = page.get_by_text("does not answer")
    expect(absence_note).to_be_visible()
    live.cluster.coordinator.start()
    expect(absence_note).to_be_hidden()
    live.wait_for_more_rounds()

    live.server.end()
    expect(live.status).to_have_text("Disconnected")
    expect(page.get_by_text("This page has lost its server")).to_be_visible()
    live.start_server()
    # The page may have tried by itself, and then has no such button any more.
    page.get_by_role("button", name="Try now").evaluate_all("all => all.forEach(it => it.click())")
    expect(live.status).to_have_text("Live")
    live.wait_for_more_rounds()
    assert page.evaluate("window.isTheSame")


def test_a_nodes_owner_sees_and_steers_its_own_node_alone(live: LivePage) -> None:
    token = live.cluster.coordinator.node_token()
    name = {"HYPERGPU_NODE_NAME": "owned"}
    owned_node = NodeProcess(live.cluster.folder, "owned", "numpy", name)
    owned_node.join(token)
    live.cluster.nodes.append(owned_node)
    owner = WatchedPage(live.browser)
    page = owner.page
    page.goto(live.link.partition("#")[0])
    page.get_by_label("Or paste your token").fill(str(token))
    page.get_by_role("button", name="Enter").click()
    page.get_by_role("link", name="My node").click()
    main_part = page.get_by_role("main")
    expect(main_part.get_by_role("region", name="owned now")).to_be_visible()
    # Before it logged in the browser said that it was refused.
    owner.complaints.clear()
    expect(main_part.get_by_text("Updates accepted")).to_be_visible()
    assert not owner.faults()
    page.get_by_role("button", name="Pause…").click()
    page.get_by_role("button", name="Pause owned").click()
    expect(main_part.get_by_text("Paused by its owner.")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Pause…")).to_be_visible()
    assert main_part.get_by_role("region", name=re.compile(" now$")).count() == 1
    owner.context.close()
    assert not owner.complaints


def test_every_live_page_keeps_its_boxes_and_is_accessible(live: LivePage, job: str) -> None:
    faults = []
    for route in (f"#/job/{job}", f"#/control/{job}"):
        live.watched.open(route)
        faults += [f"{route} {each}" for each in live.watched.faults()]
    assert not faults, "\n".join(faults)


def test_a_job_is_stopped_by_two_clicks(live: LivePage, job: str) -> None:
    live.watched.open(f"#/job/{job}")
    live.button("Stop…").click()
    live.button("Stop for good").click()
    expect(live.word("stopped")).to_be_visible()
