"""Events that every leased work has in its journal: of members, users, payments and coordinators.

The name of a class is the tag of its rows: journals of every version open by it.
"""

import msgspec

from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Milliseconds


class StampedEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every event carries: job time in milliseconds."""

    at_ms: Milliseconds


class NodeJoined(StampedEvent, frozen=True, tag=True):
    """A node is there for this job: new, back again, or lent by another job."""

    node: NodeId
    token: str = ""
    """Id of a join token that it used; empty where it is not known."""
    memory_bytes: Bytes = Bytes(0)
    """Its device's, as it says; 0: not known."""
    address: str = ""
    """Digest of the address that it dials from; empty where it is not known."""
    queues_work: bool = False
    """Whether it takes the next piece of packed work of a job while it does one."""


class NodeLost(StampedEvent, frozen=True, tag=True):
    """A node was not heard of for too long, or left."""

    node: NodeId
    reason: str


class NodeDraining(StampedEvent, frozen=True, tag=True):
    """A node finishes what it holds and takes nothing more from this job."""

    node: NodeId
    reason: str


class NodePaused(StampedEvent, frozen=True, tag=True):
    """A node's owner or an operator paused it: it drops what it holds and may come back."""

    node: NodeId
    reason: str


class NodeReadmitted(StampedEvent, frozen=True, tag=True):
    """An operator takes a node back that the job had banned."""

    node: NodeId


class JobPaused(StampedEvent, frozen=True, tag=True):
    """A user asked to pause, or the coordinator cannot go on without one."""

    reason: str = ""
    """Why, when it was the coordinator."""


class JobResumed(StampedEvent, frozen=True, tag=True):
    """A user asked to go on."""


class JobStopped(StampedEvent, frozen=True, tag=True):
    """A user asked to end the job with what it has."""


class CoordinatorChanged(StampedEvent, frozen=True, tag=True):
    """Another coordinator goes on with the job, or the same one after a while or a restart."""

    reason: str
    """Which one, and why."""


class JobEnded(StampedEvent, frozen=True, tag=True):
    """The job has ended and no more of its work is paid after this. The machine never reads it."""

    phase: str
    """The phase that it ended in."""
    reason: str


class FundingChanged(StampedEvent, frozen=True, tag=True):
    """Payments stated how much of the job's work its escrow covers."""

    funded_units: int | None = msgspec.field(name="funded_samples")
    """Accepted units of work since the job's beginning at full quality, of training samples; None:
    no limit is known. Rows have the name that it had when all work was training.
    """
    reason: str = ""
    """Why it is no more, for users."""


MembershipEvent = NodeJoined | NodeLost | NodeDraining | NodePaused | NodeReadmitted
"""A node's coming and going."""
