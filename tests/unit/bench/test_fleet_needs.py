"""What a million nodes need follows from what one was measured to cost."""

import pytest

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.scale.million import NodeFleet, UnitCosts, fleet_needs, unit_costs

COSTS = UnitCosts(
    sessions_per_core=8_000.0,
    bytes_per_update=3_000.0,
    idle_bytes_per_s=125.0,
    folded_per_core_s=250e6,
    decided_per_core_s=50.0,
)


def test_needs_are_sums_over_nodes() -> None:
    needs = fleet_needs(NodeFleet(1_000_000, 25_000_000, 600.0, 60.0), COSTS)
    assert needs.gateway_cores == pytest.approx(125)
    assert needs.coordinator_cores == pytest.approx(1e6 / 600 / 50)
    assert needs.fold_cores == pytest.approx(1e6 * 25e6 / 250e6 / 60)
    assert needs.control_bits_per_s == pytest.approx(8e6 * (125 + 5))
    assert needs.usd_per_round == pytest.approx(4.50 + 2 * 0.36, rel=1e-5)


def test_costs_come_from_recorded_figures() -> None:
    figures = {
        "sessions": 10_000.0,
        "gateway_cpu_cores": 1.25,
        "coordinator_bytes_per_update": 3_000.0,
        "coordinator_idle_bytes_per_s": 125.0,
        "fold_parameters_per_core_s": 250e6,
        "coordinator_cpu_ms_per_update": 20.0,
    }
    assert unit_costs(figures) == COSTS
    del figures["sessions"]
    with pytest.raises(BenchmarkError, match="sessions"):
        unit_costs(figures)
