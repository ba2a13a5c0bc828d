"""What proxies are told and what they answer: lines of JSON where they run by themselves."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from hypergpu.units import Bytes
from netsim.child import Failed
from netsim.link.course import Variation
from netsim.link.link import Link
from netsim.link.shape import COORDINATOR_LINK
from netsim.link.trace import Trace
from netsim.measure.lateness import Lateness

LOOPBACK = "127.0.0.1"


class Protocol(StrEnum):
    """Of what is forwarded."""

    TCP = "tcp"
    UDP = "udp"


class Condition(StrEnum):
    """What a node's link does to what crosses it."""

    OPEN = "open"
    STALLED = "stalled"
    """Nothing moves and nothing is lost: what waits goes on when it is healed."""
    CUT = "cut"
    """Everything is lost and nobody is told. Streams come back as TCP's timers have it."""
    HALF_OPEN = "half_open"
    """Connections are accepted and never answered; those that there are go silent for good."""
    DISCONNECTED = "disconnected"
    """Connections are reset and new ones refused, until it is healed."""


class Dialler(StrEnum):
    """Who opens connections through a forward."""

    NODE = "node"
    COORDINATOR = "coordinator"
    """What a node's network would have to let in; for measuring the way down."""


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """One port of a node's proxy."""

    target_port: int
    target_host: str = LOOPBACK
    port: int = 0
    """To listen on; 0: a free one."""
    protocol: Protocol = Protocol.TCP
    dialler: Dialler = Dialler.NODE


class Proxied(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its link and where it dials.

    A program that learns a second port from the first one's answer, as nodes do, wants an address
    of its own in 127.0.0.0/8 to ``listen`` on, and the same ``port`` numbers as its targets'.
    """

    name: str
    link: Link
    forwards: tuple[Forward, ...]
    listen: str = LOOPBACK
    variation: Variation = Variation()
    """What the link does by itself, from the moment at which the proxies open."""
    traces: tuple[Trace, ...] = ()
    starts_at_hour: float = 12.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that proxies begin with; the first line to a process of them."""

    nodes: tuple[Proxied, ...]
    coordinator: Link = COORDINATOR_LINK
    """The coordinator's own link, which all nodes share."""
    seed: int = 0


class SetLink(msgspec.Struct, frozen=True, tag="set_link"):
    """From now on the node's link is this one, and varies no more."""

    name: str
    link: Link


class SetCondition(msgspec.Struct, frozen=True, tag="set_condition"):
    """From now on the node's link does this."""

    name: str
    condition: Condition


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Break off every connection of the node, both ends told at once."""

    name: str


class ReadStatistics(msgspec.Struct, frozen=True, tag="read_statistics"):
    """Answered with `Statistics` since the beginning."""


class DatagramCount(msgspec.Struct, kw_only=True):
    """Of one direction of one node."""

    offered: int = 0
    lost: int = 0
    overflowed: int = 0
    """Dropped since the queue was full."""
    duplicated: int = 0
    overtaking: int = 0
    delivered: int = 0


class NodeCount(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's proxy did."""

    condition: Condition
    connections: int
    """Open now."""
    accepted: int
    """Since the beginning."""
    up_bytes: Bytes
    """Of streams, delivered to the target."""
    down_bytes: Bytes
    datagrams_up: DatagramCount
    datagrams_down: DatagramCount


class Statistics(msgspec.Struct, frozen=True, tag="statistics", kw_only=True):
    """What the proxies did and how late they were with it: ``lateness.is_valid`` decides."""

    lateness: Lateness
    nodes: Mapping[str, NodeCount]


class Opened(msgspec.Struct, frozen=True, tag="opened", kw_only=True):
    """The answer to the plan."""

    ports: Mapping[str, tuple[int, ...]]
    """Of each node, in the order of its forwards."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It was done."""


Request = SetLink | SetCondition | Reset | ReadStatistics
Answer = Opened | Done | Failed | Statistics
