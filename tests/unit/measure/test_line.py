import pytest
from msgspec.structs import replace

from coordinator.core.measure.line import (
    carried_rate,
    goodput_of,
    likely_loss,
    limit_bits_per_s,
    loss_of_goodput,
    seen_rate,
    slow_start_us,
)
from coordinator.core.measure.reading import Conditions, Estimate, NodeReading, TransferDirection
from hypergpu.units import Microseconds

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
            seen = seen_rate(size, Microseconds(round(took_us)), RTT, 2)
            if not seen.is_least:
                assert seen.bits_per_s == pytest.approx(bits_per_s, rel=0.01)


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
    unknown = replace(LOSSY, up_bits_per_s=Estimate())
    limit = limit_bits_per_s(unknown, TransferDirection.UP, RTT, 1)
    assert goodput(unknown, 1) < min(limit, 1e7)
    typical = goodput_of(unknown, TransferDirection.UP, 1, typical_bits_per_s=100_000.0)
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
    unprobed = replace(LOSSY, packets_sent=0.0, packets_lost=0.0, bursts_lost=0.0, loss_bound=0.02)
    assert likely_loss(unprobed) == 0.02
    assert goodput(unprobed, 4) > 2 * goodput(unprobed, 1)
    probed = replace(unprobed, packets_sent=20.0)
    assert likely_loss(probed) == 0
