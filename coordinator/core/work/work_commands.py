"""Commands that every leased work gives to the shell."""

from typing import Any, Protocol

import msgspec

from coordinator.core.work.work_events import StampedEvent
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


class AssignWork(msgspec.Struct, frozen=True):
    """Give a node packed work."""

    node: NodeId
    assignment: PackedAssignment


class CancelWork(msgspec.Struct, frozen=True):
    """Tell a node that a lease is void."""

    node: NodeId
    lease: Lease
    reason: str


class ReportAt(msgspec.Struct, frozen=True):
    """Report an event at this job time. A job has one at a time: a new one replaces the old."""

    at_ms: Milliseconds
    event: StampedEvent


class ReleaseNode(msgspec.Struct, frozen=True):
    """The job has no further use for the node: others may have it."""

    node: NodeId
    reason: str


class WriteRecord(msgspec.Struct, frozen=True):
    """Journal a record together with the event that led to it."""

    record: StampedEvent


class WorkStep(Protocol):
    """Effect of one event: the next state, and commands to perform once the event is durable."""

    @property
    def job(self) -> Any:
        """The next state."""

    @property
    def commands(self) -> tuple[Any, ...]:
        """Commands that the kind's performer carries out, `WriteRecord` aside."""
