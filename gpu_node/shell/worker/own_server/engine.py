"""An engine that passes calls on to the owner's server, and its answers back as they come.

The server draws by rules of its own and tells no tokens, only text. So each piece counts as a
token, and an answer whose server is lost cannot go on elsewhere.
"""

import queue
import threading
from collections.abc import Mapping
from typing import Any

from gpu_node.core.own_server import OwnServer
from gpu_node.shell.worker.own_server.server_calls import (
    ServerAnswer,
    ServerCalls,
    ServerError,
    server_key,
)
from gpu_node.shell.worker.serving.engine import EngineMemory, UnanswerableCallError
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.serving.calls import (
    NEW_TOKENS_MOST,
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    ModelCall,
)
from hypergpu.units import Bytes

_WAIT_S = 0.02
"""How long a step waits for a piece: other conversations have their turn then."""
_CONTEXT_UNKNOWN = 1 << 20
_CHECK_TOKENS = 8
_CHECK_TEXT = "Say yes."


class OwnServerEngine:
    """See `AnswerEngine`.

    Args:
        server: As the owner's file names it.
        model: One of its models.

    Raises:
        ShardError: The server does not answer as OpenAI's protocol has it.
    """

    device = "server"
    memory = EngineMemory(Bytes(0), Bytes(0))

    def __init__(self, server: OwnServer, model: str) -> None:
        if refusal := server.refusal_of(model):
            raise ShardError(refusal)
        self._model = model
        self.tokens_most = server.context or _CONTEXT_UNKNOWN
        try:
            self._calls = ServerCalls(server, server_key(server))
            self._check()
        except ServerError as error:
            raise ShardError(str(error)) from error

    def _check(self) -> None:
        """Have the server answer once, whole, and hold it to what was asked."""
        catalogue = self._calls.answer("GET", "/models")
        entries = catalogue.get("data") if isinstance(catalogue, dict) else None
        names = [each.get("id") for each in entries or () if isinstance(each, dict)]
        if self._model not in names:
            raise ServerError(f"the owner's server lists no model {self._model!r}")
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": _CHECK_TEXT}],
            "max_tokens": _CHECK_TOKENS,
            "temperature": 0,
        }
        answer = self._calls.answer("POST", "/chat/completions", body)
        choice = _first_choice(answer)
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else None
        usage = answer.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not isinstance(text, str) or choice.get("finish_reason") not in {"stop", "length"}:
            raise ServerError("an answer of the owner's server has not OpenAI's form")
        if not isinstance(tokens, int) or not 0 < tokens <= _CHECK_TOKENS:
            detail = f"the owner's server counts {tokens} tokens where {_CHECK_TOKENS} were asked"
            raise ServerError(f"{detail} for at most")

    def open(self, call: ModelCall) -> "ServerConversation":
        """See `AnswerEngine.open`."""
        if call.tokens_out:
            raise UnanswerableCallError(
                "the server that began this answer is gone, and another one cannot go on with it:"
                " ask again"
            )
        if call.tokens is not None:
            raise UnanswerableCallError("an owner's server takes texts and messages, no tokens")
        tokens = min(call.new_tokens_most or NEW_TOKENS_MOST, self.tokens_most)
        return ServerConversation(self._calls, self._model, call, tokens)


class ServerConversation:
    """See `EngineConversation`. A thread reads what the server sends."""

    def __init__(self, calls: ServerCalls, model: str, call: ModelCall, tokens_most: int) -> None:
        self.tokens_most = tokens_most
        self._calls = calls
        self._path, self._body = _request(model, call)
        self._call = call
        self._parts: queue.SimpleQueue[AnswerPart] = queue.SimpleQueue()
        self._answer: ServerAnswer | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._tokens = 0

    def step(self) -> list[AnswerPart]:
        """See `EngineConversation.step`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        try:
            part = self._parts.get(timeout=_WAIT_S)
        except queue.Empty:
            return []
        # What the server counted comes right before the end.
        return [part, self._parts.get()] if isinstance(part, AnswerBegun) else [part]

    def close(self) -> None:
        """See `EngineConversation.close`: the connection is closed, so that the server stops."""
        self._is_closed = True
        if self._answer is not None:
            self._answer.close()

    def _read(self) -> None:
        try:
            self._answer = self._calls.open(self._path, self._body)
            if self._is_closed:
                self._answer.close()
                return
            finish, usage = "", {}
            for event in self._answer.events():
                if isinstance(event, dict) and isinstance(event.get("usage"), dict):
                    usage = event["usage"]
                if not isinstance(event, dict) or not event.get("choices"):
                    continue
                choice = _first_choice(event)
                finish = choice.get("finish_reason") or finish
                self._put_token(choice)
            self._answer.close()
            self._put_end(finish, usage)
        except ServerError as error:
            if not self._is_closed:
                self._parts.put(AnswerRefused(str(error), is_lasting=error.is_lasting))

    def _put_token(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        if isinstance(text, str) and text and self._tokens < self.tokens_most:
            self._tokens += 1
            self._parts.put(AnswerToken(0, text))

    def _put_end(self, finish: str, usage: Mapping[str, Any]) -> None:
        """End the answer, with the tokens that the server counted: a piece may be of several."""
        counted_tokens = usage.get("completion_tokens", 0)
        if isinstance(counted_tokens, int):
            for _ in range(min(counted_tokens, self.tokens_most) - self._tokens):
                self._parts.put(AnswerToken(0, ""))
        prompt_tokens = usage.get("prompt_tokens", 0)
        self._parts.put(AnswerBegun(prompt_tokens if isinstance(prompt_tokens, int) else 0))
        self._parts.put(AnswerEnded("length" if finish == "length" else "stop"))


def _request(model: str, call: ModelCall) -> tuple[str, dict[str, Any]]:
    """Path and body of a call in OpenAI's form."""
    rules = call.sampling
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": rules.temperature,
        "top_p": rules.top_p,
        "seed": rules.seed % (1 << 31),
    }
    if rules.top_k:
        body["top_k"] = rules.top_k
    if call.new_tokens_most is not None:
        body["max_tokens"] = call.new_tokens_most
    if call.stops:
        body["stop"] = list(call.stops)
    if call.top_tokens is not None:
        raise UnanswerableCallError("an owner's server is asked for no log-probabilities")
    if call.messages is None:
        return "/completions", {**body, "prompt": call.text}
    if call.tools:
        body["tools"] = [dict(tool) for tool in call.tools]
    return "/chat/completions", {**body, "messages": [dict(each) for each in call.messages]}


def _first_choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError("an answer of the owner's server has not OpenAI's form")
    return choices[0]
