"""What the training of a job does beside answering its stages; an error pauses the job, once."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import structlog

from coordinator.core.work.work_events import JobPaused, StampedEvent
from hypergpu.units import Milliseconds

_NOW = Milliseconds(0)  # stamped by the driver
log = structlog.get_logger(__name__)


class TrainerTasks:
    """Tasks of one training.

    Args:
        report: Has an event decided on and journalled; gives why it was rejected, or nothing.
    """

    def __init__(self, report: Callable[[StampedEvent], Awaitable[str]]) -> None:
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_broken = False

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Begin something, and return at once."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        # A stage that is lost cancels what was asked of it.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a training through a ring cannot go on", reason=str(error))
            if not self._is_broken:
                self._is_broken = True
                self.start(self.pause(f"the coordinator could not go on with it: {error}"))

    async def pause(self, reason: str) -> None:
        """Pause the job."""
        await self._report(JobPaused(at_ms=_NOW, reason=reason))
