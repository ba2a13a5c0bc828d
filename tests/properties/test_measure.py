"""Estimators and forecasts of transfers: bounds that hold for whatever was observed."""

import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.network.line import loss_share, mean_burst
from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import (
    Conditions,
    Estimate,
    Finish,
    NodeReading,
    Observation,
    PacketTrain,
    Presence,
    RoundTrip,
    SocketReport,
    StepTime,
    TransferDirection,
    TransferTime,
    laplace_quantile,
    median_reading,
    update_estimate,
    update_rate,
)
from coordinator.core.network.tcp import CongestionControl, NetworkPath, steady_packets_per_us
from coordinator.core.network.transfer_forecast import draw_transfer, forecast_transfer
from coordinator.core.network.work_forecast import FinishForecast, RoundWork, finish_forecast
from hypergpu.units import Bytes, Microseconds, Milliseconds

TIMES = st.integers(0, 10**9).map(Milliseconds)
MICROSECONDS = st.integers(-1, 10**10).map(Microseconds)
COUNTS = st.integers(-1, 10**6)
NAMES = st.sampled_from(("", "cubic", "reno", "bbr", "bbr3", "odd"))
OBSERVATIONS: st.SearchStrategy[Observation] = st.one_of(
    st.builds(RoundTrip, TIMES, MICROSECONDS),
    st.builds(PacketTrain, TIMES, COUNTS, COUNTS, COUNTS),
    st.builds(
        TransferTime,
        TIMES,
        st.sampled_from(TransferDirection),
        st.integers(-1, 10**11).map(Bytes),
        MICROSECONDS,
        st.integers(-1, 64),
    ),
    st.builds(StepTime, TIMES, COUNTS, TIMES),
    st.builds(Finish, TIMES, TIMES, TIMES),
    st.builds(Presence, TIMES, st.booleans()),
    st.builds(SocketReport, TIMES, NAMES, st.booleans(), NAMES),
)
WORKS = st.builds(
    RoundWork,
    inner_steps=st.integers(0, 1000),
    up_bytes=st.integers(0, 10**9).map(Bytes),
    down_bytes=st.integers(0, 10**9).map(Bytes),
    connections=st.integers(1, 16),
)


@st.composite
def lines(draw: st.DrawFn) -> NodeReading:
    """A node of which everything is known."""
    rtt_us = draw(st.integers(200, 2_000_000).map(Microseconds))
    then = Conditions(draw(st.integers(200, 2_000_000).map(Microseconds)), draw(st.integers(1, 8)))
    lost_packets = draw(st.floats(0, 100))
    rates = st.floats(1e4, 1e10)
    return NodeReading(
        round_trip_us=Estimate(float(rtt_us), draw(st.floats(0, 1e5)), 9),
        least_round_trip_us=rtt_us,
        up_bits_per_s=Estimate(draw(rates), draw(st.floats(0, 1e6)), 9),
        down_bits_per_s=Estimate(draw(rates), draw(st.floats(0, 1e6)), 9),
        up_conditions=then,
        down_conditions=then,
        step_us=Estimate(draw(st.floats(1e2, 1e7)), 10.0, 9),
        packets_sent=400.0,
        packets_lost=lost_packets,
        bursts_lost=lost_packets / draw(st.floats(1, 10)),
        correction=draw(st.floats(0.5, 3)),
        congestion_control=draw(NAMES),
        coordinator_congestion_control=draw(NAMES),
    )


def forecast_of(reading: NodeReading, work: RoundWork) -> FinishForecast:
    forecast = finish_forecast(reading, work)
    assert forecast is not None
    return forecast


@given(seen=st.lists(OBSERVATIONS, max_size=40), work=WORKS)
@settings(deadline=None)
def test_whatever_is_observed_every_figure_stays_within_its_bounds(
    seen: list[Observation], work: RoundWork
) -> None:
    reading = NodeReading()
    for observation in seen:
        reading = add_observation(reading, observation)
    for estimate in (reading.round_trip_us, reading.up_bits_per_s, reading.step_us):
        assert bool(estimate.count) == (estimate.mean > 0)
        assert estimate.deviation >= 0
    assert 0.5 <= reading.correction <= 3
    assert 0 <= (loss_share(reading) or 0.0) <= 1
    assert mean_burst(reading) >= 1
    forecast = finish_forecast(reading, work, median_reading([reading]))
    if forecast is not None:
        assert forecast.mean_ms >= 0
        assert forecast.deviation_ms >= 0


@given(seen=st.lists(OBSERVATIONS, max_size=20))
def test_equal_observations_give_equal_readings(seen: list[Observation]) -> None:
    one = two = NodeReading()
    for observation in seen:
        one, two = add_observation(one, observation), add_observation(two, observation)
    assert one == two


@given(reading=lines(), work=WORKS, times=st.floats(1, 50))
@settings(deadline=None)
def test_a_longer_round_trip_never_makes_a_node_sooner(
    reading: NodeReading, work: RoundWork, times: float
) -> None:
    longer_us = Microseconds(round(reading.least_round_trip_us * times))
    mean = reading.round_trip_us.mean * times
    farther = replace(
        reading,
        least_round_trip_us=longer_us,
        round_trip_us=replace(reading.round_trip_us, mean=mean),
    )
    assert forecast_of(farther, work).mean_ms >= forecast_of(reading, work).mean_ms


@given(reading=lines(), work=WORKS, times=st.floats(1, 50))
@settings(deadline=None)
def test_a_faster_line_never_makes_a_node_later(
    reading: NodeReading, work: RoundWork, times: float
) -> None:
    faster = replace(
        reading,
        up_bits_per_s=replace(reading.up_bits_per_s, mean=reading.up_bits_per_s.mean * times),
        down_bits_per_s=replace(reading.down_bits_per_s, mean=reading.down_bits_per_s.mean * times),
    )
    assert forecast_of(faster, work).mean_ms <= forecast_of(reading, work).mean_ms


@given(reading=lines(), work=WORKS, more=st.integers(1, 10**9))
@settings(deadline=None)
def test_more_work_never_takes_less_time(reading: NodeReading, work: RoundWork, more: int) -> None:
    before = forecast_of(reading, work).mean_ms
    assert forecast_of(reading, replace(work, inner_steps=work.inner_steps + 1)).mean_ms >= before
    assert forecast_of(reading, replace(work, up_bytes=Bytes(work.up_bytes + more))).mean_ms >= (
        before
    )


@given(reading=lines(), work=WORKS, shares=st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)))
@settings(deadline=None)
def test_quantiles_and_chances_grow(
    reading: NodeReading, work: RoundWork, shares: tuple[float, float]
) -> None:
    forecast = forecast_of(reading, work)
    low, high = sorted(shares)
    assert 0 <= forecast.quantile_ms(low) <= forecast.quantile_ms(high)
    early, late = forecast.quantile_ms(low), forecast.quantile_ms(high)
    assert 0 <= forecast.chance_by(early) <= forecast.chance_by(late) <= 1


@given(level=st.floats(1, 1e9), seed=st.integers(0, 10_000))
def test_noise_of_five_percent_moves_a_mean_by_less(level: float, seed: int) -> None:
    dice = random.Random(seed)
    time, rate = Estimate(), Estimate()
    for _ in range(60):
        value = level * dice.uniform(0.95, 1.05)
        time = update_estimate(time, value, Milliseconds(0))
        rate = update_rate(rate, value, Milliseconds(0))
        assert abs(time.mean / level - 1) < 0.0501
        assert abs(rate.mean / level - 1) < 0.0501
    assert abs(time.mean / level - 1) < 0.04
    assert time.deviation < 0.06 * level
    assert laplace_quantile(time.mean, time.deviation, 0.99) < 1.3 * level


@given(
    values=st.lists(st.floats(50, 200), min_size=10, max_size=30),
    outlier=st.floats(1e-6, 1e12),
)
def test_no_single_observation_moves_a_settled_mean_by_more_than_half_its_deviation(
    values: list[float], outlier: float
) -> None:
    estimate = Estimate()
    for value in values:
        estimate = update_estimate(estimate, value, Milliseconds(0))
    settled_estimate = replace(estimate, drift=0.0, count=max(8, estimate.count))
    after = update_estimate(settled_estimate, outlier, Milliseconds(0))
    allowed_step = max(settled_estimate.deviation, 0.05 * settled_estimate.mean) / 2
    assert abs(after.mean - settled_estimate.mean) <= allowed_step * (1 + 1e-9)


CLEAN = st.builds(
    NetworkPath,
    rtt_us=st.integers(100, 600_000).map(Microseconds),
    bits_per_s=st.sampled_from((0, 500_000, 5_000_000, 50_000_000, 1_000_000_000)),
    queue_ms=st.integers(1, 1000).map(Milliseconds),
    congestion_control=st.sampled_from(CongestionControl),
)
PATHS = st.builds(
    lambda path, loss, burst: replace(path, loss=loss, burst_packets=burst),
    CLEAN,
    st.floats(0, 0.15),
    st.floats(1, 20),
)
SIZES = st.integers(1, 200_000_000).map(Bytes)


def drawn_us(path: NetworkPath, size_bytes: Bytes) -> Microseconds:
    return draw_transfer(path, size_bytes, random.Random(7).random).took_us


@given(path=PATHS, size_bytes=SIZES)
@settings(deadline=None)
def test_no_transfer_beats_light_or_the_bottleneck(path: NetworkPath, size_bytes: Bytes) -> None:
    took_us = drawn_us(path, size_bytes)
    assert took_us >= path.rtt_us // 2
    if path.bits_per_s:
        assert took_us >= size_bytes * 8e6 / path.bits_per_s * 0.99


@given(path=PATHS, size_bytes=SIZES)
@settings(deadline=None)
def test_equal_dice_give_equal_times(path: NetworkPath, size_bytes: Bytes) -> None:
    assert drawn_us(path, size_bytes) == drawn_us(path, size_bytes)


@given(path=CLEAN, size_bytes=SIZES, factor=st.floats(1.1, 10))
@settings(deadline=None)
def test_more_bytes_take_no_less_time(path: NetworkPath, size_bytes: Bytes, factor: float) -> None:
    # A queue of a packet or two drops the last one of two, which waits for a timeout; of three, the
    # third would have told of the loss at once.
    assume(path.queue_ms * 1000 >= 10 * path.packet_us)
    more = Bytes(round(size_bytes * factor))
    assert (
        forecast_transfer(path, more).median_us
        >= 0.98 * forecast_transfer(path, size_bytes).median_us
    )


@given(path=CLEAN, size_bytes=SIZES)
@settings(deadline=None)
def test_a_faster_bottleneck_takes_no_more_time(path: NetworkPath, size_bytes: Bytes) -> None:
    slow = replace(path, bits_per_s=2_000_000)
    fast = replace(path, bits_per_s=20_000_000)
    assert (
        forecast_transfer(fast, size_bytes).median_us
        <= 1.02 * forecast_transfer(slow, size_bytes).median_us
    )


@given(path=PATHS)
@settings(deadline=None)
def test_the_steady_rate_is_positive_and_within_the_bottleneck(path: NetworkPath) -> None:
    rate = steady_packets_per_us(path)
    assert rate > 0
    if path.bits_per_s:
        assert rate <= 1 / path.packet_us


@given(path=PATHS)
@settings(deadline=None)
def test_the_same_loss_in_longer_bursts_is_no_slower(path: NetworkPath) -> None:
    longer = replace(path, burst_packets=path.burst_packets * 3)
    assert steady_packets_per_us(longer) >= 0.99 * steady_packets_per_us(path)
