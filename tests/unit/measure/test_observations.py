import pytest
from msgspec.structs import replace

from coordinator.core.measure.line import loss_share, mean_burst
from coordinator.core.measure.observations import add_observation, availability
from coordinator.core.measure.reading import (
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
    UpdateVerdict,
)
from hypergpu.units import Bytes, Microseconds, Milliseconds

AT = Milliseconds(1_000)
UNKNOWN = NodeReading()
TEN_MINUTES = 600_000


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
    crawled = after(transfer_of(64_000, 5_000), transfer_of(64_000, 5_000), reading=large)
    assert crawled.up_bits_per_s.mean < 0.02 * large.up_bits_per_s.mean


def test_slow_start_is_not_taken_for_a_slow_line() -> None:
    # Three round trips of slow start, and one more that nobody can explain.
    known = after(probe(100_000), *(transfer_of(40_000_000, 8_000) for _ in range(10)))
    small = after(*(transfer_of(150_000, 400) for _ in range(20)), reading=known)
    assert small.up_bits_per_s.mean == pytest.approx(known.up_bits_per_s.mean)


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
    blocked = SocketReport(AT, "cubic", is_probing_blocked=True)
    reading = after(probe(100_000), blocked, transfer_of(4_000_000, 20_000))
    first = loss_share(reading)
    assert first is not None
    assert 0.001 < first < 0.05
    # Four connections that come to no more were held back by the line, not by losses.
    four = after(transfer_of(4_000_000, 20_000, 4), reading=reading)
    assert loss_share(four) == pytest.approx(first * 1.05)
    assert loss_share(after(blocked, PacketTrain(AT, 20, 20, 1))) is None


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


def test_availability_halves_in_ten_minutes_of_absence_and_comes_back_as_slowly() -> None:
    went = after(Presence(AT, is_present=False))
    assert availability(went, AT) == 1.0
    later = Milliseconds(AT + TEN_MINUTES)
    assert availability(went, later) == pytest.approx(0.5)
    came = after(Presence(later, is_present=True), reading=went)
    assert availability(came, later) == pytest.approx(0.5)
    assert availability(came, Milliseconds(later + TEN_MINUTES)) == pytest.approx(0.75)


def test_a_node_that_came_late_was_never_away() -> None:
    reading = after(Presence(Milliseconds(5_000_000), is_present=True))
    assert availability(reading, Milliseconds(5_000_000)) == 1.0


def test_verdicts_are_counted_and_forgotten() -> None:
    reading = after(
        *[UpdateVerdict(AT, is_accepted=False)] * 3, *[UpdateVerdict(AT, is_accepted=True)] * 100
    )
    assert reading.updates_judged == pytest.approx(20, rel=0.01)
    assert reading.updates_accepted / reading.updates_judged > 0.99


def test_what_a_host_says_replaces_what_it_said() -> None:
    reading = after(SocketReport(AT, "cubic", True, "bbr"), SocketReport(AT, "bbr", False, "cubic"))
    expected = ("bbr", "cubic", False)
    told = (reading.congestion_control, reading.coordinator_congestion_control)
    assert (*told, reading.is_probing_blocked) == expected


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
