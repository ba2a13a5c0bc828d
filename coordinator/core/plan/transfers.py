"""How bytes move: over how many connections, and in which order uploads begin when the line of the
coordinator cannot take all of them at once.

A sender that takes each loss for congestion settles at what losses allow, whatever the line could
carry; several of them reach further. A sender that knows its line's rate needs no second one.
"""

from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.measure.forecast import transfer_forecast
from coordinator.core.measure.line import congestion_control_of, is_loss_inferred, likely_loss
from coordinator.core.measure.reading import NodeReading, TransferDirection
from coordinator.core.transfer.constants import PACKET_HEADER_BYTES, STREAM_OVERHEAD
from coordinator.core.transfer.path import CongestionControl
from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Milliseconds

_PACKET_BYTES = 1448
_SMALL_BYTES = 64 * 1024
"""Smaller transfers are over before a second connection helps."""
_SHARE_BYTES = 16 * 1024
"""A connection's least share of a transfer."""
_WITHOUT_LOSS = 4
"""For their slow starts, which are faster together, and for losses that no probe has met yet."""
_COUNTS = (4, 8, 16)
_WORTH = 1.05
"""More connections have to save this much of the time."""
_HOLD = 1.15
"""What a node has is kept unless it takes this much longer than the best: a few lost probes more or
less are no reason to shake hands again.
"""


def connection_count(reading: NodeReading, usual: NodeReading, size_bytes: Bytes, held: int) -> int:
    """How many connections: 1 where senders know their rate, else 4, and up to 16 where packets
    are lost, the fewest that are about as fast as any by the transfer model.

    Args:
        reading: What is known of the node.
        usual: Of its fleet, for what is not.
        size_bytes: The largest thing that moves in a round.
        held: What the node was given last; 0: nothing.
    """
    heeding = [
        way
        for way in TransferDirection
        if congestion_control_of(reading, way) is not CongestionControl.BBR
    ]
    if size_bytes < _SMALL_BYTES or not heeding:
        return 1
    if not likely_loss(reading):
        return max(_WITHOUT_LOSS, held)
    lossy = _cautious(reading)

    def moving_us(count: int) -> float:
        return sum(
            transfer_forecast(lossy, way, size_bytes, connections=count, typical=usual).mean_us
            for way in heeding
        )

    useful = [count for count in _COUNTS if count * _SHARE_BYTES <= size_bytes]
    times = {count: moving_us(count) for count in useful}
    best = min(times.values())
    if held in times and times[held] <= _HOLD * best:
        return held
    return next(count for count in useful if times[count] <= _WORTH * best)


def _cautious(reading: NodeReading) -> NodeReading:
    """The reading with as many losses as one in forty lines like it has.

    Twenty probes now and then tell little, and a line that is believed better than it is seems to
    be its own limit: nobody would find out what more connections can do. Losses that are only
    inferred are the most that there can be, and are left as they are.
    """
    if is_loss_inferred(reading):
        return reading
    lost = reading.packets_lost
    more = min((lost + 2 * sqrt(lost)) / lost, 0.5 * reading.packets_sent / lost)
    return replace(reading, packets_lost=lost * more, bursts_lost=reading.bursts_lost * more)


def payload_bits_per_s(line_bits_per_s: int) -> int:
    """Payload rate of a line without its headers: goodputs add up to this."""
    share = _PACKET_BYTES / (_PACKET_BYTES + PACKET_HEADER_BYTES) / (1 + STREAM_OVERHEAD)
    return int(line_bits_per_s * share)


class PlannedUpload(NamedTuple):
    """An update that will be sent."""

    ready_us: int
    """When its inner steps are done, after the round's opening."""
    size_bytes: Bytes
    bits_per_s: float
    """What the node's own line carries."""


def upload_delays(
    uploads: Mapping[NodeId, PlannedUpload], line_bits_per_s: int
) -> dict[NodeId, Milliseconds]:
    """How long each finished update waits, in milliseconds, so that each upload has the rate of
    its own line.

    First come, first served: a node begins as soon as the coordinator's line has its rate free.
    The last update is in no later than if all had shared the line, or else nobody waits.

    Args:
        uploads: What each node will send.
        line_bits_per_s: What the coordinator's line carries; 0: not known, nobody waits.
    """
    nobody = dict.fromkeys(uploads, Milliseconds(0))
    if not line_bits_per_s or sum(one.bits_per_s for one in uploads.values()) <= line_bits_per_s:
        return nobody
    order = sorted(uploads, key=lambda node: (uploads[node].ready_us, node))
    starts: dict[NodeId, float] = {}
    under_way: list[tuple[float, float]] = []
    for node in order:
        one = uploads[node]
        rate = min(one.bits_per_s, line_bits_per_s)
        start = _first_room(under_way, one.ready_us, line_bits_per_s - rate)
        starts[node] = start
        under_way.append((start + one.size_bytes * 8e6 / rate, rate))
    if max(end for end, _ in under_way) > 1.02 * _shared_end_us(uploads, order, line_bits_per_s):
        return nobody
    return {
        node: Milliseconds(int(starts[node] - uploads[node].ready_us) // 1000) for node in order
    }


def _first_room(under_way: list[tuple[float, float]], ready_us: float, most: float) -> float:
    """When the uploads under way first leave enough of the line. They all began before."""
    ends = sorted(end for end, _ in under_way if end > ready_us)
    for start in [ready_us, *ends]:
        if sum(rate for end, rate in under_way if end > start) <= most * (1 + 1e-9):
            return start
    return ready_us


def _shared_end_us(
    uploads: Mapping[NodeId, PlannedUpload], order: list[NodeId], line_bits_per_s: int
) -> float:
    """The earliest that a line which never idles can have carried everything."""
    latest, left = 0.0, 0.0
    for node in reversed(order):
        one = uploads[node]
        left += one.size_bytes * 8e6
        alone = one.size_bytes * 8e6 / one.bits_per_s
        latest = max(latest, one.ready_us + left / line_bits_per_s, one.ready_us + alone)
    return latest
