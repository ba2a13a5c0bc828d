"""Further connections to the coordinator: bulk bytes may go over several at once.

Losses hold back each TCP connection by itself, so several carry more over a line that loses.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gpu_node.shell.link.calls import Calls

IDLE_S = 120.0
"""Unused for so long, further connections are closed: a round is seldom further from the next."""


class BulkConnections:
    """Channels besides the control stream's, a connection each, kept for a while."""

    def __init__(self, open_calls: Callable[[], Calls]) -> None:
        self._open_calls = open_calls
        self._further: list[Calls] = []
        self._users = 0
        self._end: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Number of connections besides the first."""
        return len(self._further)

    @asynccontextmanager
    async def open(self, calls: Calls, connections: int) -> AsyncIterator[Calls]:
        """The calls, with further connections for bulk up to ``connections`` in all.

        Raises:
            HyperGPUError: As `Access.calls`.
        """
        self._users += 1
        if self._end is not None:
            self._end.cancel()
        try:
            while len(self._further) < connections - 1:
                self._further.append(self._open_calls())
            yield calls.with_further(tuple(self._further[: connections - 1]))
        finally:
            self._users -= 1
            if self._further and not self._users:
                self._end = asyncio.get_running_loop().call_later(IDLE_S, self._close_further)

    async def close(self) -> None:
        """Close all of them; transfers over them break."""
        self._close_further()
        # Shielded: a cancelled caller leaves none of them open.
        await asyncio.shield(asyncio.gather(*self._closing))

    def _close_further(self) -> None:
        """Close in the background; nobody is given these connections any more."""
        if self._end is not None:
            self._end.cancel()
        further, self._further = self._further, []
        for calls in further:
            task = asyncio.get_running_loop().create_task(calls.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
