"""The two laws of planned jobs, in virtual time: a node never hurts, and a node counts."""

import pytest

from benchmarks.ours.adaptive.fleets import (
    ADDED,
    AddedNode,
    UsualNodes,
    counts,
    hurts,
    job_spec,
    run_fleet,
)
from netsim.network.profiles import profile
from netsim.virtual.worlds import DrawnFaults

FIBRE = UsualNodes(profile("home-fibre").shape.link)
CHURN = DrawnFaults(node_crash_ms=60_000, link_cut_ms=60_000, away_ms=5_000)


@pytest.mark.parametrize("times", [1, 4, 16, 64])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("inner_steps", [20, 100])
def test_a_slow_node_costs_nothing_and_counts(times: int, nodes: int, inner_steps: int) -> None:
    spec, added = job_spec(inner_steps=inner_steps, nodes=nodes), AddedNode(times)
    without, beside = (run_fleet(spec, seed=1, added=each) for each in ((), (added,)))
    assert not without.broken
    assert not beside.broken
    assert hurts(without, beside) <= 1.03
    assert counts(beside, added) >= (0.8 if times <= 16 else 0.6)
    assert beside.first_rounds[ADDED] <= (3 if times <= 16 else 6)


@pytest.mark.parametrize("name", ["3g-moving", "geo-sat", "lte-moving", "stress", "home-dsl"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_bad_line_costs_nothing_and_its_updates_are_accepted(name: str, nodes: int) -> None:
    spec, added = job_spec(inner_steps=20, nodes=nodes), AddedNode(1, profile(name).shape.link)
    without, beside = (run_fleet(spec, seed=1, usual=FIBRE, added=each) for each in ((), (added,)))
    assert not beside.broken
    assert hurts(without, beside) <= 1.03
    assert beside.updates[ADDED] >= 4


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_node_costs_nothing_where_nodes_come_and_go(seed: int) -> None:
    usual, spec = UsualNodes(faults=CHURN), job_spec(inner_steps=20, nodes=4)
    without, beside = (
        run_fleet(spec, seed=seed, usual=usual, added=each) for each in ((), (AddedNode(16),))
    )
    assert not beside.broken
    # What strikes whom is drawn for each fleet anew: with one more node it is another draw.
    assert hurts(without, beside) <= 1.15
