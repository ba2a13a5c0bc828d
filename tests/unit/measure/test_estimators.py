"""Estimators of lines and devices, and how many observations they need until they are right."""

import math
import random
from collections.abc import Callable
from statistics import mean

import pytest
from msgspec.structs import replace

from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import (
    Estimate,
    Finish,
    NodeReading,
    PacketTrain,
    RoundTrip,
    SocketReport,
    StepTime,
    TransferDirection,
    TransferTime,
    inverse,
    laplace_quantile,
    update_estimate,
    update_rate,
)
from coordinator.core.network.tcp import CongestionControl, NetworkPath
from coordinator.core.network.transfer_forecast import draw_transfer
from coordinator.core.network.work_forecast import RoundWork, finish_forecast
from hypergpu.units import Bytes, Microseconds, Milliseconds

AT = Milliseconds(7)


def settle(level: float, noise: float = 0.0, count: int = 40, seed: int = 3) -> Estimate:
    dice = random.Random(seed)
    estimate = Estimate()
    for _ in range(count):
        estimate = update_estimate(estimate, level * dice.uniform(1 - noise, 1 + noise), AT)
    return estimate


def test_the_first_observation_is_the_mean_and_may_be_off_by_half() -> None:
    assert update_estimate(Estimate(), 80.0, AT) == Estimate(80.0, 40.0, 1, AT, newest=80.0)


def test_what_is_hardly_believed_may_be_off_by_all_of_itself() -> None:
    first = update_estimate(Estimate(), 80.0, AT, weight=0.1)
    assert first.deviation == pytest.approx(76.0)


def test_the_first_few_observations_are_averaged() -> None:
    estimate = Estimate()
    for value in (90.0, 100.0, 110.0):
        estimate = update_estimate(estimate, value, AT)
    assert estimate.mean == pytest.approx(100.0)


def test_a_settled_mean_moves_by_an_eighth_of_what_an_observation_is_off() -> None:
    estimate = settle(100.0)
    assert update_estimate(estimate, 110.0, AT).mean == pytest.approx(estimate.mean + 10 / 8)


@pytest.mark.parametrize("times", [100.0, 0.01])
def test_one_absurd_observation_moves_a_settled_mean_by_half_a_deviation_at_most(
    times: float,
) -> None:
    estimate = settle(100.0, noise=0.1)
    after = update_estimate(estimate, 100.0 * times, AT)
    assert abs(after.mean - estimate.mean) <= max(estimate.deviation, 5.0) / 2 + 1e-9
    assert after.mean != estimate.mean


def test_no_single_observation_convinces_however_much_leans_its_way() -> None:
    estimate = replace(settle(100.0, noise=0.1), drift=2.2)
    assert update_estimate(estimate, 10_000.0, AT).count == estimate.count + 1


def test_an_outlier_is_forgotten_with_the_next_usual_observation() -> None:
    estimate = settle(100.0, noise=0.05)
    for value in (10_000.0, 99.0, 10_000.0, 101.0, 10_000.0, 100.0):
        estimate = update_estimate(estimate, value, AT)
    assert estimate.mean == pytest.approx(100.0, rel=0.5)
    assert estimate.count > 40


@pytest.mark.parametrize("times", [10.0, 0.1, 3.0, 1 / 3])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_two_observations_of_a_new_level_convince(times: float, noise: float) -> None:
    estimate = settle(100.0, noise)
    for _ in range(2):
        estimate = update_estimate(estimate, 100.0 * times, AT)
    assert estimate.mean == pytest.approx(100.0 * times)
    assert estimate.count == 1
    assert estimate.deviation == pytest.approx(50.0 * times)


@pytest.mark.parametrize("times", [10.0, 0.1, 3.0, 1 / 3])
@pytest.mark.parametrize("seed", range(10))
def test_three_convince_where_noise_leans_either_way(times: float, seed: int) -> None:
    estimate = settle(100.0, 0.2, seed=seed)
    for _ in range(3):
        estimate = update_estimate(estimate, 100.0 * times, AT)
    assert estimate.mean == pytest.approx(100.0 * times, rel=0.3)


def test_of_two_observations_of_a_new_level_the_one_that_claims_less_is_taken() -> None:
    up, down = settle(100.0), settle(100.0)
    for value in (900.0, 1200.0):
        up = update_estimate(up, value, AT)
        down = update_estimate(down, 10_000 / value, AT)
    assert up.mean == pytest.approx(900.0)
    assert down.mean == pytest.approx(10_000 / 900)


def test_a_level_that_is_half_again_as_high_convinces_too_if_it_stays() -> None:
    estimate = settle(100.0, noise=0.1)
    for _ in range(8):
        estimate = update_estimate(estimate, 150.0, AT)
    assert estimate.mean == pytest.approx(150.0, rel=0.1)


def test_a_rate_is_averaged_by_its_times() -> None:
    estimate = Estimate()
    for rate in (40.0, 60.0):
        estimate = update_rate(estimate, rate, AT)
    assert estimate.mean == pytest.approx(48.0)  # 2 / (1/40 + 1/60)


def test_a_rates_drift_is_negative_when_the_rate_falls() -> None:
    estimate = Estimate()
    for rate in (50.0,) * 10 + (5.0,):
        estimate = update_rate(estimate, rate, AT)
    assert estimate.drift < 0
    assert inverse(estimate).drift > 0


def test_what_is_no_positive_number_is_passed_over() -> None:
    estimate = settle(100.0)
    for value in (0.0, -5.0, math.inf, math.nan):
        assert update_estimate(estimate, value, AT) == estimate
        assert update_rate(estimate, value, AT) == estimate
    assert update_estimate(estimate, 50.0, AT, weight=0.0) == estimate


def test_a_late_observation_counts_but_makes_nothing_newer() -> None:
    estimate = update_estimate(settle(100.0), 104.0, Milliseconds(2))
    assert estimate.mean > 100.0
    assert estimate.at_ms == 7


def test_quantiles_are_those_of_laplace_and_never_negative() -> None:
    assert laplace_quantile(100.0, 10.0, 0.5) == 100.0
    assert laplace_quantile(100.0, 10.0, 0.9) == pytest.approx(116.1, abs=0.05)
    assert laplace_quantile(100.0, 10.0, 0.99) == pytest.approx(139.1, abs=0.05)
    assert 0 < laplace_quantile(100.0, 1000.0, 0.01) < 3


def test_the_lower_quartile_of_a_rate_is_the_upper_quartile_of_its_time() -> None:
    rate = Estimate(50.0, 10.0, 5)
    time = inverse(rate)
    upper = laplace_quantile(time.mean, time.deviation, 0.75)
    assert laplace_quantile(rate.mean, rate.deviation, 0.25) == pytest.approx(1 / upper)


def test_hardly_any_normal_noise_is_taken_for_a_new_level() -> None:
    dice = random.Random(11)
    estimate, restarts = settle(100.0), 0
    for _ in range(2_000):
        estimate = update_estimate(estimate, max(1.0, dice.gauss(100, 20)), AT)
        restarts += estimate.count == 1
    assert restarts <= 10


BYTES = Bytes(1_000_000)
STEPS = 40
STARTED_AT = Milliseconds(0)


class Node:
    """What a node really is, and what is known of it."""

    def __init__(self, seed: int, control: CongestionControl = CongestionControl.BBR) -> None:
        self.dice = random.Random(seed)
        self.rtt_us = 100_000
        self.bits_per_s = 10_000_000
        self.step_us = 50_000
        self.loss = 0.0
        self.connections = 1
        self.control = control
        self.reading = add_observation(
            NodeReading(), SocketReport(STARTED_AT, control.value, False, control.value)
        )

    def round(self) -> float:
        """Probe for twenty seconds, forecast, work, learn; returns the forecast's error."""
        for _ in range(10):
            probed_us = round(self.rtt_us * self.dice.uniform(1, 1.1))
            self.reading = add_observation(
                self.reading, RoundTrip(STARTED_AT, Microseconds(probed_us))
            )
        for _ in range(2):
            lost_packets = sum(self.dice.random() < self.loss for _ in range(20))
            self.reading = add_observation(
                self.reading, PacketTrain(STARTED_AT, 20, lost_packets, lost_packets)
            )
        work = RoundWork(
            inner_steps=STEPS, up_bytes=BYTES, down_bytes=BYTES, connections=self.connections
        )
        forecast = finish_forecast(self.reading, work)
        assert forecast is not None
        down_us, up_us = (
            self.transfer_of(TransferDirection.DOWN),
            self.transfer_of(TransferDirection.UP),
        )
        computed_us = STEPS * self.step_us * self.dice.uniform(0.95, 1.05)
        computed_ms = Milliseconds(round(computed_us / 1000))
        took_ms = Milliseconds((down_us + up_us + round(computed_us) + 2 * self.rtt_us) // 1000)
        self.reading = add_observation(self.reading, StepTime(STARTED_AT, STEPS, computed_ms))
        self.reading = add_observation(self.reading, Finish(STARTED_AT, forecast.mean_ms, took_ms))
        return abs(took_ms - forecast.mean_ms) / took_ms

    def transfer_of(self, direction: TransferDirection) -> int:
        took_us = max(self.stripe_us() for _ in range(self.connections))
        transfer = TransferTime(
            STARTED_AT, direction, BYTES, Microseconds(took_us), self.connections
        )
        self.reading = add_observation(self.reading, transfer)
        return took_us

    def stripe_us(self) -> int:
        path = NetworkPath(
            rtt_us=Microseconds(self.rtt_us),
            bits_per_s=self.bits_per_s // self.connections,
            loss=self.loss,
            congestion_control=self.control,
        )
        size = Bytes(BYTES // self.connections)
        return draw_transfer(path, size, self.dice.random).took_us - self.rtt_us // 2


def errors(node: Node, rounds: int) -> list[float]:
    return [node.round() for _ in range(rounds)]


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_node_is_forecast_to_a_tenth_from_the_second_round_on(seed: int) -> None:
    assert max(errors(Node(seed), 15)[1:]) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_over_a_lossy_line_the_mean_error_is_below_a_quarter_after_ten_rounds(seed: int) -> None:
    node = Node(seed, CongestionControl.CUBIC)
    node.loss = 0.01
    node.connections = 4
    assert mean(errors(node, 30)[10:]) < 0.25


@pytest.mark.parametrize("seed", range(5))
def test_one_connection_over_a_lossy_line_is_forecast_hardly_worse_than_it_can_be(
    seed: int,
) -> None:
    node = Node(seed, CongestionControl.CUBIC)
    node.loss = 0.01
    alone = sorted(2 * node.stripe_us() + STEPS * node.step_us for _ in range(99))
    # What is off by as much is the line's own dice: its median is the best that can be known.
    inevitable = mean(abs(took - alone[49]) / took for took in alone)
    assert mean(errors(node, 60)[10:]) < 1.5 * inevitable


def slower_line(node: Node) -> None:
    node.bits_per_s //= 10


def faster_line(node: Node) -> None:
    node.bits_per_s *= 10


def farther(node: Node) -> None:
    node.rtt_us *= 3


def slower_device(node: Node) -> None:
    node.step_us *= 3


@pytest.mark.parametrize("change", [slower_line, faster_line, farther, slower_device])
@pytest.mark.parametrize("seed", range(5))
def test_a_changed_node_is_forecast_again_from_the_third_round_on(
    change: Callable[[Node], None], seed: int
) -> None:
    node = Node(seed)
    errors(node, 10)
    change(node)
    after = errors(node, 8)
    if change is not farther:  # Probes tell of the round trip before the round does.
        assert after[0] > 0.2
    assert max(after[2:]) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_a_line_that_breaks_down_and_comes_back_is_followed_both_times(seed: int) -> None:
    node = Node(seed)
    errors(node, 10)
    slower_line(node)
    assert max(errors(node, 6)[2:]) < 0.15
    faster_line(node)
    assert max(errors(node, 6)[2:]) < 0.15
    assert 0.8 < node.reading.correction < 1.2


def test_ten_probes_show_a_round_trip_that_tripled() -> None:
    node = Node(1)
    errors(node, 2)
    farther(node)
    node.round()
    assert 300_000 <= node.reading.least_round_trip_us <= 330_000
    assert node.reading.round_trip_us.mean == pytest.approx(315_000, rel=0.05)
