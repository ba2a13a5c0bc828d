"""Follow a job until it ends and show it, a tick at a time."""

import time
from typing import Self

from msgspec.structs import replace

from hypergpu.client.blocking import Coordinator
from hypergpu.client.failures import RESTARTING
from hypergpu.client.values import ENDED, JobEvent
from hypergpu.errors import HyperGPUError
from hypergpu.terminal.progress import (
    JobProgress,
    with_event,
    with_job,
    with_note,
    with_participants,
)
from hypergpu.terminal.views import WatchView

TICK_S = 0.5
_DRAIN_S = 0.01
"""Wait for a further item of a burst, much longer than one takes to be handed over."""
SUMMARY_EVERY_S = 1.0


def follow(coordinator: Coordinator, job_id: str, view: WatchView) -> JobProgress:
    """Show a job from its first event until it has ended.

    Raises:
        HyperGPUError: The job is unknown, or its coordinator stays away.
    """
    with Watched(coordinator, job_id, view) as watched:
        while not watched.has_ended:
            watched.tick()
        return watched.progress


class Watched:
    """A job being followed, for callers that do other things between ticks."""

    def __init__(self, coordinator: Coordinator, job_id: str, view: WatchView) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._view = view
        self._is_away = False
        self.progress = self._with_summary(JobProgress())
        self._asked_at_s = time.monotonic()
        self._updates = coordinator.watch(job_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop following."""
        self._updates.close()

    @property
    def has_ended(self) -> bool:
        """The job is over and everything journalled has been shown."""
        job = self.progress.job
        return self._updates.is_over and job is not None and job.phase in ENDED

    def tick(self) -> list[JobEvent]:
        """Take in the updates of half a second and show them; returns the events among them."""
        events = []
        wait_s = TICK_S
        while (update := self._updates.poll(wait_s)) is not None:
            if isinstance(update, JobEvent):
                events.append(update)
                self.progress = with_event(self.progress, update)
                self._view.event(update, self.progress)
            else:
                self.progress = with_participants(self.progress, update.participants)
            wait_s = _DRAIN_S
        now_s = time.monotonic()
        if self._updates.is_over or now_s - self._asked_at_s >= SUMMARY_EVERY_S:
            self._asked_at_s = now_s
            self.progress = self._with_summary(self.progress)
        self._view.refresh(self.progress)
        return events

    def say(self, text: str) -> None:
        """Show a line that is in no journal."""
        self.progress = with_note(self.progress, text)
        self._view.say(text)

    def _with_summary(self, progress: JobProgress) -> JobProgress:
        try:
            found = self._coordinator.job(self._job_id)
        except HyperGPUError as refused:
            # A coordinator that is being restarted is no reason to stop watching.
            if progress.job is None or refused.reason not in RESTARTING:
                raise
            self._say_away(is_away=True)
            reason = "the coordinator is away, trying again"
            return replace(progress, job=replace(progress.job, reason=reason))
        self._say_away(is_away=False)
        return with_job(progress, found.job, tuple(found.participants))

    def _say_away(self, *, is_away: bool) -> None:
        """Say it once when the coordinator goes, and once when it is there again."""
        if is_away != self._is_away:
            self._is_away = is_away
            self._view.say(
                "lost the coordinator, trying again" if is_away else "the coordinator is back"
            )
