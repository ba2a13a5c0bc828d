"""What a tunnel's owner and router say to each other: one JSON object a line, over two pipes."""

from collections.abc import Mapping

import msgspec

from netsim.child import Failed
from netsim.link.shape import Shape
from netsim.measure.lateness import Lateness
from netsim.tunnel.device import Host


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the plan and its way to the middle of the internet."""

    name: str
    host: Host
    shape: Shape


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to the router; it is answered when every device is up."""

    seed: int
    ports: tuple[Port, ...]


class SetShape(msgspec.Struct, frozen=True, tag="set_shape"):
    """From now on the port's way is this one. Packets that propagate keep the delay they got."""

    name: str
    shape: Shape


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Lose every packet from and to the port, also those under way, and tell nobody."""

    name: str


class Heal(msgspec.Struct, frozen=True, tag="heal"):
    """Undo a cut."""

    name: str


class ReadStatistics(msgspec.Struct, frozen=True, tag="read_statistics"):
    """Answered with ``Statistics`` over the whole life of the router."""


class DirectionCount(msgspec.Struct, frozen=True, kw_only=True):
    """Packets of one direction of one port."""

    offered: int = 0
    lost: int = 0
    overflowed: int = 0
    """Dropped since the queue was full."""
    duplicated: int = 0
    overtaking: int = 0
    delivered: int = 0
    delivered_bytes: int = 0


class PortCount(msgspec.Struct, frozen=True, kw_only=True):
    """Both directions of one port."""

    up: DirectionCount
    down: DirectionCount
    is_cut: bool = False


class Statistics(msgspec.Struct, frozen=True, tag="statistics", kw_only=True):
    """What the router did so far, and how late it was with it."""

    lateness: Lateness
    ports: Mapping[str, PortCount]
    is_realtime: bool
    """Whether the system lets the router go before other programs; else it is late more often."""
    cpu_us: int
    """What the router has cost."""
    unroutable: int = 0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It was done."""

    at_ns: int
    """When, by this machine's monotonic clock."""


Request = SetShape | Cut | Heal | ReadStatistics
Answer = Done | Failed | Statistics
