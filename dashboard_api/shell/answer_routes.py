"""A served model answers on the page. The coordinator is asked with the session's own token, lets
its owner and operators alone call it, and nothing of prompt or answer is kept here.
"""

from collections.abc import AsyncIterator
from typing import Literal

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dashboard_api.shell.api import Call, Endpoint
from dashboard_api.shell.failures import FailureAnswer
from hypergpu.errors import Reason
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    ModelCall,
    Sampling,
)
from hypergpu.user.client import HyperGPUError, RemoteFailureError
from hypergpu.user.client.models import AnswerRoute

LINES = "application/x-ndjson"
_Part = AnswerRoute | AnswerPart


class ChatMessage(msgspec.Struct, frozen=True):
    """A turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class AnswerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is to answer: the turns of a chat, or a text that it goes on with."""

    messages: tuple[ChatMessage, ...] = ()
    text: str = ""
    """Where there are no messages."""
    temperature: float = 0.0
    """0: always the likeliest token."""
    seed: int = 0
    new_tokens_most: int = 256

    @property
    def call(self) -> ModelCall:
        """The call that it is."""
        messages = tuple(msgspec.to_builtins(message) for message in self.messages)
        return ModelCall(
            messages=messages or None,
            text=None if messages else self.text,
            sampling=Sampling(temperature=self.temperature, seed=self.seed),
            new_tokens_most=self.new_tokens_most,
        )


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the answer, as it comes."""

    text: str = ""
    tokens: int = 0
    """Tokens that the line stands for."""
    prompt_tokens: int = 0
    node: str = ""
    """The node that answers from here on, with the reason."""
    reason: str = ""
    fingerprint: str = ""
    finish: str = ""
    """Told at the end: ``stop``, or ``length`` where the limit or the context ended it."""
    failure: FailureAnswer | None = None
    """It broke off."""


async def answer_call(call: Call) -> Response:
    """The answer of a served model, a JSON object a line, as it comes."""
    order = await call.body(AnswerOrder)
    coordinator = await call.services.coordinator(call.who)
    parts = coordinator.answer(call.path("job"), order.call)
    # Until its first part a call is refused with a status of its own.
    return AnswerLines(await anext(parts), parts)


class AnswerLines(StreamingResponse):
    """Lines of an answer. A reader who goes away ends it at its node within a token."""

    def __init__(self, first: _Part, parts: AsyncIterator[_Part]) -> None:
        self._parts = parts
        headers = {"cache-control": "no-store"}
        super().__init__(_lines(first, parts), media_type=LINES, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `StreamingResponse`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            close = getattr(self._parts, "aclose", None)
            if close is not None:
                await close()


async def _lines(first: _Part, parts: AsyncIterator[_Part]) -> AsyncIterator[bytes]:
    try:
        yield _line(first)
        async for part in parts:
            yield _line(part)
    except HyperGPUError as error:
        yield _failure(error.reason.number, error.detail, error.fix)
    except RemoteFailureError as error:
        yield _failure(error.number, error.detail, error.fix)


def _line(part: _Part) -> bytes:
    match part:
        case AnswerRoute():
            line = AnswerLine(node=part.node, reason=part.reason, fingerprint=part.fingerprint)
        case AnswerBegun():
            line = AnswerLine(prompt_tokens=part.prompt_tokens)
        case AnswerToken():
            line = AnswerLine(text=part.text, tokens=1)
        case AnswerEnded():
            line = AnswerLine(text=part.text, finish=part.finish)
        case AnswerRefused():
            return _failure(Reason.REQUEST_INVALID.number, part.reason, "change the message")
        case _:
            line = AnswerLine()
    return msgspec.json.encode(line) + b"\n"


def _failure(number: int, message: str, fix: str) -> bytes:
    line = AnswerLine(failure=FailureAnswer(number, message, fix))
    return msgspec.json.encode(line) + b"\n"


ANSWER_ENDPOINTS = (
    Endpoint(
        "POST",
        "/jobs/{job}/answer",
        answer_call,
        "Have a served model answer, for its owner.",
        body=AnswerOrder,
        result=AnswerLine,
        media_type=LINES,
    ),
)
