"""Requests of OpenAI's form become calls to served models, within what their key may use."""

import asyncio
import math
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.serving.api_keys import ApiKeys, ApiKeyView
from hypergpu.user.serving.key_budget import KeyBudget
from hypergpu.user.serving.open_answers import OpenAnswer, merged_parts, tokens_used
from hypergpu.user.serving.openai_answers import AnswerForm, ChoiceText, whole_answer
from hypergpu.user.serving.openai_requests import ApiError, ChatRequest, CompletionRequest

_RESERVED_TOKENS = 256
"""Counted as used while an answer that states no limit is under way."""
UNREACHABLE = "coordinator_unreachable"
"""Code of an error that ends once the coordinator is back."""
_AnyForm = TypeVar("_AnyForm")
_STATUS = {
    Reason.JOB_UNKNOWN: (404, "invalid_request_error", "model_not_found"),
    Reason.REQUEST_INVALID: (400, "invalid_request_error", None),
    Reason.ARGUMENT_INVALID: (400, "invalid_request_error", None),
    Reason.LIMIT_REACHED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Reason.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Reason.NOT_READY: (503, "server_error", "model_not_ready"),
    Reason.JOB_PHASE: (503, "server_error", "model_not_ready"),
    Reason.COORDINATOR_UNREACHABLE: (503, "server_error", UNREACHABLE),
}


_WAIT_S = {Reason.NOT_READY: 5, Reason.COORDINATOR_UNREACHABLE: 5, Reason.RATE_LIMITED: 1}
"""Seconds after which callers are told to ask again, where the coordinator tells no time."""


class OpenRequest(NamedTuple):
    """A request that is being answered: all of its choices, and what its key has reserved."""

    form: AnswerForm
    answers: list[OpenAnswer]
    budget: KeyBudget

    @property
    def choices(self) -> list[ChoiceText]:
        """The choices as they are now."""
        return [answer.choice for answer in self.answers]

    async def close(self) -> None:
        """Read no further, and count what was used in place of what was reserved."""
        try:
            for answer in self.answers:
                await answer.close()
        finally:
            await self.budget.settle(tokens_used(self.choices))


class RequestDesk:
    """Opens requests.

    Args:
        coordinator: An open connection, as the user whose models are called.
        keys: Who may call, and how much.
    """

    def __init__(self, coordinator: AsyncCoordinator, keys: ApiKeys) -> None:
        self._coordinator = coordinator
        self._keys = keys

    async def open(
        self, key: ApiKeyView, form: AnswerForm, asked: ChatRequest | CompletionRequest
    ) -> OpenRequest:
        """Open the calls of a request; whoever opens it closes it.

        Raises:
            ApiError: A field is not right, the model is not the key's, or too few tokens are left.
            HyperGPUError: REQUEST_INVALID, a call is beyond its limits.
        """
        if not key.may_call(form.model):
            raise unknown_model(form.model)
        calls = [
            replace(call, priority=key.priority, prefix_scope=str(key.id)) for call in asked.calls()
        ]
        for call in calls:
            call.check()
        budget = KeyBudget(self._keys, key.id)
        await budget.reserve(sum(call.new_tokens_most or _RESERVED_TOKENS for call in calls))
        answers = [
            OpenAnswer(
                ChoiceText(index, index // asked.choices),
                self._coordinator.answer(form.model, call),
            )
            for index, call in enumerate(calls)
        ]
        return OpenRequest(form, answers, budget)

    async def answer(
        self, key: ApiKeyView, form: AnswerForm, asked: ChatRequest | CompletionRequest
    ) -> dict[str, Any]:
        """The whole answer to a request that nobody waits for.

        Raises:
            ApiError: As `open`, or it broke off.
            HyperGPUError: No replica was free in time, or as `open`.
            RemoteFailureError: The coordinator cannot be reached.
        """
        request = await self.open(key, form, asked)
        try:
            await asyncio.gather(*(answer.begin() for answer in request.answers))
            async for _ in merged_parts(request.answers):
                await request.budget.check()
        finally:
            await request.close()
        return whole_answer(form, request.choices)


def decoded_request(content: bytes, form: type[_AnyForm]) -> _AnyForm:
    """A request's body.

    Raises:
        ApiError: It is no JSON, or not of this form.
    """
    try:
        return msgspec.json.decode(content, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        fix = "send JSON of the form that docs/serve.md names"
        raise ApiError(f"the request is not right: {error}", fix=fix) from error


def api_error(failure: HyperGPUError | RemoteFailureError) -> ApiError:
    """A numbered error as OpenAI's API has errors."""
    text = str(failure)
    if isinstance(failure, RemoteFailureError):
        return ApiError(text, status=500, kind="server_error")
    status, kind, code = _STATUS.get(failure.reason, (500, "server_error", None))
    wait_s = math.ceil(failure.wait_ms / 1000) or _WAIT_S.get(failure.reason, 0)
    return ApiError(text, status=status, kind=kind, code=code).after(wait_s)


def unknown_model(name: str) -> ApiError:
    """The refusal of a model that a key may not call, or that is not there."""
    return ApiError(
        f"the model {name[:100]!r} is not served to this key. Fix: GET /v1/models names those"
        " that are",
        status=404,
        param="model",
        code="model_not_found",
    )
