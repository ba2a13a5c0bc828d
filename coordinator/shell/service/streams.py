"""How a stream begins and ends: a refusal that gets through, answers that end with their token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from google.protobuf.message import Message

_FIRST_MESSAGE_S = 1.0


async def let_begin(raw: Any, context: Any) -> None:
    """Take the first message of a client that streams before its call is refused.

    To a client that is still sending it the call would end with an error of gRPC's own.
    """
    if not isinstance(raw, bytes):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_MESSAGE_S):
                await context.read()


class TokenHolder(Protocol):
    """A caller whose token may be revoked while it listens: `calls.Caller`."""

    recheck: Callable[[], None]
    watch_token: Callable[[Callable[[], None]], Callable[[], None]]


class CurrentAnswers:
    """A stream's answers, while the caller's token is good: an idle stream ends with its token."""

    def __init__(self, answers: AsyncIterator[Message], caller: TokenHolder) -> None:
        self._answers = answers
        self._caller = caller
        self._waiting: asyncio.Timeout | None = None
        self._loop = asyncio.get_running_loop()
        self.close = caller.watch_token(self._end)

    def __aiter__(self) -> "CurrentAnswers":
        return self

    async def __anext__(self) -> Message:
        """The next answer.

        Raises:
            HyperGPUError: The token was revoked or has expired.
        """
        try:
            async with asyncio.timeout(None) as self._waiting:
                self._caller.recheck()
                answer = await anext(self._answers)
        except TimeoutError:
            self._caller.recheck()
            raise
        finally:
            self._waiting = None
        self._caller.recheck()
        return answer

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._end_waiting)

    def _end_waiting(self) -> None:
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(self._loop.time())
