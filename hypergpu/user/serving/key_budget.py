"""Tokens of an API key that answers under way have reserved."""

import asyncio
import time

from hypergpu.user.serving.api_keys import ApiKeys
from hypergpu.user.serving.openai_requests import ApiError

_KEY_LOOK_S = 0.5


class KeyBudget:
    """A key's tokens that an answer has reserved."""

    def __init__(self, keys: ApiKeys, key_id: str) -> None:
        self._keys = keys
        self._key_id = key_id
        self._reserved = 0
        self._looked_at_s = time.monotonic()

    async def reserve(self, tokens: int) -> None:
        """Count tokens as used, before they are.

        Raises:
            ApiError: So many are not left.
        """
        if not await asyncio.to_thread(self._keys.use, self._key_id, tokens):
            raise ApiError(
                "the key's budget of tokens does not hold this answer",
                fix="ask for fewer max_tokens, or with a key that has more: hypergpu key add",
                status=429,
                kind="insufficient_quota",
                code="insufficient_quota",
            )
        self._reserved = tokens

    async def check(self) -> None:
        """Look now and then whether the key is still good.

        Raises:
            ApiError: It was revoked or is over.
        """
        now_s = time.monotonic()
        if now_s - self._looked_at_s < _KEY_LOOK_S:
            return
        self._looked_at_s = now_s
        if not await asyncio.to_thread(self._keys.is_good, self._key_id):
            fix = "ask with another key: hypergpu key add"
            raise ApiError("the API key was revoked", fix=fix, status=401, code="invalid_api_key")

    async def settle(self, used: int) -> None:
        """Count what was used in place of what was reserved."""
        difference, self._reserved = used - self._reserved, used
        if difference:
            await asyncio.shield(asyncio.to_thread(self._count, difference))

    def _count(self, difference: int) -> None:
        # More than was reserved is the prompt's: it was read, whatever is left.
        if difference > 0 and not self._keys.use(self._key_id, difference):
            self._keys.exhaust(self._key_id)
        elif difference < 0:
            self._keys.use(self._key_id, difference)
