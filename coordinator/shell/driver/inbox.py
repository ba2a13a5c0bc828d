"""The one inbox of a driver: events of all jobs in the order in which they came."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.store.journal.records import RequestClaim
from hypergpu.ids import JobId


class SubmittedEvent(NamedTuple):
    """An event in the inbox."""

    job_id: JobId
    event: StampedEvent
    verdict: "asyncio.Future[str]"
    claim: RequestClaim | None = None


class Inbox:
    """Takes events in at any time, and gives them out drain by drain."""

    def __init__(self) -> None:
        self._events: list[SubmittedEvent] = []
        self._has_events = asyncio.Event()
        self._is_closed = False

    def put(
        self, job_id: JobId, event: StampedEvent, claim: RequestClaim | None = None
    ) -> "asyncio.Future[str]":
        """Take an event in. Returns its verdict, once it is drained."""
        verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._events.append(SubmittedEvent(job_id, event, verdict, claim))
        self._has_events.set()
        return verdict

    async def drains(self) -> AsyncIterator[list[SubmittedEvent]]:
        """Yield the events that have come since the drain before, until the inbox is closed and
        empty.
        """
        while True:
            await self._has_events.wait()
            self._has_events.clear()
            events, self._events = self._events, []
            if events:
                yield events
            # What arrived during a drain has raised the signal again.
            if self._is_closed and not self._events:
                return

    def close(self) -> None:
        """End `drains` once everything is drained."""
        self._is_closed = True
        self._has_events.set()
