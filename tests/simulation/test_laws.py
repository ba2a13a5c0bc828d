"""The two laws of planned jobs, in virtual time: a node never hurts, and a node counts."""

from statistics import mean

import pytest
from msgspec.structs import replace

from benchmarks.ours.adaptive.fleets import (
    ADDED,
    STEP_MS,
    AddedNode,
    UsualNodes,
    counts,
    hurts,
    job_spec,
    run_fleet,
)
from hypergpu.jobfile.spec import Data, JobSpec, OuterSettings
from netsim.network.profiles import profile
from netsim.network.world import Churn, SpanDistribution, SpanKind
from netsim.virtual.worlds import DrawnFaults

FIBRE = UsualNodes(profile("home-fibre").shape.link)
CHURN = DrawnFaults(node_crash_ms=60_000, link_cut_ms=60_000, away_ms=5_000)
KILLS = replace(CHURN, node_crash_ms=20_000, link_cut_ms=20_000, coordinator_crash_ms=6_000)


def overlapping(spec: JobSpec) -> JobSpec:
    """The job with rounds that overlap."""
    return replace(
        spec,
        round=replace(spec.round, overlap="eager"),
        outer=OuterSettings(momentum=0.5),
        aware=replace(spec.aware, sparsest="int4"),
    )


def on_own_data(spec: JobSpec) -> JobSpec:
    """The job on data that stay on nodes."""
    return replace(spec, data=Data(source="node", name="wards", path="held-out"))


JOBS = {"overlapping rounds": overlapping, "own data": on_own_data}


@pytest.mark.parametrize("times", [1, 4, 16, 64])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("inner_steps", [20, 100])
def test_a_slow_node_costs_nothing_and_counts(times: int, nodes: int, inner_steps: int) -> None:
    spec, added_node = job_spec(inner_steps=inner_steps, nodes=nodes), AddedNode(times)
    without, beside = (run_fleet(spec, seed=1, added=each) for each in ((), (added_node,)))
    assert not without.broken
    assert not beside.broken
    assert hurts(without, beside) <= 1.03
    assert counts(beside, added_node) >= (0.8 if times <= 16 else 0.6)
    assert beside.first_rounds[ADDED] <= (3 if times <= 16 else 6)


@pytest.mark.parametrize("name", ["3g-moving", "geo-sat", "lte-moving", "stress", "home-dsl"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_bad_line_costs_nothing_and_its_updates_are_accepted(name: str, nodes: int) -> None:
    spec, added_node = job_spec(inner_steps=20, nodes=nodes), AddedNode(1, profile(name).shape.link)
    without, beside = (
        run_fleet(spec, seed=1, usual=FIBRE, added=each) for each in ((), (added_node,))
    )
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


def exponential(mean_s: float) -> SpanDistribution:
    return SpanDistribution(kind=SpanKind.EXPONENTIAL, scale_s=mean_s)


COME_AND_GO = Churn(exponential(60), exponential(5))
SEEDS = range(3)


@pytest.mark.parametrize("times", [1, 4, 16, 64])
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_node_that_comes_and_goes_among_such_nodes_costs_nothing(times: int, nodes: int) -> None:
    usual, added_node = UsualNodes(churn=COME_AND_GO), AddedNode(times, churn=COME_AND_GO)
    spec = job_spec(inner_steps=20, nodes=nodes)
    ratios = []
    for seed in SEEDS:
        without, beside = (
            run_fleet(spec, seed=seed, usual=usual, added=each) for each in ((), (added_node,))
        )
        assert not beside.broken
        ratios.append((beside.took_ms - first_step_ms(added_node, nodes)) / without.took_ms)
    # Of one pair alone: what strikes costs more or less as it strikes early or late in a round.
    assert mean(ratios) <= 1.03
    assert max(ratios) <= 1.2


def first_step_ms(added: AddedNode, nodes: int) -> float:
    """How long the first round, of one step, may wait for the added node. It can be there alone,
    and whoever comes in the midst of a round begins with the next one.
    """
    return STEP_MS * added.times_slower if nodes == 1 else 0.0


@pytest.mark.parametrize("times", [16, 64])
@pytest.mark.parametrize("inner_steps", [20, 100])
def test_a_slow_node_that_was_there_first_costs_no_more_than_its_first_step(
    times: int, inner_steps: int
) -> None:
    spec, added_node = job_spec(inner_steps=inner_steps, nodes=1), AddedNode(times)
    firsts = 0
    for seed in range(2):
        without, beside = (run_fleet(spec, seed=seed, added=each) for each in ((), (added_node,)))
        assert not beside.broken
        assert beside.took_ms - first_step_ms(added_node, 1) <= 1.03 * without.took_ms
        firsts += not beside.first_rounds[ADDED]
    assert firsts, "in one of the worlds it is there first"


@pytest.mark.parametrize("times", [16, 64])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("kind", ["overlapping rounds", "own data"])
def test_a_slow_node_costs_nothing_and_counts_in_other_jobs(
    kind: str, nodes: int, times: int
) -> None:
    spec, added_node = JOBS[kind](job_spec(inner_steps=20, nodes=nodes)), AddedNode(times)
    without, beside = (run_fleet(spec, seed=1, added=each) for each in ((), (added_node,)))
    assert not without.broken
    assert not beside.broken
    assert hurts(without, beside) <= 1.03
    # Eight leases in all: one more or less at the end of the job is a tenth of its share.
    assert counts(beside, added_node) >= (0.75 if times <= 16 else 0.6)


@pytest.mark.parametrize("kind", ["overlapping rounds", "own data"])
@pytest.mark.parametrize("seed", SEEDS)
def test_leases_over_several_rounds_outlive_kills_of_nodes_and_of_the_coordinator(
    kind: str, seed: int
) -> None:
    spec = JOBS[kind](job_spec(inner_steps=20, nodes=4))
    beside = run_fleet(spec, seed=seed, usual=UsualNodes(faults=KILLS), added=(AddedNode(16),))
    assert not beside.broken
    assert beside.updates[ADDED] >= 2
