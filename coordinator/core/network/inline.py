"""Whether a blob travels inline, beside its assignment on the control stream, or is fetched.

Inline, it costs no round trip of its own. But the stream is one connection: what is queued behind
the blob waits for it, an echo of a heartbeat among others, and several connections of a fetch move
much faster where packets are lost or windows have to grow. So only what is small for the line goes
inline.

Nobody times what went inline. A line is measured by what is fetched, so one fetch a minute stays
where a blob is large enough to measure a line at all.
"""

from typing import NamedTuple

from coordinator.core.network.line import round_trip_us
from coordinator.core.network.reading import NodeReading, TransferDirection
from coordinator.core.network.work_forecast import transfer_forecast
from hypergpu.goodput import SMALLEST_BYTES
from hypergpu.line_limits import INLINE_BYTES_MAX, RANGE_BYTES_MIN
from hypergpu.units import Bytes, Microseconds, Milliseconds

UNMEASURED_BYTES_MAX = Bytes(32 << 10)
"""For a line of which nothing is known: 26 ms at the 10 Mbit/s that are assumed of such lines."""
QUEUED_BYTES_MAX = Bytes(16 << 20)
"""Blobs of all streams together that wait to be written: each is a copy once it is written."""
TRIPS_MOST = 3
"""Round trips for which a stream may be busy with a blob."""
BUSY_US_LEAST = Microseconds(20_000)
"""So long it may be busy however short the round trip is."""
_WORTH = 1.1
"""A fetch has to save this much of the time: it costs both sides a request."""
MEASURED_MS = Milliseconds(60_000)
"""Age of a line's newest measurement from which a blob is fetched again."""


class InlineRequest(NamedTuple):
    """A blob that a node lacks, and the state of the streams. Times are of one clock."""

    size_bytes: Bytes
    connections: int
    """Connections that a fetch may use."""
    now_ms: Milliseconds
    fetched_ms: Milliseconds | None = None
    """When the node was last left to fetch a blob that measures a line; None: never."""
    is_waiting: bool = False
    """A blob waits in the node's stream already, or the node is slow to take messages in."""
    queued_bytes: Bytes = Bytes(0)
    """Blobs that wait in all streams to be written."""


class InlineChoice(NamedTuple):
    """How a blob gets to a node."""

    is_inline: bool
    reason: str


def inline_choice(reading: NodeReading, request: InlineRequest) -> InlineChoice:
    """Choose how a blob gets to a node. The same arguments give the same choice.

    Inline goes what is at most 256 KiB, keeps the stream busy for at most three round trips or
    20 ms, and arrives about as soon as over connections of its own, which begin a round trip later.
    Over a line that is not measured it is at most 32 KiB.
    Costs tens of microseconds, and a millisecond where losses are new.

    Args:
        reading: Of the node.
        request: The blob, and the streams.
    """
    if reason := _obstacle(request):
        return InlineChoice(False, reason)
    size_bytes = request.size_bytes
    is_measured = bool(reading.down_bits_per_s.count and reading.round_trip_us.count)
    if size_bytes >= SMALLEST_BYTES and _is_due(reading, request):
        return InlineChoice(False, "its fetch measures the line")
    if is_measured:
        return _by_line(reading, request)
    if size_bytes > UNMEASURED_BYTES_MAX:
        most = f"{UNMEASURED_BYTES_MAX:,} bytes"
        return InlineChoice(False, f"{size_bytes:,} bytes, the line is not measured: over {most}")
    return InlineChoice(True, f"{size_bytes:,} bytes, few for a line that is not measured")


def _obstacle(request: InlineRequest) -> str:
    """What keeps a blob out whatever the line; empty: nothing does."""
    if request.size_bytes > INLINE_BYTES_MAX:
        return f"{request.size_bytes:,} bytes: over {INLINE_BYTES_MAX:,}"
    if request.is_waiting:
        return "the node's stream has not taken in what is queued for it"
    if request.queued_bytes + request.size_bytes > QUEUED_BYTES_MAX:
        return f"{request.queued_bytes:,} bytes wait in the streams of all nodes"
    return ""


def _is_due(reading: NodeReading, request: InlineRequest) -> bool:
    """Whether the line was last given something to measure it by too long ago."""
    moments_ms = [] if request.fetched_ms is None else [request.fetched_ms]
    if reading.down_bits_per_s.count:
        moments_ms.append(reading.down_bits_per_s.at_ms)
    return not moments_ms or request.now_ms - max(moments_ms) >= MEASURED_MS


def _by_line(reading: NodeReading, request: InlineRequest) -> InlineChoice:
    size_bytes, trip_us = request.size_bytes, round_trip_us(reading)
    busy_us = _moving_us(reading, size_bytes, 1)
    text = f"{size_bytes:,} bytes keep the stream busy for {busy_us / 1000:.1f} ms"
    most_us = max(BUSY_US_LEAST, TRIPS_MOST * trip_us)
    if busy_us > most_us:
        return InlineChoice(False, f"{text}: over {most_us / 1000:.1f} ms")
    # As many as `RangeQueue.cut` of the node opens for it.
    connections = min(request.connections, size_bytes // RANGE_BYTES_MIN)
    if connections > 1:
        fetch_us = trip_us + _moving_us(reading, size_bytes, connections)
        if busy_us > _WORTH * fetch_us:
            fetch = f"a fetch over {connections} connections takes {fetch_us / 1000:.1f} ms"
            return InlineChoice(False, f"{text}, {fetch}")
    return InlineChoice(True, f"{text}: at most {most_us / 1000:.1f} ms")


def _moving_us(reading: NodeReading, size_bytes: Bytes, connections: int) -> float:
    direction = TransferDirection.DOWN
    return transfer_forecast(reading, direction, size_bytes, connections=connections).mean_us
