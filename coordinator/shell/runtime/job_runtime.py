"""Volatile state of one job: all of it may be lost at a crash."""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence

from coordinator.core.job.state import Job, WorkState
from coordinator.shell.journal.records import Entry
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.process.clock import monotonic_ms
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds
from hypergpu.workloads.registry import UnknownWorkloadError, find

_RECENT_ENTRIES = 512


class JobClock:
    """One job's time: the last journalled time plus what passed since this process began."""

    def __init__(self, last_at_ms: Milliseconds) -> None:
        self._offset_ms = last_at_ms - monotonic_ms()

    def now_ms(self) -> Milliseconds:
        """Job time now. Downtime counts nothing, and wall clocks may jump."""
        return Milliseconds(self._offset_ms + monotonic_ms())


class JobRuntime:
    """One job in this process."""

    def __init__(self, job: Job, next_sequence: int) -> None:
        self.job = job
        """The newest state that is persisted."""
        self.next_sequence = next_sequence
        self.clock = JobClock(job.at_ms)
        self.workload_version = _workload_version(job)
        """0 when the catalogue no longer has the workload: then no node fits it."""
        self.layout: Layout | None = None
        """The model's layout; None until the first model is made."""
        self.entries_of_manifest = frozenset[Digest]() if job.manifest is None else None
        """The user's files that the job trains on; None until its manifest is read."""
        self.bytes_down = Bytes(0)
        """Model bytes served since the last aggregate."""
        self.progress_version = 0
        """Raised whenever a participant says how far it is."""
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.tasks: dict[tuple[str, int], asyncio.Task[object]] = {}
        """Long commands under way, by kind and round; none is started twice."""
        self.failures: Counter[tuple[str, int]] = Counter()
        """Unforeseen errors of each of them, in a row."""
        self.retry_timer: asyncio.TimerHandle | None = None
        """Timer after which outstanding commands are performed again."""
        self.is_given_up = False
        """Whether this process could not do something and paused the job: a resume tries again."""
        self.is_recovering = False
        """After a restart: its model is being checked and nothing outstanding was performed yet."""
        self._recent: deque[Entry] = deque(maxlen=_RECENT_ENTRIES)
        self._changed = asyncio.Event()
        self.settings_lock = asyncio.Lock()
        """Held while new settings are made out of the present ones and written."""

    @property
    def required_layout(self) -> Layout:
        """The model's layout, for commands that come only once it is known."""
        if self.layout is None:
            raise AssertionError("the model's layout is not known yet")
        return self.layout

    def now_ms(self) -> Milliseconds:
        """Job time now."""
        return self.clock.now_ms()

    def advance(self, job: Job, entries: Sequence[Entry]) -> None:
        """Take over what was persisted and wake whoever watches."""
        self.job = job
        self.next_sequence += len(entries)
        self._recent.extend(entries)
        self.wake()

    def open_uploads(self) -> list[str]:
        """Uploads that participants may make now, as the quarantine names them."""
        participants = self.job.round.participants if self.job.round else {}
        return [
            upload_owner(self.job.job_id, node)
            for node, participant in participants.items()
            if participant.work is WorkState.PENDING
        ]

    def wake(self) -> None:
        """Let watchers look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

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
        for timer in (self.deadline_timer, self.retry_timer):
            if timer is not None:
                timer.cancel()
        self.deadline_timer = self.retry_timer = None
        for task in self.tasks.values():
            task.cancel()


def upload_owner(job_id: JobId, node: NodeId) -> str:
    """A node in one job, as the quarantine knows it: it has one upload at a time."""
    return f"update/{job_id}/{node}"


def _workload_version(job: Job) -> int:
    try:
        return find(job.spec.workload).version
    except UnknownWorkloadError:
        return 0
