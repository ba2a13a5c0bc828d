"""What waits to be written to a stream: signs of life go before all that may be large."""

import asyncio
import itertools
from typing import Generic, TypeVar

_Message = TypeVar("_Message")


class MessageOutbox(Generic[_Message]):
    """Messages in order, but those that go first."""

    def __init__(self) -> None:
        self._queue: asyncio.PriorityQueue[tuple[int, int, _Message | None]] = (
            asyncio.PriorityQueue()
        )
        self._numbers = itertools.count()

    def put(self, message: _Message, *, goes_first: bool = False) -> None:
        """Add a message: behind the others, or before all that do not go first."""
        self._put(0 if goes_first else 1, message)

    def end(self) -> None:
        """Have the stream end after all that is there."""
        self._put(2, None)

    def _put(self, rank: int, message: _Message | None) -> None:
        self._queue.put_nowait((rank, next(self._numbers), message))

    async def get(self) -> _Message | None:
        """The next message; None: the stream is to end."""
        return (await self._queue.get())[-1]

    def get_nowait(self) -> _Message | None:
        """The same of what is there.

        Raises:
            asyncio.QueueEmpty: Nothing is.
        """
        return self._queue.get_nowait()[-1]

    @property
    def messages(self) -> int:
        """Messages that wait."""
        return self._queue.qsize()
