"""Messages between a process of proxies and its owner, as lines of JSON."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from hypergpu.units import Bytes
from netsim.emulation.requests import Condition, LinkRequestFailed, PacketCount, RequestDone
from netsim.link import COORDINATOR_LINK, Link, Shape
from netsim.measure.lateness import Lateness

LOOPBACK = "127.0.0.1"


class ProxyProtocol(StrEnum):
    """The transport that a port forwards."""

    TCP = "tcp"
    UDP = "udp"


class Dialler(StrEnum):
    """The end that opens connections through a forward."""

    NODE = "node"
    COORDINATOR = "coordinator"
    """A real node's network would have to let these in; for measuring the direction down."""


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """One port of a node's proxy."""

    target_port: int
    target_host: str = LOOPBACK
    port: int = 0
    """Port to listen on; 0: a free one."""
    protocol: ProxyProtocol = ProxyProtocol.TCP
    dialler: Dialler = Dialler.NODE


class ProxiedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its link and where it dials.

    A program that learns a second port from the first one's answer, as nodes do, needs an address
    of its own in 127.0.0.0/8 to ``listen`` on, and the same ``port`` numbers as its targets'.
    """

    name: str
    shape: Shape
    forwards: tuple[Forward, ...]
    listen: str = LOOPBACK


class ProxyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that proxies begin with; the first line to a process of them."""

    nodes: tuple[ProxiedNode, ...]
    coordinator: Link = COORDINATOR_LINK
    """The coordinator's own link, which all nodes share."""
    seed: int = 0


class ProxyCount(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a node's proxy."""

    condition: Condition
    connections: int
    """Open now."""
    accepted: int
    """Since the beginning."""
    up_bytes: Bytes
    """Bytes of streams, delivered to the target."""
    down_bytes: Bytes
    datagrams_up: PacketCount
    datagrams_down: PacketCount


class ProxyStatistics(msgspec.Struct, frozen=True, tag="statistics", kw_only=True):
    """Everything the proxies did and how late they were: ``lateness.is_valid`` decides."""

    lateness: Lateness
    nodes: Mapping[str, ProxyCount]


class ProxiesOpened(msgspec.Struct, frozen=True, tag="opened", kw_only=True):
    """The answer to the plan."""

    ports: Mapping[str, tuple[int, ...]]
    """Ports of each node, in the order of its forwards."""


ProxyAnswer = ProxiesOpened | RequestDone | LinkRequestFailed | ProxyStatistics
