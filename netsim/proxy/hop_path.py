"""One direction of a node's way: the hops in a row, and whether anything crosses at all."""

from collections.abc import Sequence

from coordinator.core.transfer.path import CongestionControl, NetworkPath
from hypergpu.units import Microseconds
from netsim.link import LinkDirection
from netsim.proxy.clock import Deed
from netsim.proxy.hop import Hop

PACKET_BYTES = 1_448
"""Payload of a full packet: 1,500 less IPv4, TCP and its timestamps."""
HEADER_BYTES = 52
_PARCEL_PACKETS_MAX = 45
"""About 64 KiB: large enough for a gigabit, small enough not to keep other sockets waiting."""
_PARCELS_PER_S = 1_000
"""A parcel arrives whole, so that it takes the bottleneck a millisecond at most."""


class HopPath:
    """Hops that parcels pass one after another. Shared by all connections of a node."""

    def __init__(self, hops: Sequence[Hop]) -> None:
        self.hops = tuple(hops)
        self.is_cut = False
        """Nothing crosses; what is sent meanwhile has to be sent again, or is lost."""
        self.delivered_bytes = 0
        """Bytes of streams, taken off at the end."""
        self.parcel_bytes = 0
        """Payload that travels in one piece at most, in whole packets."""
        self.delay_us = 0
        """Propagation, without queues and jitter."""
        self.update_totals()

    def update_totals(self) -> None:
        """A hop is another one now."""
        rate = self._narrowest().bits_per_s
        packets = rate // (8 * (PACKET_BYTES + HEADER_BYTES) * _PARCELS_PER_S)
        most = min(max(1, packets), _PARCEL_PACKETS_MAX) if rate else _PARCEL_PACKETS_MAX
        self.parcel_bytes = most * PACKET_BYTES
        self.delay_us = sum(hop.direction.delay_us for hop in self.hops)

    def model(self, back: "HopPath", control: CongestionControl) -> NetworkPath:
        """What the transfer model is to know of this way."""
        narrowest = self._narrowest()
        lossiest = max((hop.direction for hop in self.hops), key=lambda each: each.loss)
        arrives = 1.0
        for hop in self.hops:
            arrives *= 1 - hop.direction.loss
        return NetworkPath(
            rtt_us=Microseconds(self.delay_us + back.delay_us),
            bits_per_s=narrowest.bits_per_s,
            loss=1 - arrives,
            burst_packets=lossiest.burst_packets,
            queue_ms=narrowest.queue_ms,
            congestion_control=control,
        )

    def full_hop(self, wire_bytes: int) -> Hop | None:
        """The first hop whose buffer has no room."""
        for hop in self.hops:
            if not hop.has_room(wire_bytes):
                return hop
        return None

    def carry(self, wire_bytes: int, out: Deed, *, behind: int = 0) -> None:
        """Send a parcel through the hops behind the first ``behind``; ``out`` is its arrival."""
        if behind == len(self.hops):
            out()
            return
        self.hops[behind].carry(wire_bytes, lambda: self.carry(wire_bytes, out, behind=behind + 1))

    def _narrowest(self) -> LinkDirection:
        directions = (hop.direction for hop in self.hops)
        return min(directions, key=lambda each: each.bits_per_s or 1 << 62)


def wire_bytes(payload_bytes: int) -> int:
    """What a payload takes of a link's rate, headers included; an empty packet is a header."""
    return payload_bytes + packets(payload_bytes) * HEADER_BYTES


def packets(payload_bytes: int) -> int:
    """How many packets a payload travels in; one at least."""
    return max(1, -(-payload_bytes // PACKET_BYTES))
