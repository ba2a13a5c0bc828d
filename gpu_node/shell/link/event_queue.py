"""The machine's inbox: events in order of arrival, and the end of whatever ended by mistake."""

import asyncio

from gpu_node.core.events import Event


class EventQueue:
    """Where every task of a daemon leaves what happened."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    def event(self, event: Event) -> None:
        """Something happened."""
        self._inbox.put_nowait(event)

    def inspect(self, task: "asyncio.Task[None]") -> None:
        """A task ended. An error nobody foresaw ends the daemon: a supervisor starts it again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)

    async def next(self) -> Event:
        """The next event. Raises what a task ended by."""
        found = await self._inbox.get()
        if isinstance(found, BaseException):
            raise found
        return found
