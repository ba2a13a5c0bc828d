"""A way through the network as the transfer model sees it: plain numbers of one direction."""

from enum import StrEnum

import msgspec

from coordinator.core.transfer import constants
from hypergpu.units import Bytes, Microseconds, Milliseconds


class CongestionControl(StrEnum):
    """Congestion control of the sending host."""

    CUBIC = "cubic"
    RENO = "reno"
    BBR = "bbr"


class NetworkPath(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link and what the sender does on it."""

    rtt_us: Microseconds
    """There and back, without queueing."""
    bits_per_s: int = 0
    """Rate of the bottleneck, headers included; 0: no limit."""
    loss: float = 0.0
    """Share of packets lost, in [0, 1)."""
    burst_packets: float = 1.0
    """Mean number of packets in a row that are lost together. TCP sees one event in each burst."""
    queue_ms: Milliseconds = Milliseconds(100)
    """Buffer before the bottleneck, as the time it takes to drain."""
    congestion_control: CongestionControl = CongestionControl.CUBIC
    packet_bytes: Bytes = Bytes(1448)
    """Payload of a full packet."""
    buffer_bytes: Bytes = Bytes(4 * 1024 * 1024)
    """The smaller of the sender's and the receiver's socket buffer."""

    @property
    def events_per_packet(self) -> float:
        """How often a burst of losses begins: ``loss / burst`` for rare losses."""
        if self.loss <= 0:
            return 0.0
        return min(0.5, self.loss / (self.burst_packets * (1 - self.loss) + self.loss))

    @property
    def packet_us(self) -> float:
        """How long a full packet occupies the bottleneck."""
        if not self.bits_per_s:
            return 0.0
        return (self.packet_bytes + constants.PACKET_HEADER_BYTES) * 8e6 / self.bits_per_s

    @property
    def full_packets(self) -> float:
        """In flight when the pipe is full and nothing queues."""
        return self.rtt_us / self.packet_us if self.bits_per_s else float("inf")

    @property
    def overflow_packets(self) -> float:
        """In flight when the queue overflows."""
        if not self.bits_per_s:
            return float("inf")
        return self.full_packets + max(2.0, self.queue_ms * 1000 / self.packet_us)

    @property
    def buffer_packets(self) -> float:
        """In flight when the socket buffer is full."""
        return max(2.0, self.buffer_bytes * constants.BUFFER_SHARE / self.packet_bytes)

    @property
    def timeout_us(self) -> Microseconds:
        """Before a loss that nothing later reveals is sent again."""
        return Microseconds(self.rtt_us + constants.RTO_FLOOR_US)

    def packets(self, size_bytes: int) -> int:
        """How many packets the payload takes, framing included."""
        return max(1, -(-int(size_bytes * (1 + constants.STREAM_OVERHEAD)) // self.packet_bytes))


def recovery_rounds(events_per_packet: float, loss: float, packets: float) -> float:
    """Mean round trips until every packet of a window is through, losses and their repeats.

    A buffer moves on only when its first hole is filled. Of n packets at least one is lost in a
    try, in its repeat and so on: 1 + sum over k of 1 - (1 - p^k)^n. It gives BBR's 222 Mbit/s over
    100 ms without loss 119, 102, 86 and 69 at 0.1, 1, 2 and 5 %; measured were 147, 101, 95 and 74.
    """
    rounds = 1.0
    chance = events_per_packet
    while chance * packets > 0.01:
        rounds += 1 - (1 - chance) ** packets
        chance *= loss
    return rounds
