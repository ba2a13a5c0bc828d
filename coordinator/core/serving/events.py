"""What happens to a served model. Calls and answers are in no event: they are nobody's to keep."""

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
from hypergpu.serving.serve_request import ServeRequest


class ServeCreated(StampedEvent, frozen=True, tag=True):
    """A user asked for the model to be served."""

    job_id: JobId
    owner: TokenId
    request: ServeRequest
    model: str
    """As of the request, for readers who do not see the request."""


class ReplicaHandedBack(StampedEvent, frozen=True, tag=True):
    """A node does not hold the model, or no longer."""

    node: NodeId
    lease: int
    reason: str
    is_lasting: bool = False
    """Whether the same node would fail again: its memory, or a limit of its owner."""


ServeEvent = (
    ServeCreated
    | ReplicaHandedBack
    | MembershipEvent
    | JobPaused
    | JobResumed
    | JobStopped
    | FundingChanged
    | CoordinatorChanged
    | JobEnded
)
