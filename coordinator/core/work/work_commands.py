"""Commands that every leased work gives to the shell."""

from typing import Any, Protocol

import msgspec

from coordinator.core.work.work_events import StampedEvent
from hypergpu.ids import NodeId


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
