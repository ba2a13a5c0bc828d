import random

from coordinator.core.transfer.draw import CarriedWindow, ConnectionStart, transfer_us
from coordinator.core.transfer.forecast import TransferForecast, forecast_transfer, round_path
from coordinator.core.transfer.path import NetworkPath
from hypergpu.units import Bytes, Microseconds

LOSSY = NetworkPath(rtt_us=Microseconds(100_000), loss=0.002, burst_packets=2)
SIZE = Bytes(4_000_000)


def test_a_forecast_on_a_clean_path_is_sure() -> None:
    clean = forecast_transfer(NetworkPath(rtt_us=Microseconds(20_000), bits_per_s=20_000_000), SIZE)
    assert len(clean.times_us) == 1
    assert clean.spread == 0
    assert clean.sample_us(0.0) == clean.sample_us(1.0) == clean.median_us


def test_a_forecast_on_a_lossy_path_has_the_median_and_the_spread_of_draws() -> None:
    seen = sorted(transfer_us(LOSSY, SIZE, random.Random(seed).random) for seed in range(201))
    expected = forecast_transfer(LOSSY, SIZE)
    assert seen[60] <= expected.median_us <= seen[140]
    half_width = (seen[167] - seen[33]) / 2 / seen[100]
    assert half_width / 2 <= expected.spread <= half_width * 2


def test_draws_lie_between_the_shortest_and_the_longest_time() -> None:
    times = TransferForecast(
        (Microseconds(10), Microseconds(20), Microseconds(40)), (CarriedWindow(10),) * 3
    )
    assert [times.sample_us(chance) for chance in (0, 0.25, 0.5, 0.75, 1)] == [10, 15, 20, 30, 40]


def test_a_cold_connection_shakes_hands_first() -> None:
    path = NetworkPath(rtt_us=Microseconds(80_000))
    cold = forecast_transfer(path, SIZE, ConnectionStart.COLD).median_us
    assert cold - forecast_transfer(path, SIZE).median_us == 160_000


def test_rounding_moves_no_number_by_more_than_two_percent() -> None:
    for number in (1, 997, 123_456, 98_765_432):
        path = NetworkPath(rtt_us=Microseconds(number), bits_per_s=number, loss=0.0123)
        near = round_path(path)
        assert abs(near.rtt_us - number) <= 0.02 * number
        assert abs(near.bits_per_s - number) <= 0.02 * number
        assert abs(near.loss - 0.0123) <= 0.02 * 0.0123
    assert round_path(NetworkPath(rtt_us=Microseconds(0))) == NetworkPath(rtt_us=Microseconds(0))


def test_a_transfer_goes_on_with_the_window_that_another_left() -> None:
    path, size_bytes = NetworkPath(rtt_us=Microseconds(100_000)), Bytes(250_000)
    first = forecast_transfer(path, size_bytes)
    second = forecast_transfer(path, size_bytes, ConnectionStart.IDLE, first.left[0])
    assert second.median_us < first.median_us - path.rtt_us


def test_what_a_loss_has_taught_slows_the_next_transfer_down() -> None:
    path = NetworkPath(rtt_us=Microseconds(100_000))
    fresh, careful = CarriedWindow(20), CarriedWindow(20, slow_start_until=20)
    times = [
        forecast_transfer(path, SIZE, ConnectionStart.IDLE, each).median_us
        for each in (fresh, careful)
    ]
    assert times[1] > 2 * times[0]
