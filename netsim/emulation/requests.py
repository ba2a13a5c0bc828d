"""Requests that change open links, and the answers: the same for every backend, as JSON lines."""

from enum import StrEnum

import msgspec

from netsim.link import Shape


class Condition(StrEnum):
    """What a node's link does to everything that crosses it."""

    OPEN = "open"
    CUT = "cut"
    """Everything is lost and nobody is told. Streams come back as TCP's timers have it."""
    STALLED = "stalled"
    """Nothing moves and nothing is lost: what waits goes on when the link is open again."""
    HALF_OPEN = "half_open"
    """Connections are accepted and never answered; existing ones go silent for good."""
    DISCONNECTED = "disconnected"
    """Connections are reset and new ones rejected."""


class SetShape(msgspec.Struct, frozen=True, tag="set"):
    """From now on a node's link is this one. Its variation and traces count from now."""

    name: str
    shape: Shape


class SetCondition(msgspec.Struct, frozen=True, tag="condition"):
    """From now on a node's link does this."""

    name: str
    condition: Condition


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Break off every connection of a node; both ends are told at once."""

    name: str


class ReadStatistics(msgspec.Struct, frozen=True, tag="statistics"):
    """Answered with the backend's statistics since it was opened."""


Request = SetShape | SetCondition | Reset | ReadStatistics


class PacketCount(msgspec.Struct, kw_only=True):
    """Packets of one direction of one node."""

    offered: int = 0
    lost: int = 0
    overflowed: int = 0
    """Dropped since the queue was full."""
    duplicated: int = 0
    overtaking: int = 0
    delivered: int = 0
    delivered_bytes: int = 0


class RequestDone(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""

    at_ns: int = 0
    """When, by this machine's monotonic clock."""


class LinkRequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The request cannot be carried out."""

    detail: str
    fix: str
