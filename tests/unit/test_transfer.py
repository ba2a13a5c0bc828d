"""The transfer model: its forecasts, judged by transfers that were measured."""

import random
from functools import cache
from statistics import median
from typing import NamedTuple

import pytest

from coordinator.core.network.tcp import CongestionControl, NetworkPath, steady_packets_per_us
from coordinator.core.network.transfer_forecast import (
    CarriedWindow,
    TransferForecast,
    Window,
    draw_transfer,
    forecast_transfer,
    round_path,
)
from hypergpu.units import Bytes, Microseconds

MIB = 1024 * 1024
CUBIC, RENO, BBR = CongestionControl.CUBIC, CongestionControl.RENO, CongestionControl.BBR


class Pull(NamedTuple):
    """Bytes of payload and the seconds that they took."""

    path: NetworkPath
    size_bytes: Bytes
    seconds: float

    @property
    def name(self) -> str:
        return _cell_name(self.path, f"{self.size_bytes // MIB}MiB")


class Throughput(NamedTuple):
    """Payload that arrived within so many seconds of a transfer without end."""

    path: NetworkPath
    seconds: float
    mbit_per_s: float

    @property
    def name(self) -> str:
        return _cell_name(self.path, f"{self.seconds:.0f}s")


def _cell_name(path: NetworkPath, what: str) -> str:
    rate = f"{path.bits_per_s / 1e6:g}Mbit" if path.bits_per_s else "uncapped"
    loss = f"{path.loss:.1%}-in-bursts-of-{path.burst_packets:g}"
    return f"{path.congestion_control.value}-{path.rtt_us / 1000:g}ms-{rate}-{loss}-{what}"


def path(
    control: CongestionControl, rtt_ms: float, *, loss: float = 0.0, burst: float = 1, mbit: int = 0
) -> NetworkPath:
    """A path in the units of the tables."""
    return NetworkPath(
        rtt_us=Microseconds(round(rtt_ms * 1000)),
        bits_per_s=mbit * 1_000_000,
        loss=loss,
        burst_packets=burst,
        congestion_control=control,
    )


def _pull(path_: NetworkPath, mib: int, seconds: float) -> Pull:
    return Pull(path_, Bytes(mib * MIB), seconds)


# Where a quantity was measured more than once its median or middle stands here.
PULLS = (
    _pull(path(CUBIC, 100), 4, 1.02),
    _pull(path(RENO, 100), 4, 1.21),
    _pull(path(BBR, 100), 4, 0.94),
    _pull(path(CUBIC, 100), 100, 4.24),
    _pull(path(RENO, 100), 100, 3.78),
    _pull(path(BBR, 100), 100, 4.22),
    _pull(path(CUBIC, 100, loss=0.01), 4, 21.5),
    _pull(path(RENO, 100, loss=0.01), 4, 21.5),
    _pull(path(BBR, 100, loss=0.01), 4, 1.39),  # 1.47 and 1.30
    _pull(path(BBR, 100, loss=0.01), 100, 8.3),
    _pull(path(CUBIC, 100, loss=0.001), 4, 1.54),  # 1.0 to 2.75
    _pull(path(CUBIC, 100, loss=0.01, burst=4), 4, 3.1),
    _pull(path(CUBIC, 100, loss=0.01, burst=16), 4, 1.01),
    _pull(path(BBR, 100, loss=0.01, burst=16), 4, 0.96),
    _pull(path(CUBIC, 0.3, mbit=20), 4, 1.74),
    _pull(path(BBR, 0.3, mbit=20), 4, 1.75),
    _pull(path(CUBIC, 0.3, mbit=20), 100, 43.5),
    _pull(path(BBR, 0.3, mbit=20), 100, 43.8),
    _pull(path(CUBIC, 100, mbit=20), 4, 2.16),
    _pull(path(BBR, 100, mbit=20), 4, 2.17),
    _pull(path(CUBIC, 100, mbit=20), 100, 43.9),
    _pull(path(BBR, 100, mbit=20), 100, 46.1),
)

# One run each in windows of 8 to 10 s; two of 50 s; two of 30 s with netem under a virtual clock.
THROUGHPUTS = (
    Throughput(path(RENO, 100, loss=0.001), 9, 8.2),
    Throughput(path(CUBIC, 100, loss=0.001), 9, 13.8),
    Throughput(path(BBR, 100, loss=0.001), 9, 147),
    Throughput(path(RENO, 100, loss=0.01), 9, 2.3),
    Throughput(path(CUBIC, 100, loss=0.01), 9, 4.0),
    Throughput(path(BBR, 100, loss=0.01), 9, 67),
    Throughput(path(RENO, 100, loss=0.02), 9, 0.63),
    Throughput(path(CUBIC, 100, loss=0.02), 9, 1.7),
    Throughput(path(BBR, 100, loss=0.02), 9, 95),
    Throughput(path(RENO, 100, loss=0.05), 9, 0.63),
    Throughput(path(CUBIC, 100, loss=0.05), 9, 0.21),
    Throughput(path(BBR, 100, loss=0.05), 9, 74),
    Throughput(path(CUBIC, 100, loss=0.01), 50, 1.3),
    Throughput(path(RENO, 100, loss=0.01), 50, 1.5),
    Throughput(path(CUBIC, 100, loss=0.01, mbit=20), 30, 1.73),
    Throughput(path(BBR, 100, loss=0.01, mbit=20), 30, 18.2),
)


DRAWS = 31


def cell_id(cell: Pull | Throughput) -> str:
    return cell.name


def pulled_s(cell: Pull) -> list[float]:
    """Drawn times of the cell's pull, shortest first."""
    times_us = [
        draw_transfer(cell.path, cell.size_bytes, random.Random(seed).random).took_us
        for seed in range(DRAWS)
    ]
    return sorted((time_us + cell.path.rtt_us / 2) / 1e6 for time_us in times_us)


@cache
def moved_mbit_per_s(cell: Throughput) -> list[float]:
    """Drawn rates of the cell: how much is through when its time is up, by bisection."""

    def rate(seed: int) -> float:
        low, high = 1, 1 << 40
        while high - low > low // 50 + 1:
            middle = (low + high) // 2
            took_us = draw_transfer(cell.path, Bytes(middle), random.Random(seed).random).took_us
            low, high = (middle, high) if took_us <= cell.seconds * 1e6 else (low, middle)
        return low * 8 / 1e6 / cell.seconds

    return sorted(map(rate, range(DRAWS)))


PULLED = {cell.name: pulled_s(cell) for cell in PULLS}
PULL_ERRORS = {cell.name: median(PULLED[cell.name]) / cell.seconds - 1 for cell in PULLS}


def test_half_of_the_measured_pulls_are_met_within_a_twentieth() -> None:
    assert median(map(abs, PULL_ERRORS.values())) <= 0.05


@pytest.mark.parametrize("cell", [cell for cell in PULLS if not cell.path.loss], ids=cell_id)
def test_a_pull_without_losses_is_met_within_a_fifth(cell: Pull) -> None:
    assert abs(PULL_ERRORS[cell.name]) <= 0.2


@pytest.mark.parametrize("cell", [cell for cell in PULLS if cell.path.loss], ids=cell_id)
def test_a_pull_with_losses_took_what_the_model_often_draws(cell: Pull) -> None:
    drawn_s = PULLED[cell.name]
    assert drawn_s[0] * 0.9 <= cell.seconds <= drawn_s[-1]
    assert abs(PULL_ERRORS[cell.name]) <= 1


@pytest.mark.parametrize("cell", THROUGHPUTS, ids=cell_id)
def test_a_measured_rate_is_one_that_the_model_draws(cell: Throughput) -> None:
    drawn_rates = moved_mbit_per_s(cell)
    # One run a cell; the worst is CUBIC at 5 %, measured at 0.21 where 0.4 to 1.6 are drawn.
    assert drawn_rates[0] / 2.5 <= cell.mbit_per_s <= drawn_rates[-1] * 1.7


def test_the_rates_are_met_within_a_quarter_on_average() -> None:
    errors = [median(moved_mbit_per_s(cell)) / cell.mbit_per_s - 1 for cell in THROUGHPUTS]
    assert median(map(abs, errors)) <= 0.25


LOSSY = NetworkPath(rtt_us=Microseconds(100_000), loss=0.002, burst_packets=2)
SIZE = Bytes(4_000_000)


def test_a_forecast_on_a_clean_path_is_sure() -> None:
    clean = forecast_transfer(NetworkPath(rtt_us=Microseconds(20_000), bits_per_s=20_000_000), SIZE)
    assert len(clean.times_us) == 1
    assert clean.spread == 0
    assert clean.sample_us(0.0) == clean.sample_us(1.0) == clean.median_us


def test_a_forecast_on_a_lossy_path_has_the_median_and_the_spread_of_draws() -> None:
    times_us = sorted(
        draw_transfer(LOSSY, SIZE, random.Random(seed).random).took_us for seed in range(201)
    )
    forecast = forecast_transfer(LOSSY, SIZE)
    assert times_us[60] <= forecast.median_us <= times_us[140]
    half_width = (times_us[167] - times_us[33]) / 2 / times_us[100]
    assert half_width / 2 <= forecast.spread <= half_width * 2


def test_draws_lie_between_the_shortest_and_the_longest_time() -> None:
    times = TransferForecast(
        (Microseconds(10), Microseconds(20), Microseconds(40)), (CarriedWindow(10),) * 3
    )
    assert [times.sample_us(chance) for chance in (0, 0.25, 0.5, 0.75, 1)] == [10, 15, 20, 30, 40]


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
    second = forecast_transfer(path, size_bytes, first.left[0])
    assert second.median_us < first.median_us - path.rtt_us


def test_what_a_loss_has_taught_slows_the_next_transfer_down() -> None:
    path = NetworkPath(rtt_us=Microseconds(100_000))
    fresh, careful = CarriedWindow(20), CarriedWindow(20, slow_start_until=20)
    times = [forecast_transfer(path, SIZE, each).median_us for each in (fresh, careful)]
    assert times[1] > 2 * times[0]


RTT_US = Microseconds(100_000)
CLEAN = NetworkPath(rtt_us=RTT_US)
PACKET = CLEAN.packet_bytes


def never() -> float:
    """Dice that put the next loss as far away as they can."""
    return 1 - 2**-53


def fill(window: Window, now_us: Microseconds) -> Microseconds:
    """Send a whole window; how long it is held back."""
    return window.send(window.window_bytes(now_us), now_us)


def a_round(window: Window, now_us: Microseconds) -> Microseconds:
    """Send a whole window and hear of its arrival; the time after it."""
    fill(window, now_us)
    later = Microseconds(now_us + RTT_US)
    window.acknowledge(window.in_flight_bytes, later)
    return later


def test_a_fresh_window_is_ten_packets_and_grows_by_the_round() -> None:
    window = Window(CLEAN, never)
    assert window.window_bytes(Microseconds(0)) == 10 * PACKET
    later = a_round(window, Microseconds(0))
    assert window.window_bytes(later) == 18 * PACKET


def test_what_left_with_the_mark_does_not_end_the_next_round() -> None:
    window = Window(CLEAN, never)
    fill(window, Microseconds(0))
    window.acknowledge(PACKET, RTT_US)
    assert window.window_bytes(RTT_US) == 18 * PACKET
    # The first window's other packets come back a moment later: still the same round trip.
    window.send(9 * PACKET, RTT_US)
    window.acknowledge(9 * PACKET, RTT_US)
    assert window.window_bytes(RTT_US) == 18 * PACKET


def test_a_window_that_was_not_used_does_not_grow() -> None:
    window = Window(CLEAN, never)
    window.send(PACKET, Microseconds(0))
    window.acknowledge(PACKET, RTT_US)
    assert window.window_bytes(RTT_US) == 10 * PACKET


def test_a_loss_takes_three_tenths_of_a_cubic_window_and_holds_the_bytes_for_a_round_trip() -> None:
    path = NetworkPath(rtt_us=RTT_US, loss=0.2)
    window = Window(path, lambda: 0.5)
    assert fill(window, Microseconds(0)) == RTT_US
    window.acknowledge(window.in_flight_bytes, RTT_US)
    assert window.window_bytes(RTT_US) == 7 * PACKET


def test_losses_leave_the_window_of_bbr_alone() -> None:
    path = NetworkPath(rtt_us=RTT_US, loss=0.05, congestion_control=CongestionControl.BBR)
    window, now_us = Window(path, random.Random(1).random), Microseconds(0)
    for _ in range(40):
        now_us = a_round(window, now_us)
    assert window.window_bytes(now_us) > 100 * PACKET


def test_a_lost_small_message_waits_for_the_timer() -> None:
    window = Window(NetworkPath(rtt_us=RTT_US, loss=0.5), lambda: 0.0)
    assert window.send(100, Microseconds(0)) == 200_000
    assert Window(NetworkPath(rtt_us=Microseconds(3 * RTT_US), loss=0.5), lambda: 0.0).send(
        100, Microseconds(0)
    ) == Microseconds(600_000)


def test_a_window_beyond_the_queue_is_cut_without_a_drawn_loss() -> None:
    path = NetworkPath(rtt_us=RTT_US, bits_per_s=2_000_000, queue_ms=CLEAN.queue_ms)
    window, now_us = Window(path, never), Microseconds(0)
    most = 0
    for _ in range(200):
        now_us = a_round(window, now_us)
        most = max(most, window.window_bytes(now_us))
    assert most <= (path.overflow_packets + 2) * PACKET


def test_an_idle_connection_starts_again_from_ten_packets() -> None:
    window, now_us = Window(CLEAN, never), Microseconds(0)
    for _ in range(5):
        now_us = a_round(window, now_us)
    assert window.window_bytes(now_us) > 10 * PACKET
    assert window.window_bytes(Microseconds(now_us + 10_000_000)) == 10 * PACKET


def test_a_pause_halves_the_window_once_for_each_time_the_timer_could_run_out() -> None:
    window, now_us = Window(CLEAN, never), Microseconds(0)
    for _ in range(5):
        now_us = a_round(window, now_us)
    before = window.window_bytes(now_us)
    # RTT and 200 ms are a timeout; the last bytes left an RTT ago.
    later = Microseconds(now_us - RTT_US + 2 * CLEAN.timeout_us)
    assert window.window_bytes(later) == pytest.approx(before / 4, abs=PACKET)


def test_a_changed_link_keeps_the_window() -> None:
    window = Window(CLEAN, never)
    later = a_round(window, Microseconds(0))
    before = window.window_bytes(later)
    window.change_path(NetworkPath(rtt_us=Microseconds(50_000), loss=0.01))
    assert window.window_bytes(later) == before
    assert window.next_loss_bytes < 2**40


def test_equal_dice_give_equal_losses() -> None:
    path = NetworkPath(rtt_us=RTT_US, loss=0.01)
    holds = []
    for _ in range(2):
        window = Window(path, random.Random("a seed").random)
        holds.append([fill(window, Microseconds(0)) for _ in range(50)])
    assert holds[0] == holds[1]
    assert any(holds[0])


NEAR_SIZE = Bytes(10_000_000)


@pytest.mark.parametrize("control", list(CongestionControl))
@pytest.mark.parametrize("loss", [0.0, 0.01])
@pytest.mark.parametrize("bits_per_s", [0, 20_000_000])
def test_a_path_without_a_round_trip_has_a_forecast(
    control: CongestionControl, loss: float, bits_per_s: int
) -> None:
    path = NetworkPath(
        rtt_us=Microseconds(0), bits_per_s=bits_per_s, loss=loss, congestion_control=control
    )
    assert steady_packets_per_us(path) > 0
    dice = random.Random(1)
    assert Window(path, dice.random) is not None
    assert draw_transfer(path, NEAR_SIZE, dice.random).took_us >= 0
    least_us = int(NEAR_SIZE) * 8_000_000 // bits_per_s if bits_per_s else 0
    assert forecast_transfer(path, NEAR_SIZE).median_us >= least_us


def test_a_sawtooth_without_a_round_trip_fills_the_whole_rate() -> None:
    path = NetworkPath(rtt_us=Microseconds(0), bits_per_s=20_000_000)
    assert steady_packets_per_us(path) == pytest.approx(1 / path.packet_us)
