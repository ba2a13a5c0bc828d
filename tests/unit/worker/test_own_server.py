"""A server of the node's owner: called as its file says, and never otherwise."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_node.core.limits import LimitValueError, owner_limits
from gpu_node.core.own_server import OwnServer, own_server
from gpu_node.shell.worker.own_server.engine import OwnServerEngine
from gpu_node.shell.worker.own_server.server_calls import ServerError, server_key
from gpu_node.shell.worker.serving.engine import UnanswerableCallError, is_last
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    ModelCall,
    Sampling,
)
from hypergpu.workloads.gguf.writing import write_gguf
from tests.openai_server import llama_server, scripted_server
from tests.tiny_bases import save_base

KEY = "sk-owner-7319"
CHAT = ({"role": "user", "content": "number 12 comes before"},)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    folder = tmp_path_factory.mktemp("server")
    write_gguf(save_base(folder), folder / "tiny.gguf")
    (folder / "key").write_text(f"{KEY}\n")
    (folder / "key").chmod(0o600)
    with llama_server(folder / "tiny.gguf", "tiny", KEY) as url:
        yield OwnServer(url=url, models=("tiny",), key_file=str(folder / "key"))


def answer(engine: OwnServerEngine, call: ModelCall) -> list[AnswerPart]:
    conversation = engine.open(call)
    parts: list[AnswerPart] = []
    while not is_last(parts):
        parts += conversation.step()
    conversation.close()
    return parts


def text_of(parts: list[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, AnswerToken))


def test_llama_cpp_s_server_answers_chats_and_plain_prompts(server: OwnServer) -> None:
    engine = OwnServerEngine(server, "tiny")
    for prompt in ({"messages": CHAT}, {"text": "number 12 comes before"}):
        call = ModelCall(**prompt, sampling=GREEDY, new_tokens_most=9)
        parts = answer(engine, call)
        tokens = sum(isinstance(part, AnswerToken) for part in parts)
        assert 0 < tokens <= 9
        assert isinstance(parts[-1], AnswerEnded)
        (begin,) = [part for part in parts if isinstance(part, AnswerBegun)]
        assert begin.prompt_tokens > 3
        assert text_of(answer(engine, call)) == text_of(parts)


def test_a_stop_of_a_call_is_the_server_s(server: OwnServer) -> None:
    engine = OwnServerEngine(server, "tiny")
    call = ModelCall(text="number 12", sampling=GREEDY, new_tokens_most=20)
    text = text_of(answer(engine, call))
    stop = text[1:3]
    short_call = ModelCall(text="number 12", sampling=GREEDY, new_tokens_most=20, stops=(stop,))
    parts = answer(engine, short_call)
    assert text_of(parts) == text[: text.index(stop)]
    assert parts[-1] == AnswerEnded("stop")


def test_a_conversation_that_is_closed_ends_the_call(server: OwnServer) -> None:
    engine = OwnServerEngine(server, "tiny")
    call = ModelCall(text="number 12", sampling=GREEDY, new_tokens_most=400)
    conversation = engine.open(call)
    parts: list[AnswerPart] = []
    while not parts:
        parts += conversation.step()
    conversation.close()
    conversation.close()
    assert text_of(answer(engine, ModelCall(text="x", sampling=GREEDY, new_tokens_most=3)))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (ModelCall(text="a", tokens_out=(0, 0)), "another one cannot go on with it"),
        (ModelCall(tokens=(1, 2)), "no tokens"),
        (ModelCall(text="a", top_tokens=2), "no log-probabilities"),
    ],
)
def test_what_a_server_cannot_do_is_refused(
    server: OwnServer, call: ModelCall, reason: str
) -> None:
    with pytest.raises(UnanswerableCallError, match=reason):
        OwnServerEngine(server, "tiny").open(call)


def test_a_refusal_of_the_server_is_passed_on_without_its_key(server: OwnServer) -> None:
    engine = OwnServerEngine(server, "tiny")
    parts = answer(engine, ModelCall(text="number 1 " * 600, sampling=GREEDY, new_tokens_most=5))
    (refusal,) = parts
    assert isinstance(refusal, AnswerRefused)
    assert refusal.is_lasting
    assert "answers with 400" in refusal.reason
    with pytest.raises(ShardError, match="answers with 401") as failure:
        OwnServerEngine(OwnServer(url=server.url, models=("tiny",)), "tiny")
    assert KEY not in refusal.reason + str(failure.value)
    with pytest.raises(ShardError, match="offers tiny and no model 'other'"):
        OwnServerEngine(server, "other")


GOOD = {
    "model": "m",
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


def good_answer(path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
    if path.endswith("/models"):
        return 200, {}, json.dumps({"data": [{"id": "m"}]}).encode()
    if not body.get("stream"):
        return 200, {}, json.dumps(GOOD).encode()
    pieces = [{"choices": [{"delta": {"content": text}}]} for text in ("a", "b")]
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": GOOD["usage"]}
    events = b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in [*pieces, end])
    return 200, {}, b": ping\n\n" + events + b"data: [DONE]\n\n"


CHANGES: dict[str, tuple[str, int, dict[str, str], bytes]] = {
    "sends callers elsewhere": ("/models", 302, {"location": "http://127.0.0.1:9/v1"}, b""),
    "lists no model 'm'": ("/models", 200, {}, b'{"data": [{"id": "n"}]}'),
    "answers without JSON": ("/models", 200, {}, b"<html>"),
    "is too long": ("/models", 200, {}, b'"' + b"x" * (1 << 20) + b'"'),
    "answers with 500: broken": ("/chat", 500, {}, b'{"error": {"message": "broken"}}'),
    "has not OpenAI's form": ("/chat", 200, {}, b'{"choices": []}'),
    "counts 900 tokens where 8": (
        "/chat",
        200,
        {},
        json.dumps({**GOOD, "usage": {"completion_tokens": 900}}).encode(),
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_server_is_checked_before_it_answers_anybody(reason: str) -> None:
    place, *change = CHANGES[reason]

    def bad_answer(path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
        return tuple(change) if place in path else good_answer(path, body)  # type: ignore[return-value]

    with (
        scripted_server(bad_answer) as (url, requests),
        pytest.raises(ShardError, match=reason),
    ):
        OwnServerEngine(OwnServer(url=url, models=("m",)), "m")
    assert all(key is None for _, key in requests)


STREAMS = {
    "broke its answer off": b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
    "is no JSON": b"data: {\n\n",
    "has not OpenAI's form": b'data: {"choices": [5]}\n\n',
    "is too long": b"data: " + b"x" * (1 << 20) + b"\n\n",
}


@pytest.mark.parametrize("reason", STREAMS)
def test_an_answer_that_is_malformed_ends_with_the_reason(reason: str) -> None:
    def odd_stream(path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
        is_stream = body is not None and body.get("stream")
        return (200, {}, STREAMS[reason]) if is_stream else good_answer(path, body)

    with scripted_server(odd_stream) as (url, _):
        engine = OwnServerEngine(OwnServer(url=url, models=("m",)), "m")
        *_, last = answer(engine, ModelCall(text="a"))
    assert isinstance(last, AnswerRefused)
    assert reason in last.reason
    assert not last.is_lasting


def test_the_key_goes_to_the_server_and_an_answer_counts_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    with scripted_server(good_answer) as (url, requests):
        server = OwnServer(url=url, models=("m",), key_file=str(tmp_path / "key"))
        parts = answer(OwnServerEngine(server, "m"), ModelCall(messages=CHAT))
    assert parts == [AnswerToken(0, "a"), AnswerToken(0, "b"), AnswerBegun(3), AnswerEnded("stop")]
    assert {key for _, key in requests} == {f"Bearer {KEY}"}


def test_a_key_that_others_may_read_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o640)
    with pytest.raises(ServerError, match="chmod 600") as refusal:
        server_key(OwnServer(url="http://127.0.0.1/v1", models=("m",), key_file=str(path)))
    assert KEY not in str(refusal.value)
    path.chmod(0o600)
    path.write_text("two words")
    with pytest.raises(ServerError, match="one word is wanted"):
        server_key(OwnServer(url="http://127.0.0.1/v1", models=("m",), key_file=str(path)))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("http://127.0.0.1/v1", "a table in node.toml"),
        ({"url": "http://127.0.0.1/v1", "models": []}, "models"),
        ({"url": "http://127.0.0.1/v1", "models": ["m"], "model": "n"}, "a table in node.toml"),
        ({"url": "ftp://127.0.0.1/v1", "models": ["m"]}, "http://127.0.0.1:PORT/v1"),
        ({"url": "http://me:pw@127.0.0.1/v1", "models": ["m"]}, "without a name or key"),
        ({"url": "http://127.0.0.1/v1?key=1", "models": ["m"]}, "without a name or key"),
        ({"url": "http://10.0.0.7:8000/v1", "models": ["m"]}, "beyond_loopback = true"),
        ({"url": "http://127.0.0.1.evil.example/v1", "models": ["m"]}, "beyond_loopback = true"),
        ({"url": "http://127.0.0.1/v1", "models": ["m"], "context": -1}, "context"),
    ],
)
def test_an_owner_s_file_names_its_server_or_says_what_is_wrong(table: Any, reason: str) -> None:
    with pytest.raises(LimitValueError, match=reason):
        owner_limits({"server": table}, "node.toml")


def test_another_machine_s_server_is_called_where_the_owner_says_so() -> None:
    table = {"url": "http://10.0.0.7:8000/v1", "models": ["m"], "beyond_loopback": True}
    assert own_server(table).beyond_loopback
    assert owner_limits({"server": table}, "node.toml").server == own_server(table)
    with pytest.raises(LimitValueError, match=r"a table in node\.toml"):
        owner_limits({"server": "http://127.0.0.1/v1"}, "--limit")
