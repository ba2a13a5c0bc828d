"""A link between one node and the coordinator, as plain numbers. Every backend gets these."""

import math
from collections.abc import Iterator

import msgspec

from coordinator.core.transfer.path import CongestionControl
from hypergpu.units import Microseconds, Milliseconds
from netsim.link.error import NetsimError

STALLED_BITS_PER_S = 1
"""The rate of a link in a gap: what waits goes on waiting. Zero is taken: it means no limit."""


class LinkDirection(msgspec.Struct, frozen=True, kw_only=True):
    """One way of a link, from one end's queue to the other end.

    Raises:
        NetsimError: No link can be like that.
    """

    delay_us: Microseconds
    """Propagation, one way, before jitter."""
    jitter_us: Microseconds = Microseconds(0)
    """Standard deviation of the delay around ``delay_us``."""
    jitter_memory_ms: Milliseconds = Milliseconds(200)
    """Correlation time of the jitter: after it, 1/e of a deviation is left."""
    jitter_is_clamped: bool = False
    """Lets ``jitter_us`` exceed ``delay_us``: delays are cut off at zero and their mean rises."""
    loss: float = 0.0
    """Share of packets lost, in [0, 1)."""
    burst_packets: float = 1.0
    """Mean number of packets in a row that are lost together, at least 1."""
    bits_per_s: int
    """Rate of the bottleneck, headers included; 0: no limit."""
    queue_ms: Milliseconds = Milliseconds(100)
    """Buffer before the bottleneck, as the time it takes to drain at ``bits_per_s``."""
    reordering: float = 0.0
    """Share of packets that overtake those before them, in [0, 1)."""
    duplication: float = 0.0
    """Share of packets that arrive twice, in [0, 1)."""

    def __post_init__(self) -> None:
        for what, fix in _contradictions(self):
            raise NetsimError(what, fix)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A node's way to the coordinator and back."""

    up: LinkDirection
    down: LinkDirection
    congestion_control: CongestionControl = CongestionControl.CUBIC

    @property
    def rtt_us(self) -> Microseconds:
        """Propagation there and back, without jitter, queues and serialisation."""
        return Microseconds(self.up.delay_us + self.down.delay_us)


def most_loss(burst_packets: float) -> float:
    """The greatest share of packets that can be lost in bursts of this mean length.

    Each burst is followed by one packet at least that arrives.
    """
    return burst_packets / (1 + burst_packets)


def _contradictions(direction: LinkDirection) -> Iterator[tuple[str, str]]:
    yield from _ranges(direction)
    most = most_loss(direction.burst_packets)
    if direction.loss > most:
        bursts = f"bursts of {direction.burst_packets:g} packets, each followed by one that arrives"
        what = f"a loss of {direction.loss:g} cannot come in {bursts}"
        yield what, f"lower the loss to {most:.6g} at most, or lengthen the bursts"
    if direction.jitter_us > direction.delay_us and not direction.jitter_is_clamped:
        what = f"jitter of {direction.jitter_us} us exceeds the delay of {direction.delay_us} us"
        yield what, "lower the jitter to the delay at most, or clamp it (jitter_is_clamped)"


def _ranges(direction: LinkDirection) -> Iterator[tuple[str, str]]:
    for name, least in (
        ("delay_us", 0),
        ("jitter_us", 0),
        ("jitter_memory_ms", 1),
        ("bits_per_s", 0),
        ("queue_ms", 1),
    ):
        if getattr(direction, name) < least:
            yield f"{name} is {getattr(direction, name)}", f"give {least} or more"
    for name in ("loss", "reordering", "duplication"):
        share = getattr(direction, name)
        if not 0 <= share < 1:
            yield f"{name} is {share:g}", "give a share in [0, 1): 0.01 is 1 %"
    if not (direction.burst_packets >= 1 and math.isfinite(direction.burst_packets)):
        what = f"burst_packets is {direction.burst_packets:g}"
        yield what, "give 1 (each loss alone) or more"
