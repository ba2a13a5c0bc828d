"""Leases: numbered grants of a piece of work to a node, and the fence that only the newest passes.

A lease's number comes from one counter of its job. Work that was given to another node, or again to
the same one, goes out under a fresh number, so that no piece of work can come back twice.
"""

from enum import Enum
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from hypergpu.ids import Slot
from hypergpu.units import Milliseconds


class WorkState(Enum):
    """Where one leased piece of work is. Snapshots hold the values: they never change."""

    PENDING = "pending"
    ON_TRIAL = "on trial"  # it counts when it comes; the job waits only while it has patience
    LATE = "late"  # it counts as long as the job waits for others
    PASSED_OVER = "passed over"  # the job went on without it, or another node has it now
    RECEIVED = "received"
    LOST = "lost"
    HANDED_BACK = "handed back"
    CUT = "cut by the deadline"
    UNREADABLE = "update damaged on disk"
    UNDER_WAY = "under way over several rounds"  # nobody waits for it


OPEN_WORK = frozenset({WorkState.PENDING, WorkState.ON_TRIAL, WorkState.LATE, WorkState.UNDER_WAY})
"""Where work may still come in."""


class LeasedWork(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work that a node has, or had, under a lease. Each kind adds what the work is."""

    slot: Slot
    lease: int
    assigned_at_ms: Milliseconds
    work: WorkState = WorkState.PENDING
    took_ms: Milliseconds = Milliseconds(0)
    """From its assignment until it was in, pauses left out; 0: it is not."""
    reason: str = ""
    """Reason for which its node handed it back; empty: it has not."""

    @property
    def is_open(self) -> bool:
        """Whether its result would be accepted."""
        return self.work in OPEN_WORK


_AnyWork = TypeVar("_AnyWork", bound=LeasedWork)


def lease_rejection(leased: LeasedWork, lease: int) -> str:
    """Why nothing is accepted under ``lease`` now; empty: it is the newest and still open."""
    if lease != leased.lease:
        return f"lease {lease} is void; the current one is {leased.lease}"
    if not leased.is_open:
        return f"the work under lease {lease} is {leased.work.value} already"
    return ""


def elapsed_ms(leased: LeasedWork, at_ms: Milliseconds) -> Milliseconds:
    """How long the node has had the work at ``at_ms``, at least a millisecond."""
    return Milliseconds(max(1, at_ms - leased.assigned_at_ms))


def renew_lease(leased: _AnyWork, lease: int, paused_ms: Milliseconds) -> _AnyWork:
    """The work as it goes on after a pause, under a fresh lease.

    The pause counts nothing against its node, and work that was handed back is tried again.
    """
    is_handed_back = leased.work is WorkState.HANDED_BACK
    return replace(
        leased,
        work=WorkState.PENDING if is_handed_back else leased.work,
        lease=lease,
        assigned_at_ms=Milliseconds(leased.assigned_at_ms + paused_ms),
        reason="",
    )
