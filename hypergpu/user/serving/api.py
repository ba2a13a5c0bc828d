"""The API: requests of OpenAI's form become calls to served models, and parts become answers.

Nothing of a request or an answer is logged or kept. An answer ends within a token once its caller
has gone away or its key was revoked.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hypergpu.errors import HyperGPUError, RemoteFailureError
from hypergpu.serving.calls import AnswerEnded, AnswerToken
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.models import ServedModelView
from hypergpu.user.serving.answering import (
    OpenRequest,
    RequestDesk,
    api_error,
    decoded_request,
    unknown_model,
)
from hypergpu.user.serving.api_keys import ApiKeys, ApiKeyView
from hypergpu.user.serving.batch_api import BatchApi
from hypergpu.user.serving.batch_runner import BatchRunner
from hypergpu.user.serving.batch_store import BatchStore
from hypergpu.user.serving.bodies import json_answer, read_body
from hypergpu.user.serving.call_rates import CallRates
from hypergpu.user.serving.embeddings import EmbeddingDesk, EmbeddingRequest
from hypergpu.user.serving.open_answers import begin_answers, finish_answers, merged_parts
from hypergpu.user.serving.openai_answers import (
    AnswerForm,
    ChoiceText,
    first_piece,
    piece,
    usage_piece,
    whole_answer,
)
from hypergpu.user.serving.openai_requests import ApiError, ChatRequest, CompletionRequest

_BEARER = "bearer "
_GONE = 499
"""Nobody reads it: the caller has gone away."""


class OpenAiApi:
    """The API's answers.

    Args:
        coordinator: An open connection, as the user whose models are called.
        keys: Who may call.
        store: Batches and their files.
    """

    def __init__(self, coordinator: AsyncCoordinator, keys: ApiKeys, store: BatchStore) -> None:
        self._coordinator = coordinator
        self._keys = keys
        self._desk = RequestDesk(coordinator, keys)
        self._embeddings = EmbeddingDesk(coordinator, keys)
        self._rates = CallRates()
        self._batches = BatchApi(store)
        self._runner = BatchRunner(store, keys, self._desk)

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/models", self._guard(self._list_models)),
            Route("/v1/models/{model:path}", self._guard(self._show_model)),
            Route("/v1/chat/completions", self._guard(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guard(self._complete), methods=["POST"]),
            Route("/v1/embeddings", self._guard(self._embed), methods=["POST"]),
            *self._batch_routes(),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={404: _say_unknown, 405: _say_unknown},
            lifespan=self._answer_batches,
        )

    def _batch_routes(self) -> list[Route]:
        batches = self._batches
        acts = (
            ("/v1/files", "POST", batches.send_file),
            ("/v1/files", "GET", batches.list_files),
            ("/v1/files/{file}", "GET", batches.show_file),
            ("/v1/files/{file}", "DELETE", batches.delete_file),
            ("/v1/files/{file}/content", "GET", batches.read_file),
            ("/v1/batches", "POST", batches.create),
            ("/v1/batches", "GET", batches.list_batches),
            ("/v1/batches/{batch}", "GET", batches.show),
            ("/v1/batches/{batch}/cancel", "POST", batches.cancel),
        )
        return [Route(path, self._guard(act), methods=[method]) for path, method, act in acts]

    @asynccontextmanager
    async def _answer_batches(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._runner.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _guard(
        self, act: Callable[[Request, ApiKeyView], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                return await act(request, await self._key_of(request))
            except ClientDisconnect:
                return Response(status_code=_GONE)
            except ApiError as refusal:
                return json_answer(refusal.body(), refusal.status, refusal.headers)
            except (HyperGPUError, RemoteFailureError) as failure:
                error = api_error(failure)
                return json_answer(error.body(), error.status, error.headers)

        return serve

    async def _key_of(self, request: Request) -> ApiKeyView:
        address = request.client.host if request.client is not None else ""
        self._rates.admit_address(address)
        header = request.headers.get("authorization", "")
        text = header[len(_BEARER) :] if header.lower().startswith(_BEARER) else ""
        key = await asyncio.to_thread(self._keys.check, text.strip()) if text else None
        if key is None:
            self._rates.count_guess(address)
            raise ApiError(
                "the API key is missing, unknown, revoked or over. Fix: send"
                " 'Authorization: Bearer KEY' with a key of `hypergpu key add`",
                status=401,
                code="invalid_api_key",
            )
        self._rates.admit_key(key)
        return key

    async def _list_models(self, _: Request, key: ApiKeyView) -> Response:
        models = [each for each in await self._coordinator.models() if key.may_call(each.model)]
        return json_answer({"object": "list", "data": [_model_body(each) for each in models]})

    async def _show_model(self, request: Request, key: ApiKeyView) -> Response:
        name = request.path_params["model"]
        models = await self._coordinator.models()
        matches = [each for each in models if each.model == name and key.may_call(name)]
        if not matches:
            raise unknown_model(name)
        return json_answer(_model_body(matches[-1]))

    async def _chat(self, request: Request, key: ApiKeyView) -> Response:
        chat = decoded_request(await read_body(request), ChatRequest)
        form = AnswerForm.begin(f"chatcmpl-{secrets.token_hex(12)}", chat.model, is_chat=True)
        return await self._answer(request, key, form, chat)

    async def _complete(self, request: Request, key: ApiKeyView) -> Response:
        completion = decoded_request(await read_body(request), CompletionRequest)
        form = AnswerForm.begin(f"cmpl-{secrets.token_hex(12)}", completion.model, is_chat=False)
        return await self._answer(request, key, form, completion)

    async def _embed(self, request: Request, key: ApiKeyView) -> Response:
        wanted_vectors = decoded_request(await read_body(request), EmbeddingRequest)
        return json_answer(await self._embeddings.answer(key, wanted_vectors))

    async def _answer(
        self,
        request: Request,
        key: ApiKeyView,
        form: AnswerForm,
        asked: ChatRequest | CompletionRequest,
    ) -> Response:
        open_request = await self._desk.open(key, form, asked)
        try:
            # Until its first part a call may be refused as a whole, with a status of its own.
            await begin_answers(open_request.answers, request)
            headers = _route_headers(open_request.choices[0])
            if asked.has_stream:
                return AnswerStream(open_request, headers, includes_usage=asked.includes_usage)
            await finish_answers(open_request.answers, request, open_request.budget)
        except BaseException:
            await open_request.close()
            raise
        await open_request.close()
        return json_answer(whole_answer(form, open_request.choices), headers=headers)


class AnswerStream(StreamingResponse):
    """An answer in pieces. It is closed whether or not anybody read any of it."""

    def __init__(
        self, open_request: OpenRequest, headers: dict[str, str], *, includes_usage: bool
    ) -> None:
        self._opened = open_request
        pieces = _pieces(open_request, includes_usage=includes_usage)
        super().__init__(pieces, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `StreamingResponse`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._opened.close()


async def _pieces(open_request: OpenRequest, *, includes_usage: bool) -> AsyncIterator[bytes]:
    try:
        async for body in _piece_bodies(open_request):
            yield _event(body)
        if includes_usage:
            yield _event(usage_piece(open_request.form, open_request.choices))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body())
    except (HyperGPUError, RemoteFailureError) as failure:
        yield _event(api_error(failure).body())


async def _piece_bodies(open_request: OpenRequest) -> AsyncIterator[dict[str, Any]]:
    form = open_request.form
    for choice in open_request.choices:
        if (begin := first_piece(form, choice)) is not None:
            yield begin
    async for choice, text, part in merged_parts(open_request.answers):
        await open_request.budget.check()
        if isinstance(part, AnswerEnded) or (isinstance(part, AnswerToken) and _tells(text, part)):
            yield piece(form, choice, text, part)


def _tells(text: str, token: AnswerToken) -> bool:
    """Whether a token is told by itself: what is held back comes with a later one."""
    return bool(text) or token.log_probability is not None


async def _say_unknown(request: Request, _: Exception) -> Response:
    detail = f"there is no {request.method} {request.url.path[:100]}"
    error = ApiError(detail, fix="docs/serve.md lists the calls", status=404)
    return json_answer(error.body(), 404)


def _model_body(model: ServedModelView) -> dict[str, Any]:
    return {"id": model.model, "object": "model", "created": 0, "owned_by": "hypergpu"}


def _route_headers(choice: ChoiceText) -> dict[str, str]:
    if not choice.routes:
        return {}
    route = choice.routes[0]
    return {"x-hypergpu-node": route.node, "x-hypergpu-route": route.reason}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
