"""Nodes that state another speed than theirs, or hold updates back, in virtual time."""

import pytest

from benchmarks.ours.adaptive.fleets import ADDED, AddedNode, hurts, job_spec, run_fleet
from benchmarks.ours.trust.speeds import ToldRun, checks_per_step
from netsim.virtual.worlds import SpeedLie


def told_run(nodes: int, times: float, lie: SpeedLie) -> ToldRun:
    spec = job_spec(inner_steps=20, nodes=nodes)
    added_nodes = ((), (AddedNode(times),), (AddedNode(times, lie=lie),))
    run = ToldRun(*(run_fleet(spec, seed=1, added=each) for each in added_nodes))
    assert not run.told.broken
    return run


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("times", [1, 4])
def test_who_states_less_than_it_can_is_given_what_its_updates_show(
    nodes: int, times: float
) -> None:
    fleet_run = told_run(nodes, times, SpeedLie(stated_share=16.0))
    assert 0.9 <= fleet_run.samples_ratio <= 1.1
    # So it works in rounds, and not under leases that nobody compares.
    told_steps, honest = (run.planned_steps[ADDED] for run in (fleet_run.told, fleet_run.honest))
    assert told_steps[1] >= 0.8 * honest[1]


def test_who_has_less_work_is_checked_more_often_a_step() -> None:
    assert checks_per_step(10) >= checks_per_step(20)


@pytest.mark.parametrize(("nodes", "times"), [(1, 1), (1, 16), (4, 1), (4, 4), (4, 16)])
def test_who_states_more_than_it_can_loses_the_surplus_with_its_first_late_update(
    nodes: int, times: float
) -> None:
    run = told_run(nodes, times, SpeedLie(stated_share=1 / 16))
    assert run.surplus_leases <= 1
    assert run.samples_ratio <= 1.1
    assert hurts(run.without, run.told) <= 1.15


@pytest.mark.parametrize("times", [4, 16])
@pytest.mark.parametrize("hold_ms", [5_000, 30_000])
def test_who_holds_updates_back_gains_neither_weight_nor_pay(times: float, hold_ms: int) -> None:
    run = told_run(4, times, SpeedLie(hold_ms=hold_ms))
    assert run.weight_ratio < 1
    assert run.samples_ratio < 1
