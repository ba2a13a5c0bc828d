"""The page of a farm job and of a sweep beside a real cluster."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

import hypergpu
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import ReadyLine
from hypergpu.user.cluster.dashboard import DashboardProcess
from hypergpu.wire.credentials import Role
from tests.browser_page import WatchedPage, chromium
from tests.processes import Cluster

pytestmark = pytest.mark.needs("chromium")
JOB = """
workload = "digits-softmax"
training = { rounds = 4, inner_steps = 5, batch_size = 32 }
evaluation = { every = 1 }
"""
GRID: dict[str, list[Any]] = {
    "inner.learning_rate": [0.0005, 0.01, 0.3],
    "inner.optimizer": ["adamw", "sgd"],
}
ITEMS = 600


class FarmPage:
    """A finished farm job and a finished sweep, and the page's server beside them."""

    def __init__(self, cluster: Cluster, client: Coordinator, folder: Path) -> None:
        self.cluster = cluster
        job_file = folder / "job.toml"
        job_file.write_text(JOB, "utf-8")
        map_run = hypergpu.map(
            "checksum", data=[{"a": number} for number in range(ITEMS)], coordinator=client
        )
        sweep_run = hypergpu.sweep(job_file, GRID, name="rates", checks=0.0, coordinator=client)
        map_run.wait()
        self.best = sweep_run.best()
        self.map_id, self.sweep_id = map_run.id, sweep_run.id
        data_dir = cluster.coordinator.data_dir
        ready = ReadyLine(cluster.coordinator.address, str(data_dir / "operator.token"))
        self.server = DashboardProcess(ready, data_dir, 0)
        self.link = self.server.wait_for_line(60).link
        self.origin = self.link.partition("/#")[0]

    def items(self, role: Role) -> httpx.Response:
        """What the server answers to a token of a role for the map job's items."""
        with self.cluster.client() as client:
            token = client.create_token(role, ttl_s=600, label="other").token
        address = f"{self.origin}/api/v1/jobs/{self.map_id}/items?rows=3"
        return httpx.get(address, headers={"authorization": f"Bearer {token}"}, trust_env=False)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmPage]:
    folder = tmp_path_factory.mktemp("farm-page")
    with Cluster(folder, is_plaintext=False) as cluster, cluster.client() as client:
        cluster.add_nodes(2, "torch", kinds=("training", "checksum", "sweep"))
        page = FarmPage(cluster, client, folder)
        try:
            yield page
        finally:
            page.server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_view(browser: Browser, farm: FarmPage) -> WatchedPage:
    watched_page = WatchedPage(browser)
    watched_page.page.goto(farm.link)
    watched_page.settle()
    return watched_page


def test_a_farm_job_shows_tiles_nodes_samples_and_cost(
    page_view: WatchedPage, farm: FarmPage
) -> None:
    page_view.open(f"#/job/{farm.map_id}")
    main = page_view.page.get_by_role("main")
    expect(main.get_by_text(f"{ITEMS} of {ITEMS}", exact=True).first).to_be_visible()
    tiles = main.get_by_role("img", name=re.compile("^Tiles of items: 200 done, 0 done, after"))
    expect(tiles).to_be_visible()
    nodes = main.get_by_role("region", name="Table of nodes").get_by_role("rowheader")
    assert 1 <= nodes.count() <= 2
    expect(main.get_by_role("region", name="Samples of the output")).to_contain_text(
        re.compile(r"Item \d+ [0-9a-f]{64}")
    )
    # Nothing is paid: receipts are a counter, with those of results that confirmed others.
    credit = main.locator(".figure", has_text="Credit")
    expect(credit).to_contain_text("items in receipts; this job pays nothing")
    expect(credit).to_contain_text(re.compile(rf"Credit\s*{ITEMS}"))
    assert not page_view.faults()
    assert not page_view.complaints


def test_a_sweep_is_a_table_to_sort_and_a_plot(page_view: WatchedPage, farm: FarmPage) -> None:
    page_view.open(f"#/job/{farm.sweep_id}")
    main = page_view.page.get_by_role("main")
    plot = main.get_by_role("img", name=re.compile("^Parallel coordinates of 6 points over inner"))
    expect(plot.locator("polyline")).to_have_count(6)
    table = main.get_by_role("region", name="Table of points")
    rows = table.get_by_role("row")
    expect(rows).to_have_count(7)
    expect(rows.nth(1).get_by_role("rowheader")).to_have_text(str(farm.best["id"] + 1))
    table.get_by_role("button", name="metric").click()
    expect(rows.nth(6).get_by_role("rowheader")).to_have_text(str(farm.best["id"] + 1))
    table.get_by_role("button", name="inner.optimizer").click()
    expect(rows.nth(1)).to_contain_text("adamw")
    expect(
        rows.nth(1).get_by_role("img", name=re.compile("^Metric from 2.303 to "))
    ).to_be_visible()
    assert not page_view.faults()
    assert not page_view.complaints


def test_values_of_items_are_told_to_their_owner_alone(farm: FarmPage) -> None:
    answer = farm.items(Role.OPERATOR)
    assert answer.status_code == 200
    assert [row["error"] for row in answer.json()["rows"]] == [""] * 3
    for role in (Role.USER, Role.NODE):
        refusal = farm.items(role)
        assert refusal.status_code in {403, 404}
        assert "value" not in refusal.text
