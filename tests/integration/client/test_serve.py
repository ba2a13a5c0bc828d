"""A served model by OpenAI's own client: real nodes answer, and are killed in mid-answer."""

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import msgspec
import openai
import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.statements import SignedReceipt
from hypergpu.units import Wei
from hypergpu.user.client import Coordinator, connect
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.client.models import AnswerRoute
from hypergpu.user.serving.api_keys import ApiKeys
from hypergpu.user.serving.model import ServedModel
from hypergpu.user.serving.server import KEY_FILE
from hypergpu.user.serving.starting import ServeOrder, model_named, start_serving
from hypergpu.wire.credentials import Role
from payments.core.verify import ReceiptFile, verify
from tests.certificates import write_certificate
from tests.gateway_process import GatewayProcess, operator_token
from tests.polling import first_true, first_true_of
from tests.processes import Cluster, NodeProcess
from tests.running_api import RunningApi, home_of, running_api
from tests.tiny_bases import save_base

CHAT: Any = [{"role": "user", "content": "hello there"}]
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=1.2, seed=11)
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is tested
SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "25"}
"""So that an answer lasts long enough to be broken off."""


class ServedTiny(NamedTuple):
    """A model on two nodes, of which one dials a gateway."""

    cluster: Cluster
    base: Path
    job: str
    nodes: dict[str, NodeProcess]
    """By their ids."""

    def wait_for(self, client: Coordinator, *, ready: int = 2, open_calls: int = 0) -> None:
        """Wait until so many replicas answer so many calls."""

        def is_so() -> bool:
            model = model_named(client, self.job)
            return (model.ready_replicas, model.open_calls) == (ready, open_calls)

        first_true(is_so)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTiny]:
    folder = tmp_path_factory.mktemp("serve")
    base = save_base(folder)
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster", is_plaintext=False) as cluster, ExitStack() as owner:
        gateway = GatewayProcess(operator_token(cluster.coordinator), folder / "gateway.log")
        owner.callback(gateway.end)
        tokens = {"one": "", "two": gateway.token(cluster.coordinator)}
        nodes = {name: _slow_node(cluster, name, token) for name, token in tokens.items()}
        with cluster.client() as client:
            job = start_serving(client, ServeOrder(str(base), name="tiny", replicas=2)).job
            tiny = ServedTiny(cluster, base, job, {})
            tiny.wait_for(client)
            tiny.nodes.update({each.id: nodes[each.name] for each in client.nodes()})
        yield tiny


@pytest.fixture(scope="module")
def coordinator(tiny: ServedTiny) -> Iterator[Coordinator]:
    with tiny.cluster.client() as client:
        yield client


def _slow_node(cluster: Cluster, name: str, token: str) -> NodeProcess:
    settings = {**SLOW, "HYPERGPU_NODE_NAME": name}
    kinds = ("training", "serve")
    (node,) = cluster.add_nodes(1, "torch", kinds=kinds, settings=settings, token=token)
    return node


def whole_answer(coordinator: Coordinator, call: ModelCall) -> list[int]:
    parts = coordinator.answer("tiny", call)
    return [part.token for part in parts if isinstance(part, AnswerToken)]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_an_answer_whose_node_is_killed_goes_on_with_the_same_tokens(
    tiny: ServedTiny, coordinator: Coordinator, sampling: Sampling
) -> None:
    tiny.wait_for(coordinator)
    call = ModelCall(text="hello", sampling=sampling, new_tokens_most=40)
    whole_tokens = whole_answer(coordinator, call)
    assert len(whole_tokens) > 15
    routes: list[str] = []
    tokens: list[int] = []
    for part in coordinator.answer("tiny", call):
        if isinstance(part, AnswerRoute):
            routes.append(part.node)
        elif isinstance(part, AnswerToken):
            tokens.append(part.token)
            if len(tokens) == 8:
                tiny.nodes[routes[0]].kill()
    assert tokens == whole_tokens
    assert len(routes) == 2
    assert routes[0] != routes[1]
    tiny.nodes[routes[0]].run()
    tiny.wait_for(coordinator)


def test_calls_wait_for_a_replica_and_both_answer(
    tiny: ServedTiny, coordinator: Coordinator
) -> None:
    tiny.wait_for(coordinator)
    calls = [
        ModelCall(text=f"hello {place}", sampling=GREEDY, new_tokens_most=12) for place in range(6)
    ]
    nodes: set[str] = set()
    whole_tokens = [whole_answer(coordinator, call) for call in calls]
    streams = [coordinator.answer("tiny", call) for call in calls]
    answers: list[list[int]] = []
    for stream in streams:
        parts = list(stream)
        nodes |= {part.node for part in parts if isinstance(part, AnswerRoute)}
        answers.append([part.token for part in parts if isinstance(part, AnswerToken)])
    assert answers == whole_tokens
    assert nodes <= tiny.nodes.keys()


def test_an_answer_nobody_reads_any_more_ends_at_its_node(
    tiny: ServedTiny, coordinator: Coordinator
) -> None:
    tiny.wait_for(coordinator)
    call = ModelCall(text="hello", sampling=SEEDED, new_tokens_most=110)
    stream = coordinator.answer("tiny", call)
    for part in stream:
        if isinstance(part, AnswerToken):
            break
    assert model_named(coordinator, tiny.job).open_calls == 1
    stream.close()
    tiny.wait_for(coordinator, open_calls=0)


@pytest.mark.usefixtures("tiny")
def test_a_model_of_another_user_is_not_there(coordinator: Coordinator) -> None:
    token = coordinator.create_token(Role.USER, ttl_s=600).token
    with connect(coordinator.target.address, token=token) as stranger:
        assert stranger.models() == []
        with pytest.raises(HyperGPUError, match="no model 'tiny' is served to this token: none"):
            whole_answer(stranger, ModelCall(text="hello"))


def test_neither_prompt_nor_answer_is_in_any_file(
    tiny: ServedTiny, coordinator: Coordinator
) -> None:
    prompt = "zebra crossing 7319"
    parts = coordinator.answer("tiny", ModelCall(text=prompt, sampling=GREEDY, new_tokens_most=30))
    text = "".join(part.text for part in parts if isinstance(part, AnswerToken))
    assert len(text) > 20
    needles = [prompt.encode(), text[4:20].encode()]
    files = [path for path in tiny.cluster.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files)
    assert not [path for path in files if any(part in path.read_bytes() for part in needles)]


def test_python_gets_the_text_of_an_answer_whole_and_as_it_comes(
    tiny: ServedTiny, coordinator: Coordinator
) -> None:
    model = ServedModel(coordinator, tiny.job, "tiny")
    text = model.generate("hello", new_tokens_most=20)
    assert "".join(model.stream("hello", new_tokens_most=20)) == text
    assert model.generate(CHAT, new_tokens_most=4, temperature=1.0, seed=2)
    with pytest.raises(HyperGPUError, match="this model takes 128"):
        model.generate("hello", new_tokens_most=1_000)


def test_an_owner_serves_one_model_of_a_name(tiny: ServedTiny, coordinator: Coordinator) -> None:
    with pytest.raises(HyperGPUError, match="serves a model of the name 'tiny'"):
        start_serving(coordinator, ServeOrder(str(tiny.base), name="tiny"))


@pytest.fixture(scope="module")
def api(
    tiny: ServedTiny,  # noqa: ARG001 - its model is called
    coordinator: Coordinator,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningApi]:
    home = tmp_path_factory.mktemp("home")
    with running_api(home_of(home, coordinator)) as api:
        yield api


def test_openai_s_client_chats_as_with_openai(api: RunningApi) -> None:
    assert [model.id for model in api.client.models.list()] == ["tiny"]
    settings: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "seed": 4}
    whole = api.client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == 12
    stream = api.client.chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage
    assert {piece.system_fingerprint for piece in pieces[:-1]} == {whole.system_fingerprint}


def test_openai_s_client_completes_several_prompts(api: RunningApi) -> None:
    answer = api.client.completions.create(
        model="tiny", prompt=["hello", "good day"], max_tokens=5, temperature=0, n=2
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (texts[0], texts[2]) == (texts[1], texts[3])
    lone_usages = [
        api.client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        for prompt in ("hello", "good day")
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(usage.prompt_tokens for usage in lone_usages if usage)


def test_an_error_of_one_of_several_answers_has_its_form(api: RunningApi) -> None:
    settings: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 10_000, "n": 3}
    with pytest.raises(openai.BadRequestError) as refusal:
        api.client.chat.completions.create(**settings)
    assert refusal.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"model": "large"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"frequency_penalty": 1.0}, openai.BadRequestError, None),
        ({"messages": []}, openai.BadRequestError, None),
    ],
)
def test_errors_have_the_form_that_openai_s_client_knows(
    api: RunningApi, changes: dict[str, Any], error: type[openai.APIStatusError], code: str | None
) -> None:
    settings: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 4, **changes}
    with pytest.raises(error) as refusal:
        api.client.chat.completions.create(**settings)
    assert refusal.value.code == code


def test_a_key_is_asked_for_and_one_that_is_revoked_ends_an_answer(api: RunningApi) -> None:
    with pytest.raises(openai.AuthenticationError):
        api.client.with_options(api_key="sk-hgpu-wrong").models.list()
    key = api.command("key", "add", "guest", "--model", "tiny").strip()
    guest = api.client.with_options(api_key=key)
    stream = guest.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=100, seed=1, stream=True
    )
    next(stream)
    ApiKeys(api.folder / KEY_FILE).revoke("guest")
    with pytest.raises(openai.APIError, match="revoked"):
        list(stream)


def test_others_call_it_over_tls_by_the_operator_s_certificate(
    api: RunningApi, tmp_path: Path
) -> None:
    certificate, private_key = write_certificate(tmp_path)
    words = ["--tls-certificate", str(certificate), "--tls-key", str(private_key)]
    with running_api(api.home, *words) as far_api:
        base_url = far_api.base_url
        assert base_url.startswith("https://127.0.0.1:")
        key = api.command("key", "add", "far").strip()
        context = ssl.create_default_context(cafile=str(certificate))
        with (
            httpx2.Client(verify=context) as http_client,
            openai.OpenAI(base_url=base_url, api_key=key, http_client=http_client) as client,
        ):
            assert [model.id for model in client.models.list()] == ["tiny"]


def test_others_call_it_over_tls_by_the_hub_s_ca_where_there_is_no_certificate(
    api: RunningApi,
) -> None:
    with running_api(api.home, "--listen", EVERYWHERE) as far_api:
        scheme, _, rest = far_api.base_url.partition("://")
        assert scheme == "https"
        assert not rest.startswith(EVERYWHERE)
        assert far_api.process.stdout is not None
        authority = api.folder / "hub-ca.pem"
        key = api.command("key", "add", "phone").strip()
        context = ssl.create_default_context(cafile=str(authority))
        with (
            httpx2.Client(verify=context) as http_client,
            openai.OpenAI(
                base_url=far_api.base_url, api_key=key, http_client=http_client
            ) as client,
        ):
            assert [model.id for model in client.models.list()] == ["tiny"]


def test_open_webui_s_requests_are_answered(api: RunningApi) -> None:
    """Bodies as Open WebUI sends them: src/lib/components/chat/Chat.svelte, and openai.py and
    tasks.py of backend/open_webui/routers, at commit 074d4883.
    """
    key = api.command("key", "add", "webui").strip()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    chat = {
        "stream": True,
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello there"},
        ],
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["<|never|>"],
        "max_tokens": 8,
        "stream_options": {"include_usage": True},
    }
    title = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Generate a title"}],
        "stream": False,
        "max_completion_tokens": 12,
    }
    with httpx2.Client(base_url=api.base_url, headers=headers) as client:
        model_list = client.get("/models").json()
        assert (model_list["object"], [each["id"] for each in model_list["data"]]) == (
            "list",
            ["tiny"],
        )
        with client.stream("POST", "/chat/completions", json=chat) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        pieces = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in pieces[:-1])
        assert text
        assert pieces[-1]["usage"]["completion_tokens"] == 8
        whole = client.post("/chat/completions", json=title).json()
        assert whole["choices"][0]["message"]["content"]
        # Its usual limit of a title, by which small models answer nothing.
        refusal = client.post("/chat/completions", json={**title, "max_completion_tokens": 1_000})
        assert refusal.status_code == 400
        assert "Fix: shorten the prompt" in refusal.json()["error"]["message"]


def test_a_budget_bounds_what_a_key_uses(api: RunningApi) -> None:
    key = api.command("key", "add", "small", "--budget", "30").strip()
    small = api.client.with_options(api_key=key)
    small.completions.create(model="tiny", prompt="hello", max_tokens=10)
    with pytest.raises(openai.RateLimitError, match="budget"):
        small.completions.create(model="tiny", prompt="hello", max_tokens=29)
    assert "small" in api.command("key", "ls")


def test_a_model_answers_again_once_its_coordinator_was_killed(
    tiny: ServedTiny, coordinator: Coordinator
) -> None:
    call = ModelCall(text="hello", sampling=GREEDY, new_tokens_most=6)
    whole_tokens = whole_answer(coordinator, call)
    process = tiny.cluster.coordinator
    process.kill()
    # It dies once more as soon as a node's signature of its last count is journalled.
    process.start(failpoints="contribution.accepted:1")
    with tiny.cluster.client() as client:
        tiny.wait_for(client)
        assert whole_answer(client, call) == whole_tokens
        client.stop(tiny.job)
    process.child.wait(60)
    process.kill()
    process.start()
    with tiny.cluster.client() as client:
        with pytest.raises(HyperGPUError, match="no model 'tiny'"):
            whole_answer(client, call)
        for _ in client.watch(tiny.job):
            pass
        # Hello is five tokens for this model, two units; what was not journalled is lost.
        receipts = receipts_once_there(client, tiny.job)
        assert receipts[-1].receipt.samples == 2 + len(whole_tokens)
        assert len({each.receipt.round for each in receipts}) == len(receipts)
        ledger = client.ledger(tiny.job)
    file = ReceiptFile(JobId(tiny.job), ledger.terms, Wei(0), tuple(receipts))
    assert verify(file).faults == ()


def receipts_once_there(client: Coordinator, job: str) -> list[SignedReceipt]:
    """The receipts of a job that has some, in the order of its counts."""

    async def all_receipts() -> list[SignedReceipt]:
        calls = client.asynchronous
        return [each async for each in calls.receipts(job)]

    receipts = wait_for(first_true_of(all_receipts))
    return sorted(receipts, key=lambda each: each.receipt.round)
