"""Step times out of what nodes say of their progress, by the coordinator's clock.

A lease's first message with a step is where its clock starts: what surrounds a training, and a
first step that warms up, are before it. So a node is measured while it works, also under a lease
over several rounds, and by work whose update is late or never comes.
"""

import msgspec

from coordinator.core.network.reading import StepTime
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds

LEAST_MS = 1_000
"""Shorter spans say more of the line's delays than of steps."""


class LeaseProgress(msgspec.Struct, frozen=True):
    """How far the work under a lease is, as its node says."""

    job_id: JobId
    lease: int
    steps: float
    """Inner steps done, counted in steps of the job's own batch."""
    at_ms: Milliseconds
    """When that was heard."""


class ProgressClock(msgspec.Struct, frozen=True):
    """The newest lease of a node that said something of its progress."""

    first: LeaseProgress
    """Its first message with a step."""
    timed: LeaseProgress
    """The message up to which steps are timed."""
    newest: LeaseProgress

    @property
    def took_ms(self) -> Milliseconds:
        """The time for which the node was certainly at these steps."""
        return Milliseconds(self.newest.at_ms - self.first.at_ms)


def begin_clock(first: LeaseProgress) -> ProgressClock:
    """The clock of a lease that has just said something of a step."""
    return ProgressClock(first, first, first)


def advance_clock(
    clock: ProgressClock | None, now: LeaseProgress
) -> tuple[ProgressClock | None, StepTime | None]:
    """The clock after a message, and the steps that it has timed since it did so last.

    Args:
        clock: The node's; None: it has said nothing yet.
        now: The message. Steps that go back begin anew, as those of work that is done again.
    """
    if not now.steps > 0:
        return clock, None
    is_new = clock is None or (clock.first.job_id, clock.first.lease) != (now.job_id, now.lease)
    if clock is None or is_new or now.steps < clock.newest.steps:
        return begin_clock(now), None
    took_ms, steps = now.at_ms - clock.timed.at_ms, now.steps - clock.timed.steps
    newest = now if now.steps > clock.newest.steps else clock.newest
    if took_ms < LEAST_MS or steps <= 0:
        return ProgressClock(clock.first, clock.timed, newest), None
    step_time = StepTime(at_ms=now.at_ms, steps=steps, took_ms=Milliseconds(took_ms))
    return ProgressClock(clock.first, now, now), step_time
