"""The page's chat with a served model beside a real cluster."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

import hypergpu
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import ReadyLine
from hypergpu.user.cluster.dashboard import DashboardProcess
from hypergpu.user.serving.ring_model import finetune_ring
from hypergpu.user.serving.starting import (
    ServeOrder,
    model_named,
    start_serving,
    wait_until_ready,
)
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
        self.base = base
        self.job = start_serving(client, ServeOrder(base, name="tiny")).job
        self.ring_job = start_serving(client, ServeOrder(base, name="ring", stages=2)).job
        for job in (self.job, self.ring_job):
            wait_until_ready(client, job)
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
        cluster.add_nodes(3, "torch", kinds=("training", "serve"))
        page = ServePage(cluster, client, str(base))
        try:
            yield page
        finally:
            page.server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def watched_page(browser: Browser, serve_page: ServePage) -> Iterator[WatchedPage]:
    """The page, entered by its link, which is good for one time."""
    watched_page = WatchedPage(browser)
    watched_page.page.goto(serve_page.link)
    watched_page.settle()
    yield watched_page
    watched_page.context.close()


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
    watched_page: WatchedPage, serve_page: ServePage, tmp_path: Path
) -> None:
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
    assert not faults, "\n".join(faults)
    files = [path for path in serve_page.cluster.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if PROMPT.encode() in path.read_bytes()]


def test_a_ring_is_drawn_with_its_stages_and_its_pace(
    watched_page: WatchedPage, serve_page: ServePage
) -> None:
    model = model_named(serve_page.client, serve_page.ring_job)
    assert [(each.first_layer, each.is_ready) for each in model.stages] == [(0, True), (1, True)]
    assert all(each.layer_us > 0 for each in model.stages)
    watched_page.open(f"#/job/{serve_page.ring_job}")
    ring = watched_page.page.get_by_role("region", name="Ring")
    for text in ("coordinator", "layers 0 to 0", "layers 1 to 1"):
        expect(ring.get_by_text(text, exact=True)).to_be_visible()
    expect(ring.get_by_text(re.compile("0 calls under way, 0 waiting"))).to_be_visible()
    call = ModelCall(text="hello", sampling=Sampling(temperature=0.0), new_tokens_most=40)
    parts = serve_page.client.answer(serve_page.ring_job, call)
    assert any(isinstance(part, AnswerToken) for part in parts)
    expect(ring.get_by_text(re.compile(r"^(0\.[1-9]|[1-9]\S*) tokens/s"))).to_be_visible()
    faults = watched_page.faults()
    assert not faults, "\n".join(faults)


@pytest.mark.full
def test_a_training_s_newest_model_answers_beside_its_base(
    watched_page: WatchedPage, serve_page: ServePage
) -> None:
    serve_page.cluster.add_nodes(2, "torch", kinds=("training", "serve"))
    run = hypergpu.finetune(
        serve_page.base,
        data=[{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(40)],
        coordinator=serve_page.client,
        steps=2,
        inner_steps=1,
        options={"sequence_length": 32, "packing": False},
    )
    run.result()
    watched_page.open(f"#/job/{run.id}")
    models = watched_page.page.get_by_role("region", name="Models of this training")
    models.get_by_role("button", name="Serve it").click()
    expect(models.get_by_role("link", name=f"{run.id}-latest")).to_be_visible()
    models.get_by_role("combobox").first.select_option("base")
    models.get_by_role("button", name="Serve it").click()
    expect(models.get_by_role("link", name=f"{run.id}-base")).to_be_visible()
    chat = watched_page.page.get_by_role("region", name="Chat", exact=True)
    chat.get_by_label("Beside").select_option(label=f"{run.id}-base")
    chat.get_by_label("Tokens at most").fill("3")
    chat.get_by_role("textbox", name="Message").fill("7 and")
    chat.get_by_role("button", name="Send").click()
    for name in (f"{run.id}-latest", f"{run.id}-base"):
        log = chat.get_by_role("log", name=f"Chat with {name}")
        expect(log.get_by_text(re.compile(r"^\d tokens? in"))).to_be_visible(timeout=60_000)


@pytest.mark.full
def test_rings_that_train_are_drawn_and_nobody_is_asked_to_chat_yet(
    watched_page: WatchedPage, serve_page: ServePage
) -> None:
    # Two each, and one that the ring which is served may have stand by.
    serve_page.cluster.add_nodes(5, "torch", kinds=("training", "serve"))
    model = finetune_ring(
        serve_page.base,
        stages={"count": 2, "rings": 2, "any_line": True},
        data=[{"text": f"colour {number} is a colour"} for number in range(20)],
        coordinator=serve_page.client,
        name="taught",
        steps=100_000,
        inner_steps=2,
        options={"sequence_length": 32, "rank": 2},
    )
    watched_page.open(f"#/job/{model.job}")
    page = watched_page.page
    rings = page.get_by_role("region", name="Ring")
    for name in ("2 rings", "Ring 1", "Ring 2"):
        expect(rings.get_by_role("heading", name=name)).to_be_visible(timeout=60_000)
    rounds = page.get_by_text(re.compile(r"trained through stages, [1-9]\d* of 50000 rounds"))
    expect(rounds).to_be_visible(timeout=60_000)
    expect(page.get_by_text(re.compile(r"the loss is \d"))).to_be_visible()
    expect(page.get_by_role("region", name="Chat", exact=True)).to_have_count(0)
    serve_page.client.stop(model.job)


@pytest.mark.parametrize(("role", "status"), [(Role.USER, 404), (Role.NODE, 403)])
def test_others_get_no_answer(serve_page: ServePage, role: Role, status: int) -> None:
    assert serve_page.ask_as(role) == status
