"""Speeds that outlive jobs: bounded in number, of one device, and the older the less certain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.network.known_speed import (
    COUNT_MOST,
    DAYS_KEPT,
    WORKLOADS_MOST,
    SpeedRecord,
    SpeedSource,
    recalled_speed,
    record_speed,
)
from coordinator.core.network.reading import Estimate
from hypergpu.units import Milliseconds

DAY_MS = 86_400_000
NOW = Milliseconds(20_000 * DAY_MS)
MLP = SpeedSource("mlp", "card")
STEADY = Estimate(200_000.0, 2_000.0, 50)


def later(days: float) -> Milliseconds:
    return Milliseconds(NOW + round(days * DAY_MS))


def usual_record(source: SpeedSource = MLP) -> SpeedRecord:
    return record_speed(SpeedRecord(), source, STEADY, NOW)


def test_a_speed_is_recalled_with_few_observations() -> None:
    speed = recalled_speed(usual_record(), MLP, NOW)
    assert (speed.mean, speed.deviation, speed.count) == (200_000, 2_000, COUNT_MOST)


def test_the_spread_grows_with_age_until_the_speed_is_forgotten() -> None:
    spreads = [recalled_speed(usual_record(), MLP, later(days)).deviation for days in (0, 1, 4)]
    assert spreads == pytest.approx([2_000, 40_050, 80_025], rel=1e-3)
    assert recalled_speed(usual_record(), MLP, later(DAYS_KEPT - 0.01)).count
    assert recalled_speed(usual_record(), MLP, later(DAYS_KEPT)) == Estimate()


@pytest.mark.parametrize("other", [MLP._replace(workload="cnn"), MLP._replace(device="cpu")])
def test_another_workload_and_another_device_know_nothing_of_it(other: SpeedSource) -> None:
    assert recalled_speed(usual_record(), other, NOW) == Estimate()


def test_a_clock_that_was_set_back_makes_no_speed_less_certain() -> None:
    assert recalled_speed(usual_record(), MLP, later(-3)).deviation == 2_000


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=60))
def test_a_record_holds_the_newest_few_workloads(sources: list[tuple[int, int]]) -> None:
    record = SpeedRecord()
    for place, (workload, device) in enumerate(sources):
        source = SpeedSource(f"w{workload}", f"d{device}")
        record = record_speed(record, source, STEADY, Milliseconds(NOW + place))
        assert recalled_speed(record, source, NOW).mean == STEADY.mean
    newest = list(dict.fromkeys(workload for workload, _ in reversed(sources)))[:WORKLOADS_MOST]
    assert list(record.speeds) == [f"w{workload}" for workload in reversed(newest)]
