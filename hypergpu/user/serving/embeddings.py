"""Requests for vectors, as OpenAI's API has them."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from hypergpu.serving.calls import ModelCall
from hypergpu.serving.text_vectors import TextVector, VectorReader, vector_call
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.serving.answering import unknown_model
from hypergpu.user.serving.api_keys import ApiKeys, ApiKeyView
from hypergpu.user.serving.key_budget import KeyBudget
from hypergpu.user.serving.open_answers import refused_call
from hypergpu.user.serving.openai_requests import ApiError

INPUTS_MOST = 2_048
"""Texts of a request, as of OpenAI's API."""
_TEXTS_AT_ONCE = 16
_RESERVED_TOKENS = 64
"""Counted as used for a text that is under way."""


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts whose vectors are asked for."""

    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def calls(self) -> list[ModelCall]:
        """A call for each text.

        Raises:
            ApiError: A field is not right.
        """
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not 0 < len(texts) <= INPUTS_MOST:
            rule = f"input must be 1 to {INPUTS_MOST} texts"
            raise ApiError(rule, fix="divide it into several requests", param="input")
        if not all(isinstance(text, str) and text for text in texts):
            rule = "input must be texts that are not empty: no tokens"
            raise ApiError(rule, fix="send texts", param="input")
        if self.dimensions is not None:
            rule = "dimensions must be left out: vectors are as long as the model makes them"
            raise ApiError(rule, fix="leave dimensions out", param="dimensions")
        return [vector_call(text) for text in texts]


class EmbeddingDesk:
    """Answers requests for vectors.

    Args:
        coordinator: An open connection, as the user whose models are called.
        keys: Who may call, and how much.
    """

    def __init__(self, coordinator: AsyncCoordinator, keys: ApiKeys) -> None:
        self._coordinator = coordinator
        self._keys = keys

    async def answer(self, key: ApiKeyView, request: EmbeddingRequest) -> dict[str, Any]:
        """The whole answer.

        Raises:
            ApiError: A field is not right, the model is not the key's, too few tokens are left, or
                a text is refused.
            HyperGPUError: No replica was free in time, or the model gave no vector.
        """
        if not key.may_call(request.model):
            raise unknown_model(request.model)
        calls = [replace(call, priority=key.priority) for call in request.calls()]
        budget = KeyBudget(self._keys, key.id)
        await budget.reserve(_RESERVED_TOKENS * len(calls))
        vectors: dict[int, TextVector] = {}
        places = asyncio.Semaphore(_TEXTS_AT_ONCE)

        async def ask(number: int, call: ModelCall) -> None:
            async with places:
                vectors[number] = await self._vector(request.model, call)
            await budget.check()

        tasks = [asyncio.ensure_future(ask(*each)) for each in enumerate(calls)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await budget.settle(sum(vector.tokens for vector in vectors.values()))
        return whole_embeddings(request, [vectors[number] for number in range(len(calls))])

    async def _vector(self, model: str, call: ModelCall) -> TextVector:
        reader = VectorReader()
        async for part in self._coordinator.answer(model, call):
            reader.note(part)
        if (refusal := reader.refusal) is not None:
            raise refused_call(refusal, param="input")
        return reader.vector()


def whole_embeddings(request: EmbeddingRequest, vectors: Sequence[TextVector]) -> dict[str, Any]:
    """An answer as OpenAI's API has it."""
    tokens = sum(vector.tokens for vector in vectors)
    return {
        "object": "list",
        "model": request.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _form(request, vector)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _form(request: EmbeddingRequest, vector: TextVector) -> str | list[float]:
    if request.encoding_format == "base64":
        return base64.b64encode(vector.numbers).decode()
    numbers: list[float] = np.frombuffer(vector.numbers, "<f4").tolist()
    return numbers
