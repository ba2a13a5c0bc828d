"""Rounds that overlap: who holds which samples, and what nodes are told, scene by scene."""

from msgspec.structs import replace

from coordinator.core.job import events
from coordinator.core.job.commands import AssignShard, Command
from coordinator.core.job.state import Job, Phase, WorkState
from coordinator.core.round.outstanding import outstanding
from coordinator.core.round.transition import JobStep, transition
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, Outer
from hypergpu.statements.assignment import Assignment, Prefetch, SampleRange
from hypergpu.units import Samples
from netsim.virtual.invariants import violations
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    SPEC,
    after,
    at,
    both_updates,
    fold_event,
    node_plan,
    plan_event,
    planning,
    training,
    update_event,
)


def eager(spec: JobSpec) -> JobSpec:
    aware = replace(spec.aware, sparsest="int4") if spec.strategy == "aware" else spec.aware
    overlapping = replace(spec.round, overlap="eager")
    return replace(spec, round=overlapping, outer=Outer(momentum=0.5), aware=aware)


EAGER = eager(SPEC)
"""Rounds of two inner steps of four samples: one of them is prefetched."""


def shard(job: Job, node: NodeId) -> tuple[SampleRange, ...]:
    return job.open_round.participants[node].shard.ranges


def run(start: int, count: int) -> SampleRange:
    return SampleRange(start, Samples(count))


def prefetch(job: Job, node: NodeId) -> tuple[SampleRange, ...]:
    found = job.members[node].prefetch
    return () if found is None else found.ranges


def assignments_by_node(commands: tuple[Command, ...]) -> dict[NodeId, Assignment]:
    return {one.node: one.assignment for one in commands if isinstance(one, AssignShard)}


def second_round(job: Job) -> JobStep:
    """Both updates of round 0 are in and folded."""
    job = after(job, *both_updates())
    return transition(job, fold_event(0, at_ms=60))


def test_an_assignment_prefetches_the_beginning_of_the_next_rounds_shard() -> None:
    job = training(EAGER)
    assert (shard(job, ALICE), shard(job, BOB)) == ((run(0, 8),), (run(8, 8),))
    assert (prefetch(job, ALICE), prefetch(job, BOB)) == ((run(16, 4),), (run(20, 4),))
    told = assignments_by_node(outstanding(job))
    alice, bob = told[ALICE].prefetch, told[BOB].prefetch
    assert alice is not None
    assert bob is not None
    assert alice == Prefetch(
        round=1,
        inner_steps=1,
        ranges=(run(16, 4),),
        seed=alice.seed,
        global_samples=Samples(16),
        total_samples=Samples(48),
    )
    assert bob.seed != alice.seed
    assert told[ALICE].task.prefetched is None


def test_the_next_shard_begins_with_its_prefetch() -> None:
    before = training(EAGER)
    step = second_round(before)
    assert shard(step.job, ALICE) == (run(16, 4), run(24, 4))
    assert shard(step.job, BOB) == (run(20, 4), run(28, 4))
    assert (
        assignments_by_node(step.commands)[ALICE].task.prefetched == before.members[ALICE].prefetch
    )
    assert (prefetch(step.job, ALICE), prefetch(step.job, BOB)) == ((run(32, 4),), (run(36, 4),))


def test_the_last_round_prefetches_nothing() -> None:
    job = second_round(training(EAGER)).job
    job = after(job, *both_updates(1, first_lease=3))
    step = transition(job, fold_event(1, at_ms=90))
    assert [one.prefetch for one in assignments_by_node(step.commands).values()] == [None, None]
    assert [one.task.prefetched is None for one in assignments_by_node(step.commands).values()] == [
        False,
        False,
    ]
    assert sum(stream.cursor for stream in step.job.streams) == 48


def test_the_prefetch_of_a_lost_node_goes_out_first_in_the_next_round() -> None:
    job = after(
        training(EAGER),
        update_event(BOB, round_=0, lease=2),
        update_event(ALICE, round_=0, lease=1),
        events.NodeLost(at_ms=at(55), node=BOB, reason="silent"),
    )
    assert prefetch(job, BOB) == (run(20, 4),)
    step = transition(job, fold_event(0, at_ms=60))
    assert shard(step.job, ALICE) == (run(16, 4), run(20, 4))
    assert prefetch(step.job, BOB) == ()
    assert violations(step.job) == ()


def test_a_node_that_is_back_in_time_keeps_its_prefetch() -> None:
    job = after(
        training(EAGER),
        update_event(BOB, round_=0, lease=2),
        events.NodeLost(at_ms=at(52), node=BOB, reason="silent"),
        events.NodeJoined(at_ms=at(54), node=BOB),
        update_event(ALICE, round_=0, lease=1),
    )
    step = transition(job, fold_event(0, at_ms=60))
    assert shard(step.job, BOB)[0] == run(20, 4)
    assert assignments_by_node(step.commands)[BOB].task.prefetched is not None


def test_a_node_that_was_cut_begins_with_its_prefetch_all_the_same() -> None:
    job = after(
        training(EAGER),
        update_event(ALICE, round_=0, lease=1),
        events.DeadlineReached(at_ms=at(1030), round=0),
    )
    step = transition(job, fold_event(0, at_ms=1100))
    assert shard(step.job, ALICE) == (run(16, 4), run(8, 4))
    assert shard(step.job, BOB) == (run(20, 4), run(12, 4))
    assert assignments_by_node(step.commands)[BOB].task.prefetched is not None
    assert violations(step.job) == ()


def test_whoever_takes_a_shard_over_takes_it_from_the_model() -> None:
    job = second_round(training(EAGER)).job
    job = after(job, events.NodeLost(at_ms=at(65), node=BOB, reason="silent"))
    step = transition(job, events.NodeJoined(at_ms=at(70), node=BOB))
    again = assignments_by_node(step.commands)[BOB]
    assert again.task.ranges == (run(20, 4), run(28, 4))
    assert again.task.prefetched is None


def test_a_pause_keeps_the_prefetch() -> None:
    before = second_round(training(EAGER)).job
    paused = after(before, events.JobPaused(at_ms=at(70)))
    step = transition(paused, events.JobResumed(at_ms=at(80)))
    first = assignments_by_node(outstanding(before))
    again = assignments_by_node(step.commands)
    assert {node: (one.task.prefetched, one.prefetch) for node, one in again.items()} == {
        node: (one.task.prefetched, one.prefetch) for node, one in first.items()
    }
    assert again[ALICE].lease != first[ALICE].lease


def test_a_plan_with_fewer_steps_than_were_prefetched_puts_them_back() -> None:
    three = replace(node_plan(4), prefetch_steps=3)
    job = after(planning(eager(AWARE)), plan_event(0, {ALICE: three, BOB: three}))
    assert prefetch(job, ALICE) == (run(32, 12),)
    job = after(job, *both_updates())
    job = after(job, fold_event(0, at_ms=60))
    assert job.phase is Phase.PLANNING
    step = transition(job, plan_event(1, {ALICE: node_plan(2), BOB: node_plan(3)}, at_ms=70))
    assert [one.task.prefetched is None for one in assignments_by_node(step.commands).values()] == [
        True,
        False,
    ]
    assert shard(step.job, ALICE) == (run(32, 8),)
    assert shard(step.job, BOB) == (run(44, 12),)
    assert violations(step.job) == ()


def test_a_plan_request_states_prefetched_steps() -> None:
    part = replace(node_plan(4), prefetch_steps=3)
    job = after(planning(eager(AWARE)), plan_event(0, {ALICE: part, BOB: node_plan(1)}))
    job = after(job, *both_updates())
    step = transition(job, fold_event(0, at_ms=60))
    (request,) = [one.request for one in step.commands if hasattr(one, "request")]
    assert request.prefetched == {ALICE: 3}


def test_rounds_that_do_not_overlap_prefetch_nothing() -> None:
    job = training()
    assert [member.prefetch for member in job.members.values()] == [None, None]
    assert {part.work for part in job.open_round.participants.values()} == {WorkState.PENDING}
