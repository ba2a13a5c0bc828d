"""A job of items: each is leased to one node at a time, and the node gives it back as it is."""

from collections.abc import Mapping
from enum import Enum

import msgspec

from coordinator.core.work.leases import LeasedWork
from coordinator.core.work.members import LeasedJob
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

KIND, VERSION = "echo", 1


class EchoPhase(Enum):
    """Where a job is."""

    WORKING = "working"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"


ENDED = frozenset({EchoPhase.FINISHED, EchoPhase.STOPPED})


class EchoItem(msgspec.Struct, frozen=True):
    """One item, on its way to a node and back."""

    number: int
    text: str
    keep_ms: Milliseconds = Milliseconds(0)
    """For how long the worker keeps it."""


class EchoRequest(msgspec.Struct, frozen=True):
    """What a user asks for."""

    items: tuple[str, ...]
    limit_ms: Milliseconds = Milliseconds(60_000)
    """A lease ends so long after it was given out."""
    keep_ms: Milliseconds = Milliseconds(0)
    """For how long a node keeps each item."""


class LeasedItem(LeasedWork, frozen=True):
    """An item that a node has, or gave back undone."""

    number: int
    due_at_ms: Milliseconds
    """When the lease ends."""


class ReturnedItem(msgspec.Struct, frozen=True):
    """Who gave an item back, and under which lease."""

    node: NodeId
    lease: int


class EchoJob(LeasedJob, frozen=True, kw_only=True):
    """One job. Each item is waiting, leased or returned."""

    items: tuple[str, ...]
    limit_ms: Milliseconds
    keep_ms: Milliseconds = Milliseconds(0)
    phase: EchoPhase = EchoPhase.WORKING
    waiting: tuple[int, ...]
    """Items that nobody has, in the order in which they go out."""
    leases: Mapping[NodeId, LeasedItem] = {}
    refusals: tuple[tuple[NodeId, LeasedItem], ...] = ()
    """Leases under which nodes gave items back undone: none gets the same item again."""
    returned: Mapping[int, ReturnedItem] = {}
    """Items that are back, by their numbers."""
