"""What a world file says, as plain data: the one input of every backend."""

from enum import StrEnum

import msgspec

from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Microseconds
from netsim.link import Link, LinkTrace, Variation
from netsim.network.churn import Churn

COORDINATOR = "coordinator"
"""The name under which faults reach the coordinator. No node may have it."""


class FaultKind(StrEnum):
    """What goes wrong."""

    CRASH = "crash"
    PARTITION = "partition"
    FLAP = "flap"
    SLOW_DISK = "slow_disk"
    CLOCK_JUMP = "clock_jump"
    CORRUPT = "corrupt"
    LIE = "lie"
    SLOW_DEVICE = "slow_device"


class WorldFault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong for one node, or for the coordinator."""

    kind: FaultKind
    target: str
    at_us: Microseconds
    until_us: Microseconds
    """`NEVER_US`: it is not healed. A crashed process is started again then."""
    every_us: Microseconds = Microseconds(0)
    """Flap: time from one cut to the next; the link is cut for half of it."""
    bytes_per_s: int = 0
    """Slow disk: its rate."""
    jump_ms: int = 0
    """Clock jump: how far the wall clock goes forward, or back when negative."""
    share: float = 0.0
    """Corruption: share of the node's updates that arrive with other bytes than were sent."""
    factor: float = 0.0
    """Lie: factor on the node's pseudo-gradient; -1 turns it round. Slow
    device: how many times as long its inner steps take.
    """


class NodeDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its link, its device, how it comes and goes."""

    name: str
    group: str
    profile: str = ""
    link: Link
    variation: Variation = Variation()
    traces: tuple[LinkTrace, ...] = ()
    churn: Churn | None = None
    step_floor_ms: float = 0.0
    """An inner step takes this long at least, so that a fast machine can play a slow GPU."""
    memory_bytes: Bytes = Bytes(0)
    """What the node says its device has; 0: what it really has."""


class WorldDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a backend needs. Equal descriptions give equal networks."""

    name: str
    seed: int = 0
    starts_at_hour: float = 12.0
    job: JobSpec | None = None
    coordinator: Link
    """The coordinator's own line, shared by all nodes."""
    nodes: tuple[NodeDescription, ...]
    faults: tuple[WorldFault, ...] = ()
    """In order of their beginning."""
    churn_speed: float = 1.0
    """Divides all lengths of churn."""

    def node(self, name: str) -> NodeDescription:
        """The node of this name.

        Raises:
            KeyError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def key(self, stream: str, entity: str) -> str:
        """The seed of one stream of dice of one entity: no other moves when one is added."""
        return f"{self.seed}/{stream}/{entity}"
