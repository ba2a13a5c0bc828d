"""Rounds that close since they hold up a faster node than all that they wait for."""

import pytest
from msgspec.structs import replace

from coordinator.core.training.job.commands import Aggregate
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.transition import transition
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from hypergpu.ids import NodeId
from netsim.virtual.invariants import violations
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    after,
    at,
    fold_event,
    node_plan,
    only,
    plan_event,
    planning,
    update_event,
)

NEW = replace(node_plan(1), rounds=16)


def steady(step_ms: int, inner_steps: int = 10) -> NodePlan:
    """The part of a node whose steps take so long."""
    part = node_plan(inner_steps, forecast_ms=inner_steps * step_ms)
    return replace(part, step_us=1000 * step_ms)


def newcomer_in(parts: dict[NodeId, NodePlan], *, took_ms: int) -> Job:
    """A round of these parts as Bob's first update comes, of one step."""
    job = after(planning(), plan_event(0, {**parts, BOB: NEW}))
    lease = job.long_leases[BOB].lease
    return after(job, update_event(BOB, round_=0, lease=lease, at_ms=40 + took_ms))


def test_a_round_of_a_slow_node_closes_for_a_newcomer_that_does_many_times_as_much() -> None:
    job = newcomer_in({ALICE: steady(12_800)}, took_ms=300)
    assert job.phase is Phase.AGGREGATING
    assert "alone does" in job.reason
    assert {node for node, _, _ in job.open_round.accepted_updates} == {BOB}
    assert job.long_leases[ALICE].work is WorkState.UNDER_WAY
    assert not violations(job)


def test_the_slow_nodes_work_is_folded_by_a_later_round() -> None:
    job = newcomer_in({ALICE: steady(12_800)}, took_ms=300)
    job = after(job, fold_event(0, at_ms=400), plan_event(1, {BOB: steady(200)}, at_ms=410))
    job = after(job, update_event(ALICE, round_=0, lease=1, at_ms=2_000))
    lease = job.open_round.participants[BOB].lease
    step = transition(job, update_event(BOB, round_=1, lease=lease, at_ms=2_400))
    assert {each.node for each in only(step.commands, Aggregate).updates} == {ALICE, BOB}


@pytest.mark.parametrize(
    ("parts", "took_ms"),
    [
        # It is not four times as fast as who the round waits for.
        ({ALICE: steady(1_000)}, 300),
        # The round is over soon.
        ({ALICE: steady(12_800, 1)}, 7_000),
        # Nothing is known of whom it waits for.
        ({ALICE: node_plan(10)}, 300),
    ],
)
def test_other_rounds_stay_open(parts: dict[NodeId, NodePlan], took_ms: int) -> None:
    assert newcomer_in(parts, took_ms=took_ms).phase is Phase.TRAINING


def test_a_round_whose_nodes_together_do_more_stays_open() -> None:
    crowd = {NodeId(f"slow-{number}"): steady(2_000) for number in range(7)}
    joins = [work_events.NodeJoined(at_ms=at(35), node=node) for node in crowd]
    job = after(planning(), *joins, plan_event(0, {**crowd, BOB: NEW}))
    lease = job.long_leases[BOB].lease
    job = after(job, update_event(BOB, round_=0, lease=lease, at_ms=340))
    assert job.phase is Phase.TRAINING


def test_a_round_that_needs_every_update_is_not_closed_for_a_newcomer() -> None:
    spec = replace(AWARE, round=replace(AWARE.round, quorum=1.0))
    job = after(planning(spec), plan_event(0, {ALICE: steady(12_800), BOB: NEW}))
    job = after(job, update_event(BOB, round_=0, lease=2, at_ms=340))
    assert job.phase is Phase.TRAINING


def test_a_lease_of_an_earlier_round_closes_none() -> None:
    job = after(planning(), plan_event(0, {ALICE: steady(12_800), BOB: NEW}))
    lease = job.open_round.participants[ALICE].lease
    job = after(job, update_event(ALICE, round_=0, lease=lease, at_ms=12_900))
    job = after(job, fold_event(0, at_ms=12_950))
    job = after(job, plan_event(1, {ALICE: steady(12_800)}, at_ms=12_960))
    job = after(job, update_event(BOB, round_=0, lease=2, at_ms=13_000))
    assert job.phase is Phase.TRAINING
