"""A job's first plan, by what was remembered of its nodes' speeds."""

import pytest

from coordinator.core.network.reading import Estimate, NodeReading
from coordinator.core.training.plan.decision import RoundPlan
from coordinator.core.training.plan.planning import plan_round
from hypergpu.ids import NodeId, Slot
from hypergpu.units import Microseconds
from tests.unit.plan.fleet import SIZES, PlayedFleet, Truth, names, spec

N0, N1, N2, N3 = names(4)


def recalled_reading(step_ms: float | None) -> NodeReading:
    """What a coordinator knows that has just started: probes, and a speed that it remembers."""
    trip = Microseconds(20_000)
    step = Estimate() if step_ms is None else Estimate(step_ms * 1000, step_ms * 100, 3)
    return NodeReading(Estimate(trip, 2_000, 3), least_round_trip_us=trip, step_us=step)


def first_plan(steps_ms: dict[NodeId, float | None]) -> RoundPlan:
    fleet = PlayedFleet(spec(nodes=4), dict.fromkeys(steps_ms, Truth()))
    readings = {node: recalled_reading(step_ms) for node, step_ms in steps_ms.items()}
    request = fleet.request(steps_ms)
    assert request.candidates == {node: Slot(slot) for slot, node in enumerate(steps_ms)}
    return plan_round(request, readings, SIZES)


def test_the_first_round_has_as_many_steps_as_remembered_speeds_ask_for() -> None:
    plan = first_plan({N0: 100, N1: 100, N2: 100, N3: 250})
    steps = {node: part.inner_steps for node, part in plan.nodes.items()}
    assert 10 <= steps[N0] == steps[N1] == steps[N2]
    assert 1 < steps[N3] <= steps[N0] / 2
    assert all(part.rounds == 1 for part in plan.nodes.values())


def test_no_round_waits_for_who_is_remembered_as_far_slower() -> None:
    plan = first_plan({N0: 100, N1: 100, N2: 100, N3: 6_400})
    assert plan.nodes[N3].rounds > 1
    assert plan.nodes[N3].inner_steps <= 4


def test_beside_remembered_speeds_who_is_not_known_begins_with_one_step() -> None:
    plan = first_plan({N0: 100, N1: 100, N2: 100, N3: None})
    assert plan.nodes[N0].inner_steps >= 10
    assert (plan.nodes[N3].inner_steps, plan.nodes[N3].rounds) == (1, 16)
    assert "nothing of its speed is known yet" in plan.nodes[N3].reason


def test_a_first_round_closes_by_its_quorum_where_no_forecast_was_ever_compared() -> None:
    plan = first_plan(dict.fromkeys((N0, N1, N2, N3), 100.0))
    assert plan.deadline_ms == 0
    assert "closes after twice what its quorum takes" in plan.reason


@pytest.mark.parametrize("others", [1, 3])
def test_who_is_remembered_as_absurdly_fast_is_taken_for_eight_times_the_median(
    others: int,
) -> None:
    honest = names(4)[:others]
    plan = first_plan({**dict.fromkeys(honest, 100.0), N3: 0.001})
    usual = first_plan({**dict.fromkeys(honest, 100.0), N3: 100.0})
    assert "taken for 8 times as fast as the median node" in plan.nodes[N3].reason
    for node in honest:
        assert plan.nodes[node].inner_steps >= usual.nodes[node].inner_steps / 8
    assert plan.nodes[N3].inner_steps <= 8 * plan.memory.inner_steps


def test_where_nothing_is_remembered_everybody_has_one_step() -> None:
    plan = first_plan(dict.fromkeys((N0, N1, N2, N3)))
    assert {part.inner_steps for part in plan.nodes.values()} == {1}
