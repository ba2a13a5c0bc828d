"""Sends what work gives within the owner's upload limit, which updates obey too."""

import asyncio
from collections import deque
from collections.abc import Callable

from hypergpu.v1 import node_pb2
from hypergpu.wire.bulk import RateLimit


class PacedSending:
    """Sends messages in order, each once the limit lets it; at once where there is none.

    Args:
        send: Sends a message.
        rate: The limit.
    """

    def __init__(self, send: Callable[[node_pb2.ControlRequest], None], rate: RateLimit) -> None:
        self._send = send
        self._rate = rate
        self._waiting: deque[node_pb2.ControlRequest] = deque()
        self._task: asyncio.Task[None] | None = None

    def send(self, message: node_pb2.ControlRequest) -> None:
        """Send a message, or have it wait."""
        if not self._rate.is_set:
            self._send(message)
            return
        self._waiting.append(message)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_waiting(), name="paced outputs")

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    async def close(self) -> None:
        """Send nothing any more."""
        self.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_waiting(self) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            await self._rate.take(message.ByteSize())
            self._send(message)
