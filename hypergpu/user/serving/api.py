"""The API: requests of OpenAI's form become calls to served models, and parts become answers.

Nothing of a request or an answer is logged or kept. An answer ends within a token once its caller
has gone away or its key was revoked.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.serving.calls import (
    CALL_BYTES_MOST,
    AnswerEnded,
    AnswerToken,
    ModelCall,
)
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.models import ServedModelView
from hypergpu.user.serving.api_keys import ApiKeys, ApiKeyView
from hypergpu.user.serving.key_budget import KeyBudget
from hypergpu.user.serving.open_answers import (
    OpenAnswer,
    begin_answers,
    finish_answers,
    merged_parts,
    tokens_used,
)
from hypergpu.user.serving.openai_answers import (
    AnswerForm,
    ChoiceText,
    first_piece,
    piece,
    usage_piece,
    whole_answer,
)
from hypergpu.user.serving.openai_requests import ApiError, ChatRequest, CompletionRequest

_REQUEST_BYTES_MOST = CALL_BYTES_MOST
_RESERVED_TOKENS = 256
"""Counted as used while an answer that states no limit is under way."""
_BEARER = "bearer "
_GONE = 499
"""Nobody reads it: the caller has gone away."""
_AnyRequest = TypeVar("_AnyRequest", ChatRequest, CompletionRequest)
_STATUS = {
    Reason.JOB_UNKNOWN: (404, "invalid_request_error", "model_not_found"),
    Reason.REQUEST_INVALID: (400, "invalid_request_error", None),
    Reason.ARGUMENT_INVALID: (400, "invalid_request_error", None),
    Reason.LIMIT_REACHED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Reason.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Reason.NOT_READY: (503, "server_error", "model_not_ready"),
    Reason.JOB_PHASE: (503, "server_error", "model_not_ready"),
}


class OpenAiApi:
    """The API's answers.

    Args:
        coordinator: An open connection, as the user whose models are called.
        keys: Who may call.
    """

    def __init__(self, coordinator: AsyncCoordinator, keys: ApiKeys) -> None:
        self._coordinator = coordinator
        self._keys = keys

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/models", self._guard(self._list_models)),
            Route("/v1/models/{model:path}", self._guard(self._show_model)),
            Route("/v1/chat/completions", self._guard(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guard(self._complete), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={404: _say_unknown, 405: _say_unknown})

    def _guard(
        self, act: Callable[[Request, ApiKeyView], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                return await act(request, await self._key_of(request))
            except ClientDisconnect:
                return Response(status_code=_GONE)
            except ApiError as refusal:
                return _json(refusal.body(), refusal.status)
            except (HyperGPUError, RemoteFailureError) as failure:
                error = api_error(failure)
                return _json(error.body(), error.status)

        return serve

    async def _key_of(self, request: Request) -> ApiKeyView:
        header = request.headers.get("authorization", "")
        text = header[len(_BEARER) :] if header.lower().startswith(_BEARER) else ""
        key = await asyncio.to_thread(self._keys.check, text.strip()) if text else None
        if key is None:
            raise ApiError(
                "the API key is missing, unknown, revoked or over. Fix: send"
                " 'Authorization: Bearer KEY' with a key of `hypergpu key add`",
                status=401,
                code="invalid_api_key",
            )
        return key

    async def _list_models(self, _: Request, key: ApiKeyView) -> Response:
        models = [each for each in await self._coordinator.models() if key.may_call(each.model)]
        return _json({"object": "list", "data": [_model_body(each) for each in models]})

    async def _show_model(self, request: Request, key: ApiKeyView) -> Response:
        name = request.path_params["model"]
        models = await self._coordinator.models()
        matches = [each for each in models if each.model == name and key.may_call(name)]
        if not matches:
            raise _unknown_model(name)
        return _json(_model_body(matches[-1]))

    async def _chat(self, request: Request, key: ApiKeyView) -> Response:
        chat = await _body(request, ChatRequest)
        form = AnswerForm.begin(f"chatcmpl-{secrets.token_hex(12)}", chat.model, is_chat=True)
        return await self._answer(request, key, form, chat)

    async def _complete(self, request: Request, key: ApiKeyView) -> Response:
        completion = await _body(request, CompletionRequest)
        form = AnswerForm.begin(f"cmpl-{secrets.token_hex(12)}", completion.model, is_chat=False)
        return await self._answer(request, key, form, completion)

    async def _answer(
        self,
        request: Request,
        key: ApiKeyView,
        form: AnswerForm,
        asked: ChatRequest | CompletionRequest,
    ) -> Response:
        if not key.may_call(form.model):
            raise _unknown_model(form.model)
        calls = _check_calls(asked.calls())
        budget = KeyBudget(self._keys, key.id)
        await budget.reserve(sum(call.new_tokens_most or _RESERVED_TOKENS for call in calls))
        answers = [
            OpenAnswer(
                ChoiceText(index, index // asked.choices),
                self._coordinator.answer(form.model, call),
            )
            for index, call in enumerate(calls)
        ]
        try:
            # Until its first part a call may be refused as a whole, with a status of its own.
            await begin_answers(answers, request)
        except BaseException:
            await budget.settle(0)
            raise
        headers = _route_headers(answers[0].choice)
        if asked.has_stream:
            pieces = self._pieces(form, answers, budget, includes_usage=asked.includes_usage)
            return StreamingResponse(pieces, media_type="text/event-stream", headers=headers)
        try:
            await finish_answers(answers, request, budget)
        finally:
            await budget.settle(tokens_used([answer.choice for answer in answers]))
        return _json(whole_answer(form, [answer.choice for answer in answers]), headers=headers)

    async def _pieces(
        self,
        form: AnswerForm,
        answers: Sequence[OpenAnswer],
        budget: KeyBudget,
        *,
        includes_usage: bool,
    ) -> AsyncIterator[bytes]:
        choices = [answer.choice for answer in answers]
        try:
            async for body in _piece_bodies(form, answers, budget):
                yield _event(body)
            if includes_usage:
                yield _event(usage_piece(form, choices))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())
        except (HyperGPUError, RemoteFailureError) as failure:
            yield _event(api_error(failure).body())
        finally:
            for answer in answers:
                await answer.close()
            await budget.settle(tokens_used(choices))


async def _piece_bodies(
    form: AnswerForm, answers: Sequence[OpenAnswer], budget: KeyBudget
) -> AsyncIterator[dict[str, Any]]:
    for answer in answers:
        if (begin := first_piece(form, answer.choice)) is not None:
            yield begin
    async for choice, text, part in merged_parts(answers):
        await budget.check()
        if isinstance(part, AnswerEnded) or (isinstance(part, AnswerToken) and _tells(text, part)):
            yield piece(form, choice, text, part)


def _tells(text: str, token: AnswerToken) -> bool:
    """Whether a token is told by itself: what is held back comes with a later one."""
    return bool(text) or token.log_probability is not None


def _check_calls(calls: list[ModelCall]) -> list[ModelCall]:
    for call in calls:
        call.check()
    return calls


async def _body(request: Request, form: type[_AnyRequest]) -> _AnyRequest:
    """The request's body; it is not read beyond its limit.

    Raises:
        ApiError: It is too large, no JSON, or not of this form.
    """
    content = bytearray()
    async for piece_bytes in request.stream():
        content += piece_bytes
        if len(content) > _REQUEST_BYTES_MOST:
            raise ApiError(f"the request has more than {_REQUEST_BYTES_MOST:,} bytes", status=413)
    try:
        return msgspec.json.decode(content, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ApiError(f"the request is not right: {error}") from error


def api_error(failure: HyperGPUError | RemoteFailureError) -> ApiError:
    """A numbered error as OpenAI's API has errors."""
    text = str(failure)
    if isinstance(failure, RemoteFailureError):
        return ApiError(text, status=500, kind="server_error")
    status, kind, code = _STATUS.get(failure.reason, (500, "server_error", None))
    return ApiError(text, status=status, kind=kind, code=code)


def _unknown_model(name: str) -> ApiError:
    return ApiError(
        f"the model {name[:100]!r} is not served to this key. Fix: GET /v1/models names those"
        " that are",
        status=404,
        param="model",
        code="model_not_found",
    )


async def _say_unknown(request: Request, _: Exception) -> Response:
    error = ApiError(f"there is no {request.method} {request.url.path}", status=404)
    return _json(error.body(), 404)


def _model_body(model: ServedModelView) -> dict[str, Any]:
    return {"id": model.model, "object": "model", "created": 0, "owned_by": "hypergpu"}


def _route_headers(choice: ChoiceText) -> dict[str, str]:
    if not choice.routes:
        return {}
    route = choice.routes[0]
    return {"x-hypergpu-node": route.node, "x-hypergpu-route": route.reason}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _json(
    body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    content = msgspec.json.encode(body)
    return Response(content, status, media_type="application/json", headers=headers)
