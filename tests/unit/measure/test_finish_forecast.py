import pytest
from msgspec.structs import replace

from coordinator.core.measure.fleet import median_reading
from coordinator.core.measure.forecast import (
    FinishForecast,
    FinishParts,
    RoundWork,
    finish_forecast,
    transfer_forecast,
)
from coordinator.core.measure.reading import Conditions, Estimate, NodeReading, TransferDirection
from hypergpu.units import Bytes, Microseconds, Milliseconds

RTT = Microseconds(50_000)
KNOWN = NodeReading(
    round_trip_us=Estimate(60_000.0, 6_000.0, 20),
    least_round_trip_us=RTT,
    up_bits_per_s=Estimate(8e6, 4e5, 20),
    down_bits_per_s=Estimate(40e6, 2e6, 20),
    up_conditions=Conditions(RTT, 1),
    down_conditions=Conditions(RTT, 1),
    step_us=Estimate(100_000.0, 5_000.0, 20),
    packets_sent=400.0,
    forecast_error=Estimate(0.05, 0.02, 10),
)
WORK = RoundWork(
    inner_steps=80,
    up_bytes=Bytes(4_000_000),
    down_bytes=Bytes(1_000_000),
    codec_ms=Milliseconds(300),
)


def forecast_of(reading: NodeReading, work: RoundWork = WORK) -> FinishForecast:
    found = finish_forecast(reading, work)
    assert found is not None
    return found


def test_a_forecast_is_the_sum_of_computing_coding_moving_and_asking() -> None:
    found = forecast_of(KNOWN)
    assert found.parts.compute_ms == 8_000
    assert found.parts.codec_ms == 300
    assert 4_000 < found.parts.up_ms < 4_500  # 4 s for the bytes, and slow start
    assert 200 < found.parts.down_ms < 600
    assert found.parts.round_trips_ms == 120
    assert found.mean_ms == found.parts.compute_ms + found.parts.moving_ms
    assert found.assumed == ()


def test_a_correction_stretches_all_of_it() -> None:
    corrected = forecast_of(replace(KNOWN, correction=1.5))
    assert corrected.mean_ms == pytest.approx(1.5 * forecast_of(KNOWN).mean_ms, abs=3)


def test_small_transfers_are_round_trips_and_large_ones_bytes() -> None:
    small, large = (
        transfer_forecast(KNOWN, TransferDirection.UP, Bytes(size)).mean_us
        for size in (60_000, 40_000_000)
    )
    assert small > 2 * RTT
    assert large == pytest.approx(40e6, rel=0.02)


def test_nothing_takes_no_time_and_nothing_known_gives_no_forecast() -> None:
    nothing = forecast_of(KNOWN, RoundWork(exchanges=0))
    assert (nothing.mean_ms, nothing.deviation_ms) == (0, 0)
    assert finish_forecast(NodeReading(), WORK) is None
    assert finish_forecast(NodeReading(packets_sent=20.0), WORK) is None


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("round_trip_us", "round trip"),
        ("up_bits_per_s", "uplink"),
        ("down_bits_per_s", "downlink"),
        ("step_us", "step time"),
    ],
)
def test_what_is_not_known_is_assumed_said_and_widens_the_spread(field: str, name: str) -> None:
    partly = forecast_of(replace(KNOWN, **{field: Estimate()}))
    assert partly.assumed == (name,)
    assert partly.deviation_ms > forecast_of(KNOWN).deviation_ms


def test_the_fleet_stands_in_for_what_is_not_known() -> None:
    fleet = [replace(KNOWN, step_us=Estimate(mean, 1.0, 5)) for mean in (2e5, 3e5, 9e5)]
    found = finish_forecast(replace(KNOWN, step_us=Estimate()), WORK, median_reading(fleet))
    assert found is not None
    assert found.parts.compute_ms == 80 * 300


def test_a_typical_node_is_the_middle_of_those_that_are_there() -> None:
    fleet = [replace(KNOWN, step_us=Estimate(mean, 1.0, 5)) for mean in (1e5, 2e5, 9e5)]
    gone = replace(KNOWN, step_us=Estimate(5e6, 1.0, 5), is_present=False)
    assert median_reading([*fleet, gone, NodeReading()]).step_us.mean == 2e5
    assert median_reading([]) == NodeReading()


def test_a_forecast_that_was_never_compared_is_less_sure() -> None:
    fresh = forecast_of(replace(KNOWN, forecast_error=Estimate()))
    assert fresh.deviation_ms > 0.25 * fresh.mean_ms > forecast_of(KNOWN).deviation_ms


def test_errors_of_the_past_widen_the_spread() -> None:
    erring = forecast_of(replace(KNOWN, forecast_error=Estimate(0.4, 0.1, 10)))
    assert erring.deviation_ms == pytest.approx(0.4 * erring.mean_ms, abs=1)


def test_losses_stall_even_small_transfers_over_fast_lines() -> None:
    lossy = replace(KNOWN, packets_lost=40.0, bursts_lost=40.0)
    size = Bytes(100_000)
    clean_us = transfer_forecast(KNOWN, TransferDirection.UP, size).mean_us
    assert transfer_forecast(lossy, TransferDirection.UP, size).mean_us > 1.5 * clean_us


def test_chances_and_quantiles_agree() -> None:
    parts = FinishParts(*(Milliseconds(0) for _ in range(5)))
    found = FinishForecast(Milliseconds(10_000), Milliseconds(1_000), parts)
    for share in (0.1, 0.5, 0.75, 0.9, 0.99):
        by_ms = found.quantile_ms(share)
        assert found.chance_by(by_ms) == pytest.approx(share, abs=0.001)
    sure = FinishForecast(Milliseconds(10_000), Milliseconds(0), parts)
    limits = (Milliseconds(9_999), Milliseconds(10_000))
    assert [sure.chance_by(limit) for limit in limits] == [0.0, 1.0]
