"""What happens to a job of items."""

from coordinator.core.work.work_events import (
    CoordinatorChanged,
    FundingChanged,
    JobEnded,
    JobPaused,
    JobResumed,
    JobStopped,
    MembershipEvent,
    StampedEvent,
)
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.units import Milliseconds


class EchoCreated(StampedEvent, frozen=True, tag=True):
    """A user asked for the job."""

    job_id: JobId
    owner: TokenId
    items: tuple[str, ...]
    limit_ms: Milliseconds
    keep_ms: Milliseconds = Milliseconds(0)


class ItemReturned(StampedEvent, frozen=True, tag=True):
    """A node gave an item back as it was."""

    node: NodeId
    number: int
    lease: int
    text: str


class ItemHandedBack(StampedEvent, frozen=True, tag=True):
    """A node gave an item back undone."""

    node: NodeId
    number: int
    lease: int
    reason: str


class LeasesDue(StampedEvent, frozen=True, tag=True):
    """The time of at least one lease is over."""


EchoEvent = (
    EchoCreated
    | ItemReturned
    | ItemHandedBack
    | LeasesDue
    | MembershipEvent
    | JobPaused
    | JobResumed
    | JobStopped
    | FundingChanged
    | CoordinatorChanged
    | JobEnded
)
