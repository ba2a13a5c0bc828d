"""A link between one node and the coordinator, as plain numbers. Every backend is asked for these."""

from enum import StrEnum

import msgspec

from hypergpu.units import Microseconds, Milliseconds


class CongestionControl(StrEnum):
    """Of the hosts at both ends. Most of the world's machines run CUBIC."""

    CUBIC = "cubic"
    RENO = "reno"
    BBR = "bbr"


class Direction(msgspec.Struct, frozen=True, kw_only=True):
    """One way of a link, from one end's queue to the other end."""

    delay_us: Microseconds
    """Propagation, one way, before jitter."""
    jitter_us: Microseconds = Microseconds(0)
    """Standard deviation of the delay around ``delay_us``."""
    jitter_memory_ms: Milliseconds = Milliseconds(200)
    """Correlation time of the jitter: after it, 1/e of a deviation is left."""
    loss: float = 0.0
    """Share of packets lost, in [0, 1)."""
    burst_packets: float = 1.0
    """Mean number of packets in a row that are lost together, at least 1."""
    bits_per_s: int
    """Of the bottleneck, headers included; 0: no limit."""
    queue_ms: Milliseconds = Milliseconds(100)
    """Buffer before the bottleneck, as the time it takes to drain at ``bits_per_s``."""
    reordering: float = 0.0
    """Share of packets that overtake those before them, in [0, 1)."""
    duplication: float = 0.0
    """Share of packets that arrive twice, in [0, 1)."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A node's way to the coordinator and back."""

    up: Direction
    down: Direction
    congestion_control: CongestionControl = CongestionControl.CUBIC

    @property
    def rtt_us(self) -> Microseconds:
        """Propagation there and back, without jitter, queues and serialisation."""
        return Microseconds(self.up.delay_us + self.down.delay_us)
