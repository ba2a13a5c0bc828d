import pytest
from msgspec.structs import replace

from coordinator.core.measure.fleet import typical
from coordinator.core.measure.health import Band, Health, health
from coordinator.core.measure.reading import Conditions, Estimate, NodeReading
from hypergpu.units import Microseconds, Milliseconds

NOW = Milliseconds(0)
RTT = Microseconds(40_000)
USUAL = NodeReading(
    round_trip_us=Estimate(40_000.0, 2_000.0, 20),
    least_round_trip_us=RTT,
    up_bits_per_s=Estimate(10e6, 5e5, 20),
    down_bits_per_s=Estimate(50e6, 2e6, 20),
    up_conditions=Conditions(RTT, 1),
    down_conditions=Conditions(RTT, 1),
    step_us=Estimate(140_000.0, 5_000.0, 20),
    packets_sent=400.0,
    updates_judged=10.0,
    updates_accepted=10.0,
)
FLEET = typical([USUAL] * 3)


def of(reading: NodeReading, now_ms: Milliseconds = NOW) -> Health:
    return health(reading, FLEET, now_ms)


def test_a_usual_node_is_well() -> None:
    found = of(USUAL)
    assert found.score == pytest.approx(1.0)
    assert found.reason == "1.00 high: no part below the fleet's middle"


def test_a_node_that_cannot_be_reached_scores_nothing_however_fast_it_is() -> None:
    found = of(replace(USUAL, step_us=Estimate(1_000.0, 1.0, 9), is_present=False))
    assert (found.score, found.band) == (0.0, Band.POOR)
    assert found.reason == "0.00 poor: network 0.00 (not connected)"


def test_the_reason_names_the_weakest_part_and_what_is_wrong_with_it() -> None:
    slow_line = of(replace(USUAL, up_bits_per_s=Estimate(800_000.0, 1e4, 20)))
    assert slow_line.band is Band.NORMAL
    assert slow_line.reason == "0.53 normal: network 0.12 (uplink 0.8 Mbit/s)"
    slow_step = of(replace(USUAL, step_us=Estimate(420_000.0, 1e4, 20)))
    assert slow_step.reason == "0.64 normal: compute 0.33 (a step takes 420 ms, typically 140 ms)"
    refused = of(replace(USUAL, updates_accepted=1.0))
    assert refused.reason == "0.71 normal: updates 0.18 (10% of recent updates accepted)"
    away = of(replace(USUAL, present_share=0.2))
    assert away.reason == "0.85 high: uptime 0.20 (often away)"


def test_a_far_or_lossy_line_is_called_so() -> None:
    far_us = Microseconds(900_000)
    far = replace(
        USUAL,
        round_trip_us=Estimate(9e5, 1e3, 20),
        least_round_trip_us=far_us,
        up_conditions=Conditions(far_us, 1),
        down_conditions=Conditions(far_us, 1),
    )
    assert "round trip 900 ms" in of(far).reason
    assert "% of packets lost" in of(replace(USUAL, packets_lost=120.0, bursts_lost=60.0)).reason


def test_bands_follow_the_score() -> None:
    def with_compute(share: float) -> Band:
        mean = USUAL.step_us.mean / share
        return of(replace(USUAL, step_us=Estimate(mean, 1.0, 9))).band

    # The weight of computing is 0.4: 0.5 ** 0.4 = 0.76, 0.1 ** 0.4 = 0.40, 0.01 ** 0.4 = 0.16.
    bands = [with_compute(share) for share in (0.9, 0.5, 0.1, 0.01)]
    assert bands == [Band.HIGH, Band.NORMAL, Band.LOW, Band.POOR]


def test_what_is_not_known_is_left_out() -> None:
    fresh = of(NodeReading())
    assert fresh.reason == "1.00 high: nothing of it measured yet"
    assert (fresh.parts.compute, fresh.parts.network, fresh.parts.updates) == (None, None, None)
    half = of(NodeReading(step_us=Estimate(280_000.0, 1.0, 3)))
    assert half.score == pytest.approx(0.5 ** (0.4 / 0.5))


def test_one_refused_update_does_not_condemn_a_node() -> None:
    once = of(replace(USUAL, updates_judged=1.0, updates_accepted=0.0))
    assert once.parts.updates == 0.5
    assert once.band is Band.HIGH


def test_absence_lowers_a_score_as_time_passes() -> None:
    away = replace(USUAL, present_share=0.5, is_present=True)
    later = Milliseconds(3_600_000)
    assert of(away).score < of(away, later).score <= 1.0
