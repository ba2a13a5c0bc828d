import itertools
import statistics

import pytest

from hypergpu.units import Microseconds, Milliseconds
from netsim.link import CongestionControl, Link, LinkDirection, LinkTrace, Shape, TraceRow
from netsim.measure.ends import HEADER_BYTES, NS_PER_S, Arrivals
from netsim.measure.probe import BackendClaim
from netsim.network.backends import BACKENDS
from netsim.network.options import Backend
from tests.conformance.netsim.backends import for_each

MBIT = 1_000_000
# What a busy machine adds between a packet's arrival and the program that notes its time.
TOLERANCE_MS = 3.0
PIECE_US = 800_000


def link(
    delay_ms: float = 5,
    mbit_s: float = 0,
    *,
    jitter_ms: float = 0,
    loss: float = 0,
    burst: float = 1,
    **others: float,
) -> Link:
    both = LinkDirection(
        delay_us=Microseconds(round(delay_ms * 1000)),
        jitter_us=Microseconds(round(jitter_ms * 1000)),
        bits_per_s=round(mbit_s * MBIT),
        queue_ms=Milliseconds(400),
        loss=loss,
        burst_packets=burst,
        **others,  # type: ignore[arg-type]
    )
    return Link(up=both, down=both)


def reordering(arrivals: Arrivals) -> float:
    """Return the share of arrivals after which one came that was sent before them."""
    pairs = itertools.pairwise(arrivals.numbers)
    return sum(number > next_number for number, next_number in pairs) / len(arrivals.numbers)


@for_each(BackendClaim.DELAY)
async def test_a_round_trip_takes_both_delays(backend: Backend) -> None:
    async with BACKENDS[backend].probe(Shape(link=link(25)), 1) as network:
        trips = await network.round_trips(count=10, gap_us=Microseconds(55_000))
    trips_ms = [trip / 1e6 for trip in trips.trips_ns]
    assert len(trips_ms) == 10
    # A busy machine adds to many of them, and hardly to all.
    assert 49.9 <= min(trips_ms) <= 50 + 4 * TOLERANCE_MS


@for_each(BackendClaim.DELAY, BackendClaim.LOSS)
@pytest.mark.parametrize("delay_ms", [10, 150])
async def test_a_datagram_takes_its_delay_and_is_never_early(
    backend: Backend, delay_ms: int
) -> None:
    async with BACKENDS[backend].probe(Shape(link=link(delay_ms)), 1) as network:
        probes = await network.probes("up", count=300, gap_us=Microseconds(2000))
    delays_ms = probes.delays_ms()
    assert probes.loss() == 0
    assert min(delays_ms) >= delay_ms
    # A busy machine adds to many of them, and hardly to nearly all.
    assert statistics.quantiles(delays_ms, n=10)[0] <= delay_ms + TOLERANCE_MS / 2
    assert statistics.median(delays_ms) <= delay_ms + 4 * TOLERANCE_MS


@for_each(BackendClaim.JITTER, BackendClaim.LOSS)
async def test_jitter_wanders_around_the_delay_and_keeps_the_order(backend: Backend) -> None:
    asked_link = link(40, jitter_ms=10, jitter_memory_ms=50)
    async with BACKENDS[backend].probe(Shape(link=asked_link), 3) as network:
        probes = await network.probes("down", count=1000, gap_us=Microseconds(2500))
    delays_ms = probes.delays_ms()
    assert reordering(probes) == 0
    # Two and a half seconds hold some 25 independent delays, and a busy machine adds a few late
    # ones: percentiles do not mind them, means do.
    percentiles_ms = statistics.quantiles(delays_ms, n=100)
    assert statistics.median(delays_ms) == pytest.approx(40, abs=8)
    assert 4 <= (percentiles_ms[83] - percentiles_ms[15]) / 2 <= 18
    calm_ms = [min(max(each, percentiles_ms[1]), percentiles_ms[97]) for each in delays_ms]
    assert statistics.correlation(calm_ms[:-1], calm_ms[1:]) > 0.6


@for_each(BackendClaim.LOSS)
@pytest.mark.parametrize(("loss", "burst"), [(0.05, 1), (0.02, 4)])
async def test_datagrams_are_lost_in_bursts_as_asked(
    backend: Backend, loss: float, burst: float
) -> None:
    asked_link = link(1, loss=loss, burst=burst)
    async with BACKENDS[backend].probe(Shape(link=asked_link), 5) as network:
        probes = await network.probes("up", count=20_000, gap_us=Microseconds(150))
    assert probes.loss() == pytest.approx(loss, abs=0.006)
    assert probes.burst_packets() == pytest.approx(burst, rel=0.25)


@for_each(BackendClaim.RATE, BackendClaim.LOSS)
@pytest.mark.parametrize("mbit_s", [2, 8])
async def test_a_flood_comes_out_at_the_rate(backend: Backend, mbit_s: int) -> None:
    async with BACKENDS[backend].probe(Shape(link=link(5, mbit_s)), 1) as network:
        arrivals = await network.flood("up", bits_per_s=round(1.5 * mbit_s * MBIT), for_s=1.5)
    assert arrivals.saturated_bits_per_s() == pytest.approx(mbit_s * MBIT, rel=0.1)


def bits_per_s_between(arrivals: Arrivals, start_ns: int, end_ns: int) -> float:
    """Return the rate in a stretch of a flood, headers included.

    A full bottleneck sends each packet from the arrival before it to its own; what of that lies
    in the stretch counts.
    """
    within = 0.0
    for begun_ns, ended_ns in itertools.pairwise(arrivals.received_ns):
        inside_ns = min(ended_ns, end_ns) - max(begun_ns, start_ns)
        if ended_ns > begun_ns:
            within += max(inside_ns, 0) / (ended_ns - begun_ns)
        else:
            within += start_ns <= ended_ns < end_ns
    bits = (arrivals.payload_bytes + HEADER_BYTES) * 8
    return within * bits * NS_PER_S / (end_ns - start_ns)


@for_each(BackendClaim.RATE, BackendClaim.TRACE, BackendClaim.LOSS)
async def test_each_piece_of_a_trace_carries_its_own_rate(backend: Backend) -> None:
    rates = [8, 1, 4]
    rows = tuple(
        TraceRow(at_us=Microseconds(piece * PIECE_US), up_bits_per_s=rate * MBIT)
        for piece, rate in enumerate(rates)
    )
    trace = LinkTrace(rows, Microseconds(len(rates) * PIECE_US))
    async with BACKENDS[backend].probe(Shape(link=link(5, 4), traces=(trace,)), 1) as network:
        arrivals = await network.flood("up", bits_per_s=12 * MBIT, for_s=4 * PIECE_US / 1e6)
    first_ns, last_ns = arrivals.received_ns[0], arrivals.received_ns[-1]
    tenth_ns = NS_PER_S // 10
    tenths = [
        bits_per_s_between(arrivals, at_ns, at_ns + tenth_ns) / MBIT
        for at_ns in range(first_ns, last_ns - tenth_ns, tenth_ns)
    ]
    for rate in rates:
        near = [tenth for tenth in tenths if abs(tenth - rate) <= 0.15 * rate]
        assert len(near) >= 3, (rate, tenths)


@for_each(BackendClaim.REORDERING, BackendClaim.DUPLICATION)
async def test_packets_overtake_and_arrive_twice_as_asked(backend: Backend) -> None:
    asked_link = link(30, reordering=0.1, duplication=0.05)
    async with BACKENDS[backend].probe(Shape(link=asked_link), 2) as network:
        probes = await network.probes("up", count=2000, gap_us=Microseconds(600))
    assert probes.loss() == 0
    assert len(probes.numbers) / len(set(probes.numbers)) - 1 == pytest.approx(0.05, abs=0.03)
    assert reordering(probes) == pytest.approx(0.1, abs=0.07)


@for_each(BackendClaim.CONGESTION)
async def test_loss_slows_a_stream_of_cubic_far_below_the_rate(backend: Backend) -> None:
    async def mbit_s(loss: float) -> float:
        asked_link = link(50, 20, loss=loss)
        assert asked_link.congestion_control is CongestionControl.CUBIC
        async with BACKENDS[backend].probe(Shape(link=asked_link), 4) as network:
            arrivals = await network.stream("down", for_s=3)
        return sum(arrivals.bytes_in_bin) * 8 / 3 / MBIT

    assert await mbit_s(0) > 6
    assert await mbit_s(0.02) < 4
