"""The page's chat with a served model beside a real cluster."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import ReadyLine
from hypergpu.user.cluster.dashboard import DashboardProcess
from hypergpu.user.serving.starting import ServeOrder, start_serving, wait_until_ready
from hypergpu.wire.credentials import Role
from tests.browser_page import WatchedPage, chromium
from tests.processes import Cluster
from tests.tiny_bases import save_base

pytestmark = pytest.mark.needs("chromium")
PROMPT = "hello there 7319"


class ServePage:
    """A served model, and the page's server beside it."""

    def __init__(self, cluster: Cluster, client: Coordinator, base: str) -> None:
        self.cluster = cluster
        self.client = client
        self.job = start_serving(client, ServeOrder(base, name="tiny")).job
        wait_until_ready(client, self.job)
        data_dir = cluster.coordinator.data_dir
        ready = ReadyLine(cluster.coordinator.address, str(data_dir / "operator.token"))
        self.server = DashboardProcess(ready, data_dir, 0)
        self.link = self.server.wait_for_line(60).link
        self.origin = self.link.partition("/#")[0]

    def answer(self, text: str, tokens: int) -> str:
        """What the model answers without the page."""
        messages = ({"role": "user", "content": text},)
        call = ModelCall(
            messages=messages, sampling=Sampling(temperature=0.0, seed=1), new_tokens_most=tokens
        )
        parts = self.client.answer(self.job, call)
        return "".join(part.text for part in parts if isinstance(part, AnswerToken))

    def ask_as(self, role: Role) -> int:
        """Status of an answer to a stranger's token of a role."""
        token = self.client.create_token(role, ttl_s=600, label="other").token
        return httpx.post(
            f"{self.origin}/api/v1/jobs/{self.job}/answer",
            json={"text": "hello"},
            headers={"authorization": f"Bearer {token}"},
            trust_env=False,
        ).status_code


@pytest.fixture(scope="module")
def serve_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServePage]:
    folder = tmp_path_factory.mktemp("serve-page")
    base = save_base(folder)
    with Cluster(folder, is_plaintext=False) as cluster, cluster.client() as client:
        cluster.add_nodes(1, "torch", kinds=("training", "serve"))
        page = ServePage(cluster, client, str(base))
        try:
            yield page
        finally:
            page.server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def batch_answers(watched_page: WatchedPage, path: Path) -> list[dict[str, Any]]:
    """Have the page answer a file of requests, and give the file of answers."""
    requests = [
        {"custom_id": "one", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6},
        {"custom_id": "two", "prompt": ""},
        {"custom_id": "three", "prompt": "hello", "max_tokens": 4_000},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in requests), encoding="utf-8")
    batch = watched_page.page.get_by_role("region", name="Batch")
    batch.get_by_label("Requests, a JSON object a line").set_input_files(path)
    expect(batch.get_by_text("0 of 3 answered")).to_be_visible()
    batch.get_by_role("button", name="Begin").click()
    expect(batch.get_by_text("3 of 3 answered, 2 of them with an error")).to_be_visible()
    with watched_page.page.expect_download() as download:
        batch.get_by_role("link", name="Download answers").click()
    return [json.loads(line) for line in download.value.path().read_text("utf-8").splitlines()]


def test_a_model_is_chatted_with_on_the_page(
    browser: Browser, serve_page: ServePage, tmp_path: Path
) -> None:
    watched_page = WatchedPage(browser)
    watched_page.page.goto(serve_page.link)
    watched_page.settle()
    watched_page.open(f"#/job/{serve_page.job}")
    chat = watched_page.page.get_by_role("region", name="Chat")
    chat.get_by_label("Tokens at most").fill("12")
    chat.get_by_role("textbox", name="Message").fill(PROMPT)
    chat.get_by_role("button", name="Send").click()
    log = chat.get_by_role("log")
    expect(log.get_by_text(re.compile(r"^12 tokens in"))).to_be_visible()
    expect(log.get_by_role("listitem").nth(1).locator(".said")).to_have_text(
        serve_page.answer(PROMPT, 12)
    )
    chat.get_by_label("Tokens at most").fill("4000")
    chat.get_by_role("textbox", name="Message").fill("hello")
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_role("alert")).to_contain_text("this model takes 128")
    faults = watched_page.faults()
    chat.get_by_role("button", name="Clear").click()
    expect(log.get_by_role("listitem")).to_have_count(0)
    rows = batch_answers(watched_page, tmp_path / "asked.jsonl")
    assert [row["custom_id"] for row in rows] == ["one", "two", "three"]
    assert rows[0]["answer"] == serve_page.answer(PROMPT, 6)
    assert rows[1]["error"] == "it has no messages, prompt or text"
    assert "this model takes 128" in rows[2]["error"]
    watched_page.context.close()
    assert not faults, "\n".join(faults)
    files = [path for path in serve_page.cluster.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if PROMPT.encode() in path.read_bytes()]


@pytest.mark.parametrize(("role", "status"), [(Role.USER, 404), (Role.NODE, 403)])
def test_others_get_no_answer(serve_page: ServePage, role: Role, status: int) -> None:
    assert serve_page.ask_as(role) == status
