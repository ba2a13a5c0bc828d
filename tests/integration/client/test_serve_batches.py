"""Batches of requests by OpenAI's own client: real nodes answer them, and processes are killed."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from hypergpu.user.serving.api_keys import ApiKeys
from hypergpu.user.serving.batch_forms import RequestBatch
from hypergpu.user.serving.batch_store import BatchStore
from hypergpu.user.serving.server import BATCH_FOLDER, KEY_FILE
from hypergpu.user.serving.starting import ServeOrder, start_serving, wait_until_ready
from tests.polling import first_true
from tests.processes import Cluster
from tests.running_api import RunningApi, home_of, running_api
from tests.tiny_bases import save_base

SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "15"}
CHAT: Final = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("batches")
    base = save_base(folder)
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster") as cluster:
        cluster.add_nodes(2, "torch", kinds=("training", "serve"), settings=SLOW)
        with cluster.client() as client:
            order = ServeOrder(str(base), name="tiny", replicas=2, conversations_most=4)
            wait_until_ready(client, start_serving(client, order).job)
        yield cluster


@pytest.fixture
def home(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    with cluster.client() as client:
        return home_of(tmp_path, client)


@pytest.fixture(scope="module")
def api(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    with cluster.client() as client:
        variables = home_of(tmp_path_factory.mktemp("home"), client)
    with running_api(variables) as api:
        yield waiting(api)


def waiting(api: RunningApi) -> RunningApi:
    """With a client that waits where the API tells it to: these tests ask without a rest."""
    return api._replace(client=api.client.with_options(max_retries=5))


def request(custom_id: str, text: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **changes}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def begun_batch(api: RunningApi, requests: list[dict[str, Any]]) -> openai.types.Batch:
    content = "\n".join(map(json.dumps, requests)).encode()
    file = api.client.files.create(file=("asked.jsonl", content), purpose="batch")
    return api.client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "a test"}
    )


def ended_batch(api: RunningApi, batch_id: str) -> openai.types.Batch:
    def batch_if_ended() -> openai.types.Batch | None:
        batch = api.client.batches.retrieve(batch_id)
        has_ended = batch.status in {"completed", "failed", "expired", "cancelled"}
        return batch if has_ended else None

    last_view = first_true(batch_if_ended)
    assert last_view is not None
    return last_view


def wait_for_lines(api: RunningApi, batch_id: str, count: int) -> None:
    """Wait until so many lines of a batch are answered."""

    def are_answered() -> bool:
        counts = api.client.batches.retrieve(batch_id).request_counts
        return counts is not None and counts.completed >= count

    first_true(are_answered)


def output_of(api: RunningApi, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in api.client.files.content(file_id).text.splitlines()]


def test_each_line_is_answered_once_though_everything_is_killed(
    cluster: Cluster, home: dict[str, str]
) -> None:
    requests = [request(f"line {place}", f"hello {place}") for place in range(40)]
    with running_api(home) as begun_api:
        api = waiting(begun_api)
        key = api.client.api_key
        batch = begun_batch(api, requests)
        wait_for_lines(api, batch.id, 5)
        api.process.kill()
        api.process.wait()
    cluster.coordinator.kill()
    cluster.nodes[0].kill()
    cluster.coordinator.start()
    with running_api(home, key=key) as new_api:
        api = waiting(new_api)
        batch = ended_batch(api, batch.id)
        assert batch.status == "completed"
        assert batch.error_file_id is None
        assert batch.metadata == {"of": "a test"}
        answers = output_of(api, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [
            request["custom_id"] for request in requests
        ]
        for place in (0, 20, 39):
            alone = api.client.chat.completions.create(**requests[place]["body"])
            body = answers[place]["response"]["body"]
            assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    cluster.nodes[0].run()


def test_lines_wait_for_a_coordinator_that_is_away(cluster: Cluster, api: RunningApi) -> None:
    batch = begun_batch(api, [request(f"{place}", "hello") for place in range(60)])
    wait_for_lines(api, batch.id, 5)
    cluster.coordinator.kill()
    cluster.coordinator.start()
    batch = ended_batch(api, batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (60, 0)


def test_a_request_that_is_refused_is_told_beside_those_that_are_answered(api: RunningApi) -> None:
    requests = [
        request("good", "hello"),
        request("long", "hello", max_tokens=10_000),
        request("unknown", "hello", model="large"),
        request("stream", "hello", stream=True),
    ]
    twice = begun_batch(api, [requests[0], requests[0]])
    batch = ended_batch(api, begun_batch(api, requests).id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
    errors = {each["custom_id"]: each for each in output_of(api, batch.error_file_id)}
    assert errors["long"]["error"]["code"] == "context_length_exceeded"
    assert errors["unknown"]["response"]["status_code"] == 404
    assert errors["stream"]["error"]["param"] == "stream"
    assert [each["custom_id"] for each in output_of(api, batch.output_file_id)] == ["good"]
    twice = ended_batch(api, twice.id)
    assert twice.status == "failed"
    assert twice.errors is not None
    assert twice.errors.data is not None
    assert twice.errors.data[0].code == "duplicate_custom_id"


def test_a_batch_that_is_cancelled_keeps_what_was_answered(api: RunningApi) -> None:
    requests = [request(f"{place}", "hello", max_tokens=60) for place in range(200)]
    batch = begun_batch(api, requests)
    wait_for_lines(api, batch.id, 1)
    api.client.batches.cancel(batch.id)
    batch = ended_batch(api, batch.id)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert 0 < batch.request_counts.completed < 200
    count = len(output_of(api, batch.output_file_id))
    assert count == batch.request_counts.completed


def test_files_and_batches_are_their_key_s_and_nobody_else_reads_them(api: RunningApi) -> None:
    batch = begun_batch(api, [request("one", "zebra 7319")])
    other = api.client.with_options(api_key=api.command("key", "add", "other").strip())
    assert next(each.id for each in api.client.batches.list(limit=1)) == batch.id
    assert "asked.jsonl" in [each.filename for each in api.client.files.list()]
    assert list(other.batches.list()) == []
    assert list(other.files.list()) == []
    for call in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.content(batch.input_file_id),
        lambda: other.files.delete(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    ended_batch(api, batch.id)
    folder = api.folder / BATCH_FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    api.client.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        api.client.files.retrieve(batch.input_file_id)
    assert not (folder / batch.input_file_id).exists()


def test_a_batch_of_a_revoked_key_uses_nothing(api: RunningApi) -> None:
    api.client.models.list()
    keys = ApiKeys(api.folder / KEY_FILE)
    batch = begun_batch(api, [request("a", "hello", max_tokens=100)] * 1)
    keys.revoke("first")
    store = BatchStore(api.folder / BATCH_FOLDER)
    key_id = keys.all()[0].id

    def batch_if_ended() -> RequestBatch | None:
        stored_batch = store.batch(key_id, batch.id)
        return stored_batch if stored_batch and stored_batch.has_ended else None

    stored_batch = first_true(batch_if_ended)
    assert stored_batch is not None
    assert stored_batch.status == "completed"
    assert stored_batch.request_counts.completed == 0
