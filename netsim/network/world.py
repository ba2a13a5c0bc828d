"""What a world file says, as plain data: the one input of every backend."""

from typing import Annotated

import msgspec

from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds
from netsim.link import NEVER_US, Link, Shape
from netsim.network.churn import Churn

COORDINATOR = "coordinator"
"""The name under which faults reach the coordinator. No node may have it."""


class _AnyEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    nodes: str | tuple[str, ...]
    """Names of nodes and groups; of a fault in a `WorldDescription` its one target."""
    at_ms: Milliseconds = msgspec.field(name="at")

    @property
    def kind(self) -> str:
        """Word for the kind in a world file."""
        return str(self.__struct_config__.tag)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of nodes and groups."""
        return (self.nodes,) if isinstance(self.nodes, str) else self.nodes

    @property
    def at_us(self) -> int:
        """When it happens."""
        return self.at_ms * 1000


class HealEntry(_AnyEntry, frozen=True, kw_only=True, tag="heal"):
    """Ends the faults of its nodes that have begun."""


class WorldFault(_AnyEntry, frozen=True, kw_only=True):
    """One thing that goes wrong for nodes, or for the coordinator."""

    lasts_ms: Milliseconds | None = msgspec.field(default=None, name="for")
    """None: until a heal, or for good."""

    @property
    def target(self) -> str:
        """The one node that a fault of a `WorldDescription` is for."""
        return str(self.nodes)

    @property
    def until_us(self) -> int:
        """When it ends; `NEVER_US`: it is not healed."""
        return NEVER_US if self.lasts_ms is None else self.at_us + self.lasts_ms * 1000


class CrashFault(WorldFault, frozen=True, kw_only=True, tag="crash"):
    """The process is killed, and started again at the end."""


class PartitionFault(WorldFault, frozen=True, kw_only=True, tag="partition"):
    """The link is cut."""


class FlapFault(WorldFault, frozen=True, kw_only=True, tag="flap"):
    """The link is cut for half of each period."""

    every_ms: Annotated[Milliseconds, msgspec.Meta(ge=1)] = msgspec.field(name="every")
    """Time from one cut to the next."""


class SlowDiskFault(WorldFault, frozen=True, kw_only=True, tag="slow_disk"):
    """The disk is slow."""

    mib_per_s: Annotated[float, msgspec.Meta(ge=0.001, le=1e6)]

    @property
    def bytes_per_s(self) -> int:
        """Rate of the disk."""
        return round(self.mib_per_s * (1 << 20))


class ClockJumpFault(WorldFault, frozen=True, kw_only=True, tag="clock_jump"):
    """The wall clock jumps forward, or back when the number is negative."""

    by_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class CorruptFault(WorldFault, frozen=True, kw_only=True, tag="corrupt"):
    """A share of the node's updates arrives with other bytes than were sent."""

    percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 100.0


class LieFault(WorldFault, frozen=True, kw_only=True, tag="lie"):
    """The node multiplies its pseudo-gradient; -1 turns it round."""

    factor: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] = -1.0


class SlowDeviceFault(WorldFault, frozen=True, kw_only=True, tag="slow_device"):
    """Inner steps take ``factor`` times as long."""

    factor: Annotated[float, msgspec.Meta(ge=1, le=1e4)]


FaultEntry = (
    HealEntry
    | CrashFault
    | PartitionFault
    | FlapFault
    | SlowDiskFault
    | ClockJumpFault
    | CorruptFault
    | LieFault
    | SlowDeviceFault
)
"""One entry of a world file's ``[[faults]]``."""


class NodeDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its link, its device, how it comes and goes."""

    name: str
    group: str
    profile: str = ""
    shape: Shape
    churn: Churn | None = None
    step_floor_ms: float = 0.0
    """An inner step takes this long at least, so that a fast machine can play a slow GPU."""
    memory_bytes: Bytes = Bytes(0)
    """What the node says its device has; 0: what it really has."""

    @property
    def link(self) -> Link:
        """The node's link where nothing varies it."""
        return self.shape.link


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
