"""When uploads begin where the coordinator's own line cannot take all of them at once."""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.network.tcp import PACKET_HEADER_BYTES, STREAM_OVERHEAD
from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Milliseconds

_PACKET_BYTES = 1448


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
    """Rate of the node's own line."""


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
    latest, bits_left = 0.0, 0.0
    for node in reversed(order):
        one = uploads[node]
        bits_left += one.size_bytes * 8e6
        alone = one.size_bytes * 8e6 / one.bits_per_s
        latest = max(latest, one.ready_us + bits_left / line_bits_per_s, one.ready_us + alone)
    return latest
