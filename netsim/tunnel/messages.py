"""Messages between a tunnel and its router: one JSON object a line, over two pipes."""

from collections.abc import Mapping

import msgspec

from netsim.emulation.requests import LinkRequestFailed, PacketCount, RequestDone
from netsim.link import CongestionControl, Shape
from netsim.measure.lateness import Lateness


class TunnelPort(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the plan, and its path to the middle of the internet."""

    name: str
    namespace: str
    address: str
    shape: Shape
    peers: tuple[tuple[str, CongestionControl], ...] = ()
    """Addresses that are reached with another congestion control than the link's own."""


class TunnelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to the router; it is answered when every device is up."""

    seed: int
    ports: tuple[TunnelPort, ...]


class PortCount(msgspec.Struct, frozen=True, kw_only=True):
    """Both directions of one port."""

    up: PacketCount
    down: PacketCount
    is_cut: bool = False


class RouterStatistics(msgspec.Struct, frozen=True, tag="statistics", kw_only=True):
    """Everything that the router did so far, and how late it was with it."""

    lateness: Lateness
    ports: Mapping[str, PortCount]
    is_realtime: bool
    """Whether the system runs the router before other programs; else it is late more often."""
    cpu_us: int
    """Processor time of the router."""
    unroutable: int = 0


RouterAnswer = RequestDone | LinkRequestFailed | RouterStatistics
