"""More connections to the coordinator than one: bulk bytes may go over several at once.

Losses hold back each TCP connection by itself, so several carry more over a line that loses.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gpu_node.shell.link.calls import Calls

IDLE_S = 120.0
"""Unused for so long, further connections are closed: a round is seldom further from the next."""


class Lines:
    """Channels beside the control stream's, a connection each: opened when asked for, kept warm."""

    def __init__(self, opened: Callable[[], Calls]) -> None:
        self._opened = opened
        self._further: list[Calls] = []
        self._users = 0
        self._end: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """How many there are beside the first one."""
        return len(self._further)

    @asynccontextmanager
    async def over(self, calls: Calls, connections: int) -> AsyncIterator[Calls]:
        """The same calls, with as many further connections for bulk as make ``connections``.

        Raises:
            HyperGPUError: As `Access.calls`.
        """
        self._users += 1
        if self._end is not None:
            self._end.cancel()
        try:
            while len(self._further) < connections - 1:
                self._further.append(self._opened())
            yield calls.beside(tuple(self._further[: connections - 1]))
        finally:
            self._users -= 1
            if self._further and not self._users:
                self._end = asyncio.get_running_loop().call_later(IDLE_S, self._let_go)

    async def close(self) -> None:
        """Close them; what goes over them breaks."""
        self._let_go()
        # Shielded: who is cancelled meanwhile leaves none of them open.
        await asyncio.shield(asyncio.gather(*self._closing))

    def _let_go(self) -> None:
        """From here on nobody is given them, though closing takes its time."""
        if self._end is not None:
            self._end.cancel()
        further, self._further = self._further, []
        for calls in further:
            task = asyncio.get_running_loop().create_task(calls.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
