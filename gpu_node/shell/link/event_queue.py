"""The queue of a daemon's events."""

import asyncio

from gpu_node.core.events import NodeEvent


class EventQueue:
    """Every task of a daemon puts its events here."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[NodeEvent | BaseException] = asyncio.Queue()

    def put(self, event: NodeEvent) -> None:
        """Append an event."""
        self._queue.put_nowait(event)

    def check_task(self, task: "asyncio.Task[None]") -> None:
        """Pass on the error that ended a task, if any: it ends the daemon, to be started again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.put_nowait(error)

    async def next(self) -> NodeEvent:
        """The next event. Raises the error that ended a task."""
        event = await self._queue.get()
        if isinstance(event, BaseException):
            raise event
        return event
