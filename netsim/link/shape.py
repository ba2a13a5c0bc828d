"""A link with everything that varies it over time."""

from typing import Literal

import msgspec

from hypergpu.units import Microseconds, Milliseconds
from netsim.link.course import LinkCourse, Variation
from netsim.link.link import Link, LinkDirection
from netsim.link.trace import LinkTrace

SHORTEST_QUEUE_BYTES = 2 * 1500
Way = Literal["up", "down"]
_NEAR = LinkDirection(delay_us=Microseconds(0), bits_per_s=100_000_000, queue_ms=Milliseconds(100))
_OPEN = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)
UNLIMITED = Link(up=_OPEN, down=_OPEN)
"""Neither delay nor limit: a coordinator's link where only the node's is of interest."""
COORDINATOR_LINK = Link(up=_NEAR, down=_NEAR)
"""100 Mbit/s, shared by all nodes, unless said: an unlimited one would measure the router."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A link with what changes it. Times count from when the router heard of it."""

    link: Link
    variation: Variation = Variation()
    traces: tuple[LinkTrace, ...] = ()
    starts_at_hour: float = 12.0

    @property
    def varies(self) -> bool:
        """Whether the link changes by itself."""
        return bool(self.traces) or self.variation != Variation()

    def course(self, key: str) -> LinkCourse:
        """Return the link over time."""
        return LinkCourse(
            self.link,
            self.variation,
            key=key,
            traces=self.traces,
            starts_at_hour=self.starts_at_hour,
        )

    def room_bytes(self, way: Way) -> int:
        """Return how much may wait before the bottleneck: ``queue_ms`` at its usual rate.

        A device's memory does not shrink with its rate, least of all in a gap.
        """
        direction: LinkDirection = getattr(self.link, way)
        bits_per_s = direction.bits_per_s
        for trace in self.traces:
            bits_per_s = mean_bits_per_s(trace, way) or bits_per_s
        return max(direction.queue_ms * bits_per_s // 8000, SHORTEST_QUEUE_BYTES)


def mean_bits_per_s(trace: LinkTrace, way: Way) -> int:
    """Return the mean over time of the rates that a trace names; 0 when it names none."""
    bits_us = named_us = 0
    ends_us = [row.at_us for row in trace.rows[1:]] + [trace.period_us]
    for row, end_us in zip(trace.rows, ends_us, strict=True):
        rate = row.up_bits_per_s if way == "up" else row.down_bits_per_s
        if rate is not None:
            bits_us += rate * (end_us - row.at_us)
            named_us += end_us - row.at_us
    return bits_us // named_us if named_us else 0
