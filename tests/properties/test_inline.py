"""Which blobs travel inside an assignment: what holds for any line and any state of the streams."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.network.inline import (
    BUSY_US_LEAST,
    MEASURED_MS,
    QUEUED_BYTES_MAX,
    TRIPS_MOST,
    UNMEASURED_BYTES_MAX,
    InlineRequest,
    inline_choice,
)
from coordinator.core.network.line import round_trip_us
from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import (
    NodeReading,
    PacketTrain,
    RoundTrip,
    TransferDirection,
    TransferTime,
)
from coordinator.core.network.work_forecast import transfer_forecast
from hypergpu.goodput import SMALLEST_BYTES
from hypergpu.line_limits import INLINE_BYTES_MAX
from hypergpu.units import Bytes, Microseconds, Milliseconds

NOW = Milliseconds(1_000_000)


def line(
    rtt_us: int, took_us: int, *, lost: int = 0, connections: int = 1, at_ms: int = NOW
) -> NodeReading:
    """A line that moved 1 MiB in this time."""
    reading, now = NodeReading(), Milliseconds(at_ms)
    for observation in (
        RoundTrip(now, Microseconds(rtt_us)),
        PacketTrain(now, 400, lost, lost),
        TransferTime(
            now, TransferDirection.DOWN, Bytes(1 << 20), Microseconds(took_us), connections
        ),
    ):
        reading = add_observation(reading, observation)
    return reading


LINES = st.builds(
    line,
    st.integers(100, 1_000_000),
    st.integers(1_000, 60_000_000),
    lost=st.integers(0, 40),
    connections=st.integers(1, 16),
    at_ms=st.integers(NOW - 3 * MEASURED_MS, NOW),
)
REQUESTS = st.builds(
    InlineRequest,
    size_bytes=st.integers(1, 2 * INLINE_BYTES_MAX).map(Bytes),
    connections=st.integers(1, 16),
    now_ms=st.just(NOW),
    fetched_ms=st.none() | st.integers(NOW - 3 * MEASURED_MS, NOW).map(Milliseconds),
    is_waiting=st.sampled_from((False, False, False, True)),
    queued_bytes=st.integers(0, QUEUED_BYTES_MAX).map(Bytes),
)


@given(st.just(NodeReading()) | LINES, REQUESTS)
def test_a_choice_is_repeatable_has_a_reason_and_keeps_to_every_limit(
    reading: NodeReading, request: InlineRequest
) -> None:
    choice = inline_choice(reading, request)
    assert choice == inline_choice(reading, request)
    assert choice.reason
    if not choice.is_inline:
        return
    size_bytes = request.size_bytes
    assert size_bytes <= INLINE_BYTES_MAX
    assert size_bytes + request.queued_bytes <= QUEUED_BYTES_MAX
    assert not request.is_waiting
    if not reading.down_bits_per_s.count:
        assert size_bytes <= UNMEASURED_BYTES_MAX
        return
    down = TransferDirection.DOWN
    busy_us = transfer_forecast(reading, down, size_bytes).mean_us
    assert busy_us <= max(BUSY_US_LEAST, TRIPS_MOST * round_trip_us(reading))


@given(LINES, REQUESTS)
def test_what_is_smaller_goes_inside_where_a_larger_blob_does(
    reading: NodeReading, request: InlineRequest
) -> None:
    """But for what only a fetch measures, which depends on the size alone."""
    request = request._replace(connections=1, fetched_ms=NOW)
    if inline_choice(reading, request).is_inline:
        smaller = request._replace(size_bytes=Bytes(-(-request.size_bytes // 2)))
        assert inline_choice(reading, smaller).is_inline


@given(LINES, REQUESTS)
def test_a_line_is_measured_once_a_minute_however_small_its_blobs_are_for_it(
    reading: NodeReading, request: InlineRequest
) -> None:
    later = request._replace(now_ms=Milliseconds(NOW + MEASURED_MS))
    if request.size_bytes >= SMALLEST_BYTES:
        assert not inline_choice(reading, later).is_inline


def choose(
    reading: NodeReading, size_bytes: int, *, connections: int = 1, fetched_ms: int | None = None
) -> tuple[bool, str]:
    at_ms = None if fetched_ms is None else Milliseconds(fetched_ms)
    return inline_choice(reading, InlineRequest(Bytes(size_bytes), connections, NOW, at_ms))


def test_each_reason_says_what_decided() -> None:
    fibre, lan = line(50_000, 250_000), line(500, 12_000)
    busy = "bytes keep the stream busy for"
    assert choose(fibre, 25_000) == (True, f"25,000 {busy} 50.6 ms: at most 150.0 ms")
    assert choose(fibre, 300_000) == (False, "300,000 bytes: over 262,144")
    assert choose(fibre, 256_000) == (False, f"256,000 {busy} 205.0 ms: over 150.0 ms")
    assert choose(lan, 256_000) == (True, f"256,000 {busy} 3.4 ms: at most 20.0 ms")
    slow = line(50_000, 8_000_000)
    assert choose(slow, 25_000) == (False, f"25,000 {busy} 190.7 ms: over 150.0 ms")
    fetch = "a fetch over 7 connections takes 54.8 ms"
    assert choose(fibre, 80_000, connections=8) == (False, f"80,000 {busy} 102.4 ms, {fetch}")
    new_line = NodeReading()
    assert choose(new_line, 25_000) == (False, "its fetch measures the line")
    few = "25,000 bytes, few for a line that is not measured"
    assert choose(new_line, 25_000, fetched_ms=NOW) == (True, few)
    many = "64,000 bytes, the line is not measured: over 32,768 bytes"
    assert choose(new_line, 64_000, fetched_ms=NOW) == (False, many)
