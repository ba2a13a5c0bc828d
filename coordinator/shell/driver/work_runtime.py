"""One job of any kind in this process: its state, its clock, and what is under way for it."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic

import structlog

from coordinator.core.work.members import AnyJob
from coordinator.shell.store.journal.records import Entry
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Milliseconds

log = structlog.get_logger()
_RECENT_ENTRIES = 512
_OBSTACLES = frozenset({Reason.DISK_FULL, Reason.STORE_UNREACHABLE})


class JobClock:
    """One job's time: the last journalled time plus what passed since this process began."""

    def __init__(self, last_at_ms: Milliseconds) -> None:
        self._offset_ms = last_at_ms - monotonic_ms()

    def now_ms(self) -> Milliseconds:
        """Job time now. Downtime counts nothing, and wall clocks may jump."""
        return Milliseconds(self._offset_ms + monotonic_ms())


class WorkRuntime(Generic[AnyJob]):
    """One job in this process."""

    obstacle = ""  # a numbered reason for which the job waits, such as a full disk
    takeover = ""
    """Sentence on how this coordinator came to drive it; empty: nobody else did."""

    def __init__(self, job: AnyJob, next_sequence: int) -> None:
        self.job = job
        """The newest state that is persisted."""
        self.next_sequence = next_sequence
        self.clock = JobClock(job.at_ms)
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.tasks: dict[tuple[str, int], asyncio.Task[object]] = {}
        """Long commands under way, by name and number; none is started twice."""
        self.failures: Counter[tuple[str, int]] = Counter()
        """Unforeseen errors of each of them, in a row."""
        self.retry_timer: asyncio.TimerHandle | None = None
        """Timer after which outstanding commands are performed again."""
        self.is_given_up = False
        """Whether this process could not do something and paused the job: a resume tries again."""
        self.is_recovering = False
        """After a restart: its files are being checked and nothing outstanding was performed yet.
        """
        self._recent: deque[Entry] = deque(maxlen=_RECENT_ENTRIES)
        self._changed = asyncio.Event()

    def now_ms(self) -> Milliseconds:
        """Job time now."""
        return self.clock.now_ms()

    def advance(self, job: AnyJob, entries: Sequence[Entry]) -> None:
        """Take over what was persisted and wake whoever watches."""
        self.job, self.obstacle = job, ""
        self.next_sequence += len(entries)
        self._recent.extend(entries)
        self.wake()

    @contextmanager
    def tell_obstacle(self) -> Iterator[None]:
        """Let the job say why it waits where what is done for it meets a lack that may pass."""
        try:
            yield
        except HyperGPUError as error:
            if error.reason in _OBSTACLES and self.obstacle != str(error):
                self.obstacle = str(error)
                log.warning("a job waits", job_id=self.job.job_id, reason=str(error))
            raise

    def wake(self) -> None:
        """Let watchers look again."""
        change, self._changed = self._changed, asyncio.Event()
        change.set()

    def change(self) -> asyncio.Event:
        """Set at the next `advance` or `wake`."""
        return self._changed

    def recent_entries(self, from_sequence: int) -> tuple[Entry, ...] | None:
        """Entries from ``from_sequence`` on; None when they are no longer in memory."""
        if from_sequence >= self.next_sequence:
            return ()
        if not self._recent or self._recent[0].sequence > from_sequence:
            return None
        return tuple(self._recent)[from_sequence - self._recent[0].sequence :]

    def close(self) -> None:
        """Drop timers and tasks."""
        for timer in filter(None, (self.deadline_timer, self.retry_timer)):
            timer.cancel()
        self.deadline_timer = self.retry_timer = None
        for task in self.tasks.values():
            task.cancel()
