from collections.abc import Sequence

import pytest

from hypergpu.units import Microseconds
from netsim.link import LinkDirection
from netsim.measure.arrivals import Arrivals, mean_run, percentile
from netsim.measure.check import probe_readings, rate_reading

MS_NS = 10**6


def arrivals(numbers: Sequence[int], offered: int, *, delay_ms: float = 5) -> Arrivals:
    return Arrivals(
        offered=offered,
        payload_bytes=97,
        numbers=numbers,
        sent_ns=[number * MS_NS for number in numbers],
        received_ns=[round((place + delay_ms) * MS_NS) for place in range(len(numbers))],
    )


def test_loss_counts_every_probe_that_never_came_once() -> None:
    assert arrivals([0, 1, 1, 3], 5).loss() == pytest.approx(0.4)


def test_bursts_are_neighbours_that_were_lost_together() -> None:
    assert mean_run({0, 3, 5}, 8) == pytest.approx((2 + 1 + 2) / 3)
    assert mean_run({0, 1}, 2) == 0


def test_the_rate_counts_headers_and_the_time_between_first_and_last() -> None:
    assert arrivals(range(11), 11).bits_per_s() == pytest.approx(1_000_000)
    assert arrivals(range(11), 11).bits_per_s_between(0, 10 * MS_NS) == pytest.approx(500_000)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_readings_put_what_was_asked_beside_what_was_measured() -> None:
    asked = LinkDirection(delay_us=Microseconds(5000), bits_per_s=1_000_000, loss=0.1)
    found = {each.name: each for each in probe_readings("up", asked, arrivals([0, 1, 2, 3], 5))}
    assert found["up_loss_percent"].error == pytest.approx(10)
    assert found["up_delay_ms"].configured == pytest.approx(5.736)
    assert found["up_burst_packets"].measured == 1


def test_the_rate_of_a_bottleneck_is_taken_while_probes_wait_there() -> None:
    """Each millisecond one leaves; twenty came at once, the sender slept, then twenty more."""
    flooded = Arrivals(
        offered=40,
        payload_bytes=97,
        numbers=range(40),
        sent_ns=[0] * 20 + [100 * MS_NS] * 20,
        received_ns=[at * MS_NS for at in (*range(1, 21), *range(101, 121))],
    )
    asked = LinkDirection(delay_us=Microseconds(0), bits_per_s=1_000_000)
    assert rate_reading("up", asked, flooded).ratio == pytest.approx(0)
    assert flooded.bits_per_s() < 400_000
