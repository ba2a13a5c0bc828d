"""What the kernel's queueing disciplines must be told so that one direction of a link is as asked.

Theory of operation. A direction becomes a netem, in which packets are delayed, lost, duplicated and
reordered, and below it a token bucket, which is the bottleneck with its queue. netem has a limit of
its own, 1000 packets unless told, which would cut off a fast and long link without a word; it is
given so much that only the bottleneck's queue drops. What needs no netem gets none, so that a link
of a rate alone works on kernels without it.
"""

from collections.abc import Iterator

import msgspec

from hypergpu.units import Microseconds
from netsim.link.link import Direction
from netsim.link.loss import Transitions, transitions

MTU_BYTES = 1500
ETHERNET_BYTES = 14
FRAME_BYTES = MTU_BYTES + ETHERNET_BYTES
LINE_BITS_PER_S = 10_000_000_000
"""Faster than anything sends here: what netem holds and how closely packets follow each other."""
# A normal deviation beyond it is one in 30,000.
WIDEST_DEVIATIONS = 4
BURST_MS = 1
SECOND_US = 1_000_000


class Netem(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one netem."""

    delay_us: Microseconds
    jitter_us: Microseconds
    """Standard deviation of a normal distribution, drawn anew for each packet."""
    loss: Transitions | None
    reordering: float
    duplication: float
    bits_per_s: int
    """Packets leave in order and no closer than this; 0: a packet may overtake by jitter."""
    limit_packets: int


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one token bucket (tbf). Its bytes are frames, Ethernet headers included."""

    bits_per_s: int
    burst_bytes: int
    limit_bytes: int


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """What stands at one device. Packets meet the netem first."""

    netem: Netem | None = None
    bucket: Bucket | None = None


def queues(direction: Direction) -> Queues:
    """Plan the queues of one direction."""
    return Queues(
        netem=_netem(direction) if any(reasons_for_netem(direction)) else None,
        bucket=_bucket(direction) if direction.bits_per_s else None,
    )


def reasons_for_netem(direction: Direction) -> Iterator[str]:
    """Name what only netem can do."""
    if direction.delay_us:
        yield f"a delay of {direction.delay_us / 1000:g} ms"
    if direction.jitter_us:
        yield f"a jitter of {direction.jitter_us / 1000:g} ms"
    if direction.loss:
        yield f"a loss of {direction.loss:.4g}"
    if direction.reordering:
        yield f"a reordering of {direction.reordering:.4g}"
    if direction.duplication:
        yield f"a duplication of {direction.duplication:.4g}"


def caveats(direction: Direction) -> Iterator[str]:
    """Name how the kernel's queues differ from what was asked, where they can do it at all."""
    if direction.jitter_us:
        # Its option for correlation draws a correlated number and then takes the remainder of a
        # division, which is not correlated any more (sch_netem.c, tabledist), so we set none.
        yield (
            f"netem draws the jitter anew for each packet and forgets at once instead of after"
            f" {direction.jitter_memory_ms} ms; packets stay in order, so a dense stream sees a"
            " longer mean delay and a smaller deviation"
        )
    if direction.loss and direction.burst_packets > 1:
        yield "netem's bursts of loss last for packets, not for time: a pause does not end one"
    if direction.reordering and direction.delay_us:
        yield "a packet that overtakes skips the whole delay"
    if direction.reordering and not direction.delay_us:
        yield "nothing is overtaken on a direction without delay"


def _netem(direction: Direction) -> Netem:
    has_loss = direction.loss > 0
    longest_us = direction.delay_us + WIDEST_DEVIATIONS * direction.jitter_us
    return Netem(
        delay_us=direction.delay_us,
        jitter_us=direction.jitter_us,
        loss=transitions(direction.loss, direction.burst_packets) if has_loss else None,
        # The kernel refuses reordering where nothing waits.
        reordering=direction.reordering if direction.delay_us else 0.0,
        duplication=direction.duplication,
        bits_per_s=LINE_BITS_PER_S if direction.jitter_us else 0,
        limit_packets=1000 + longest_us * LINE_BITS_PER_S // (8 * FRAME_BYTES * SECOND_US),
    )


def _bucket(direction: Direction) -> Bucket:
    # A link's rate counts IP packets, the kernel counts frames.
    bits_per_s = direction.bits_per_s * FRAME_BYTES // MTU_BYTES
    burst_bytes = max(2 * FRAME_BYTES, bits_per_s * BURST_MS // 8000)
    queue_bytes = bits_per_s * direction.queue_ms // 8000
    return Bucket(
        bits_per_s=bits_per_s,
        burst_bytes=burst_bytes,
        limit_bytes=max(2 * FRAME_BYTES, queue_bytes),
    )
