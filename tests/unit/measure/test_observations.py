"""Observations of nodes and lines, and the forecast of a finish that is made of them."""

import pytest
from msgspec.structs import replace

from coordinator.core.network.line import (
    carried_rate,
    goodput_of,
    likely_loss,
    limit_bits_per_s,
    loss_of_goodput,
    loss_share,
    mean_burst,
    seen_rate,
    slow_start_us,
)
from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import (
    Conditions,
    Estimate,
    Finish,
    NodeReading,
    Observation,
    PacketTrain,
    RoundTrip,
    SocketReport,
    StepTime,
    TransferDirection,
    TransferTime,
    median_reading,
)
from coordinator.core.network.work_forecast import (
    FinishForecast,
    RoundWork,
    finish_forecast,
    transfer_forecast,
)
from hypergpu.units import Bytes, Microseconds, Milliseconds

AT = Milliseconds(1_000)
UNKNOWN = NodeReading()


def after(*observations: Observation, reading: NodeReading = UNKNOWN) -> NodeReading:
    for observation in observations:
        reading = add_observation(reading, observation)
    return reading


def probe(took_us: int) -> RoundTrip:
    return RoundTrip(AT, Microseconds(took_us))


def transfer_of(
    size: int,
    took_ms: int,
    connections: int = 1,
    direction: TransferDirection = TransferDirection.UP,
) -> TransferTime:
    return TransferTime(AT, direction, Bytes(size), Microseconds(took_ms * 1000), connections)


def finish_of(forecast_ms: int, took_ms: int) -> Finish:
    return Finish(AT, Milliseconds(forecast_ms), Milliseconds(took_ms))


def test_the_least_round_trip_is_that_of_the_newest_ten() -> None:
    reading = after(probe(20_000), *(probe(50_000 + i) for i in range(9)))
    assert reading.least_round_trip_us == 20_000
    reading = after(probe(60_000), reading=reading)
    assert reading.least_round_trip_us == 50_000
    assert len(reading.newest_round_trips_us) == 10


def test_loss_is_a_posterior_that_forgets() -> None:
    reading = after(*(PacketTrain(AT, 20, 2, 1) for _ in range(200)))
    assert reading.packets_sent == pytest.approx(400, rel=0.01)
    assert loss_share(reading) == pytest.approx(40.5 / 401, rel=0.01)
    assert mean_burst(reading) == pytest.approx(41 / 21, rel=0.01)
    clean = after(*(PacketTrain(AT, 20, 0, 0) for _ in range(100)), reading=reading)
    assert (loss_share(clean) or 1) < 0.002


def test_before_any_train_loss_is_not_known_and_one_clean_train_rules_little_out() -> None:
    assert loss_share(NodeReading()) is None
    assert loss_share(after(PacketTrain(AT, 20, 0, 0))) == pytest.approx(0.5 / 21)


def test_a_train_that_contradicts_itself_is_bounded() -> None:
    reading = after(PacketTrain(AT, 20, 50, 90), PacketTrain(AT, 0, 5, 5))
    assert (reading.packets_sent, reading.packets_lost, reading.bursts_lost) == (20, 20, 20)


def test_step_time_is_that_of_one_step() -> None:
    assert after(StepTime(AT, 40, Milliseconds(4_000))).step_us.mean == 100_000
    assert after(StepTime(AT, 0.75, Milliseconds(150))).step_us.mean == 200_000
    assert after(StepTime(AT, 0, Milliseconds(5))).step_us.count == 0


def test_a_large_transfer_shows_the_rate_without_slow_start() -> None:
    without = after(transfer_of(10_000_000, 10_000))
    assert without.up_bits_per_s.mean == pytest.approx(8e6)
    reading = after(probe(100_000), transfer_of(10_000_000, 10_000))
    assert 8e6 < reading.up_bits_per_s.mean < 9e6
    assert reading.down_bits_per_s.count == 0
    assert reading.up_conditions.round_trip_us == 100_000


def test_a_small_transfer_hardly_moves_what_large_ones_have_shown() -> None:
    large = after(probe(50_000), *(transfer_of(4_000_000, 3_600) for _ in range(10)))
    small = after(transfer_of(16_000, 200), reading=large)
    assert small.up_bits_per_s.mean == pytest.approx(large.up_bits_per_s.mean, rel=0.01)


def test_a_small_transfer_that_takes_seconds_counts() -> None:
    large = after(probe(50_000), *(transfer_of(4_000_000, 3_600) for _ in range(10)))
    slow_reading = after(transfer_of(64_000, 5_000), transfer_of(64_000, 5_000), reading=large)
    assert slow_reading.up_bits_per_s.mean < 0.02 * large.up_bits_per_s.mean


def test_slow_start_is_not_taken_for_a_slow_line() -> None:
    # Three round trips of slow start, and one more that nobody can explain.
    known_reading = after(probe(100_000), *(transfer_of(40_000_000, 8_000) for _ in range(10)))
    small = after(*(transfer_of(150_000, 400) for _ in range(20)), reading=known_reading)
    assert small.up_bits_per_s.mean == pytest.approx(known_reading.up_bits_per_s.mean)


def test_a_faster_line_is_seen_even_by_transfers_that_slow_start_dominates() -> None:
    slow = after(probe(100_000), *(transfer_of(1_000_000, 8_300) for _ in range(10)))
    fast = after(*(transfer_of(1_000_000, 650) for _ in range(4)), reading=slow)
    assert fast.up_bits_per_s.mean > 20 * slow.up_bits_per_s.mean


def test_more_connections_that_come_to_more_are_no_surprise() -> None:
    lossy = [PacketTrain(AT, 20, 1, 1)] * 30
    one = after(probe(100_000), *lossy, *(transfer_of(4_000_000, 40_000) for _ in range(10)))
    four = after(transfer_of(4_000_000, 10_000, 4), reading=one)
    assert four.up_bits_per_s.count == 11
    assert four.up_bits_per_s.mean == pytest.approx(3.2e6, rel=0.15)
    assert four.up_conditions.connections == 4


def test_where_probes_are_blocked_goodput_bounds_the_loss() -> None:
    blocked_report = SocketReport(AT, "cubic", is_probing_blocked=True)
    reading = after(probe(100_000), blocked_report, transfer_of(4_000_000, 20_000))
    first = loss_share(reading)
    assert first is not None
    assert 0.001 < first < 0.05
    # Four connections that come to no more were held back by the line, not by losses.
    four = after(transfer_of(4_000_000, 20_000, 4), reading=reading)
    assert loss_share(four) == pytest.approx(first * 1.05)
    assert loss_share(after(blocked_report, PacketTrain(AT, 20, 20, 1))) is None


def test_bbr_says_nothing_of_losses() -> None:
    reading = after(probe(100_000), SocketReport(AT, "bbr", True), transfer_of(4_000_000, 20_000))
    assert reading.loss_bound == 0


def test_a_lasting_error_of_forecasts_is_corrected() -> None:
    reading = NodeReading()
    for _ in range(12):
        reading = after(finish_of(round(1000 * reading.correction), 1500), reading=reading)
    assert reading.correction == pytest.approx(1.5, rel=0.02)
    assert reading.forecast_error.mean < 0.05


def test_two_late_finishes_correct_nothing() -> None:
    reading = after(*[finish_of(1000, 1000)] * 5, *[finish_of(1000, 9000)] * 2)
    assert reading.correction == 1.0
    reading = after(finish_of(1000, 9000), reading=reading)
    assert reading.correction > 1.0


def test_a_correction_stays_within_its_bounds() -> None:
    for took_ms, bound in ((1, 0.5), (1_000_000, 3.0)):
        reading = after(*[finish_of(1000, took_ms)] * 40)
        assert reading.correction == pytest.approx(bound)


def test_the_error_of_a_forecast_made_of_assumptions_is_forgotten() -> None:
    reading = after(finish_of(10_000, 1_000), finish_of(1_000, 1_100))
    assert reading.forecast_error.mean == pytest.approx(1 / 11)


def test_a_finish_without_a_forecast_teaches_nothing() -> None:
    assert after(finish_of(0, 1_000), finish_of(1_000, 0)) == NodeReading()


def test_what_a_host_says_replaces_what_it_said() -> None:
    reading = after(SocketReport(AT, "cubic", True, "bbr"), SocketReport(AT, "bbr", False, "cubic"))
    expected_values = ("bbr", "cubic", False)
    controls = (reading.congestion_control, reading.coordinator_congestion_control)
    assert (*controls, reading.is_probing_blocked) == expected_values


def test_nothing_absurd_is_refused() -> None:
    absurd = (
        probe(0),
        transfer_of(0, 5),
        transfer_of(5, 0),
        replace(transfer_of(5, 5), connections=0),
    )
    reading = after(*absurd)
    assert reading.round_trip_us.count == 0
    assert reading.up_bits_per_s.count == 1


RTT = Microseconds(100_000)
LOSSY = NodeReading(
    round_trip_us=Estimate(100_000.0, 5_000.0, 20),
    least_round_trip_us=RTT,
    up_bits_per_s=Estimate(3e6, 3e5, 20),
    up_conditions=Conditions(RTT, 1),
    packets_sent=400.0,
    packets_lost=4.0,
    bursts_lost=4.0,
    congestion_control="cubic",
)


def goodput(reading: NodeReading, connections: int) -> float:
    return goodput_of(reading, TransferDirection.UP, connections).mean


def test_the_rate_that_a_transfer_was_made_with_is_the_rate_that_is_seen() -> None:
    for bits_per_s in (1e6, 1e7, 5e7):
        for size in (400_000, 4_000_000):
            took_us = size * 8e6 / bits_per_s + slow_start_us(size, bits_per_s, RTT, 2)
            sample = seen_rate(size, Microseconds(round(took_us)), RTT, 2)
            if not sample.is_least:
                assert sample.bits_per_s == pytest.approx(bits_per_s, rel=0.01)


def test_connections_add_up_where_losses_are_the_limit() -> None:
    assert goodput(LOSSY, 1) == pytest.approx(3e6)
    assert goodput(LOSSY, 4) == pytest.approx(12e6, rel=0.2)


def test_connections_gain_nothing_where_the_line_is_the_limit() -> None:
    clean = replace(LOSSY, packets_lost=0.0, bursts_lost=0.0)
    assert goodput(clean, 8) == pytest.approx(3e6, rel=0.01)
    bbr = replace(LOSSY, congestion_control="bbr")
    assert goodput(bbr, 8) == pytest.approx(3e6, rel=0.01)


def test_connections_that_gained_nothing_are_not_missed() -> None:
    # Four came to much less than losses allow four: it was the line, and fewer reach it too.
    line = replace(LOSSY, up_conditions=Conditions(RTT, 16))
    assert goodput(line, 8) == pytest.approx(3e6, rel=0.02)


def test_a_longer_round_trip_lowers_what_losses_allow_before_any_transfer_shows_it() -> None:
    farther = replace(LOSSY, least_round_trip_us=Microseconds(300_000))
    assert goodput(farther, 1) < 0.6 * goodput(LOSSY, 1)
    assert goodput_of(farther, TransferDirection.UP, 1).deviation / goodput(farther, 1) > 0.2


def test_a_shorter_round_trip_promises_nothing() -> None:
    assert goodput(replace(LOSSY, least_round_trip_us=Microseconds(20_000)), 1) == 3e6


def test_an_unknown_line_carries_what_is_typical_or_what_losses_allow() -> None:
    unknown_line = replace(LOSSY, up_bits_per_s=Estimate())
    limit = limit_bits_per_s(unknown_line, TransferDirection.UP, RTT, 1)
    assert goodput(unknown_line, 1) < min(limit, 1e7)
    typical = goodput_of(unknown_line, TransferDirection.UP, 1, typical_bits_per_s=100_000.0)
    assert typical.mean == pytest.approx(100_000, rel=0.01)
    assert (typical.deviation, typical.count) == (typical.mean, 0)


def test_a_carried_rate_moves_with_the_limit_as_far_as_the_limit_was_met() -> None:
    assert carried_rate(10.0, before=5.0, after=10.0) == 20.0
    assert carried_rate(10.0, before=1000.0, after=2000.0) == pytest.approx(10.0, rel=1e-6)
    assert 10.0 < carried_rate(10.0, before=12.0, after=24.0) < 20.0


def test_the_loss_that_goodput_leaves_room_for_is_the_one_that_allows_it() -> None:
    reno = replace(LOSSY, packets_lost=8.0, bursts_lost=8.0)
    rate = limit_bits_per_s(reno, TransferDirection.UP, RTT, 1)
    assert loss_of_goodput(rate, RTT) == pytest.approx(0.02, rel=0.2)
    assert loss_of_goodput(4 * rate, RTT, 4) == pytest.approx(loss_of_goodput(rate, RTT))
    assert loss_of_goodput(1e12, RTT) == pytest.approx(0.0, abs=1e-9)


def test_forecasts_reckon_with_no_loss_until_one_was_seen() -> None:
    assert likely_loss(NodeReading(packets_sent=400.0)) == 0.0
    assert likely_loss(LOSSY) == 0.01


def test_a_line_that_was_never_probed_is_not_taken_for_one_without_losses() -> None:
    unprobed_reading = replace(
        LOSSY, packets_sent=0.0, packets_lost=0.0, bursts_lost=0.0, loss_bound=0.02
    )
    assert likely_loss(unprobed_reading) == 0.02
    assert goodput(unprobed_reading, 4) > 2 * goodput(unprobed_reading, 1)
    probed_reading = replace(unprobed_reading, packets_sent=20.0)
    assert likely_loss(probed_reading) == 0


FORECAST_RTT = Microseconds(50_000)
KNOWN = NodeReading(
    round_trip_us=Estimate(60_000.0, 6_000.0, 20),
    least_round_trip_us=FORECAST_RTT,
    up_bits_per_s=Estimate(8e6, 4e5, 20),
    down_bits_per_s=Estimate(40e6, 2e6, 20),
    up_conditions=Conditions(FORECAST_RTT, 1),
    down_conditions=Conditions(FORECAST_RTT, 1),
    step_us=Estimate(100_000.0, 5_000.0, 20),
    packets_sent=400.0,
    forecast_error=Estimate(0.05, 0.02, 10),
)
WORK = RoundWork(
    inner_steps=80,
    up_bytes=Bytes(4_000_000),
    down_bytes=Bytes(1_000_000),
)


def forecast_of(reading: NodeReading, work: RoundWork = WORK) -> FinishForecast:
    forecast = finish_forecast(reading, work)
    assert forecast is not None
    return forecast


def test_a_forecast_is_the_sum_of_computing_moving_and_asking() -> None:
    forecast = forecast_of(KNOWN)
    assert forecast.parts.compute_ms == 8_000
    assert 4_000 < forecast.parts.up_ms < 4_500  # 4 s for the bytes, and slow start
    assert 200 < forecast.parts.down_ms < 600
    assert forecast.parts.round_trips_ms == 120
    assert forecast.mean_ms == forecast.parts.compute_ms + forecast.parts.moving_ms


def test_a_correction_stretches_all_of_it() -> None:
    corrected_forecast = forecast_of(replace(KNOWN, correction=1.5))
    assert corrected_forecast.mean_ms == pytest.approx(1.5 * forecast_of(KNOWN).mean_ms, abs=3)


def test_small_transfers_are_round_trips_and_large_ones_bytes() -> None:
    small, large = (
        transfer_forecast(KNOWN, TransferDirection.UP, Bytes(size)).mean_us
        for size in (60_000, 40_000_000)
    )
    assert small > 2 * FORECAST_RTT
    assert large == pytest.approx(40e6, rel=0.02)


def test_nothing_takes_two_round_trips_and_nothing_known_gives_no_forecast() -> None:
    no_work = forecast_of(KNOWN, RoundWork())
    assert no_work.mean_ms == no_work.parts.round_trips_ms == 120
    assert finish_forecast(NodeReading(), WORK) is None
    assert finish_forecast(NodeReading(packets_sent=20.0), WORK) is None


@pytest.mark.parametrize("field", ["round_trip_us", "up_bits_per_s", "down_bits_per_s", "step_us"])
def test_what_is_not_known_is_assumed_and_widens_the_spread(field: str) -> None:
    partly = forecast_of(replace(KNOWN, **{field: Estimate()}))
    assert partly.deviation_ms > forecast_of(KNOWN).deviation_ms


def test_the_fleet_stands_in_for_what_is_not_known() -> None:
    fleet = [replace(KNOWN, step_us=Estimate(mean, 1.0, 5)) for mean in (2e5, 3e5, 9e5)]
    forecast = finish_forecast(replace(KNOWN, step_us=Estimate()), WORK, median_reading(fleet))
    assert forecast is not None
    assert forecast.parts.compute_ms == 80 * 300


def test_a_typical_node_is_the_middle_of_those_that_are_there() -> None:
    fleet = [replace(KNOWN, step_us=Estimate(mean, 1.0, 5)) for mean in (1e5, 2e5, 9e5)]
    absent_reading = replace(KNOWN, step_us=Estimate(5e6, 1.0, 5), is_present=False)
    assert median_reading([*fleet, absent_reading, NodeReading()]).step_us.mean == 2e5
    assert median_reading([]) == NodeReading()


def test_a_forecast_that_was_never_compared_is_less_sure() -> None:
    fresh = forecast_of(replace(KNOWN, forecast_error=Estimate()))
    assert fresh.deviation_ms > 0.25 * fresh.mean_ms > forecast_of(KNOWN).deviation_ms


def test_errors_of_the_past_widen_the_spread() -> None:
    erring_forecast = forecast_of(replace(KNOWN, forecast_error=Estimate(0.4, 0.1, 10)))
    assert erring_forecast.deviation_ms == pytest.approx(0.4 * erring_forecast.mean_ms, abs=1)


def test_losses_stall_even_small_transfers_over_fast_lines() -> None:
    lossy = replace(KNOWN, packets_lost=40.0, bursts_lost=40.0)
    size = Bytes(100_000)
    clean_us = transfer_forecast(KNOWN, TransferDirection.UP, size).mean_us
    assert transfer_forecast(lossy, TransferDirection.UP, size).mean_us > 1.5 * clean_us


def test_chances_and_quantiles_agree() -> None:
    forecast = FinishForecast(Milliseconds(10_000), Milliseconds(1_000))
    for share in (0.1, 0.5, 0.75, 0.9, 0.99):
        by_ms = forecast.quantile_ms(share)
        assert forecast.chance_by(by_ms) == pytest.approx(share, abs=0.001)
    sure = FinishForecast(Milliseconds(10_000), Milliseconds(0))
    limits = (Milliseconds(9_999), Milliseconds(10_000))
    assert [sure.chance_by(limit) for limit in limits] == [0.0, 1.0]
