"""Rounds scene by scene, overlapping ones too: who holds which samples, what nodes are told."""

from msgspec.structs import replace

from coordinator.core.training.assignment import JobStep
from coordinator.core.training.job import events
from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.commands import (
    Aggregate,
    AssignShard,
    CancelShard,
    Command,
    SetDeadline,
)
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from coordinator.core.work.work_commands import ReleaseNode
from hypergpu.assignment import Assignment, Prefetch, SampleRange
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, OuterSettings
from hypergpu.units import Samples
from netsim.virtual.invariants import violations
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    CAROL,
    SPEC,
    after,
    aggregating,
    at,
    both_updates,
    finishing,
    fold_event,
    model,
    node_plan,
    only,
    plan_event,
    planning,
    training,
    update_event,
    waiting,
)


def assignments(commands: tuple[Command, ...]) -> list[tuple[NodeId, Assignment]]:
    return [(one.node, one.assignment) for one in commands if isinstance(one, AssignShard)]


def pending(job: Job) -> set[str]:
    return set(job.open_round.pending)


def test_a_job_starts_only_at_its_stated_number_of_nodes() -> None:
    one = after(waiting(), work_events.NodeJoined(at_ms=at(20), node=ALICE))
    assert one.phase is Phase.WAITING
    assert one.reason == "1 of 2 nodes are here"
    step = transition(one, work_events.NodeJoined(at_ms=at(30), node=BOB))
    assert step.job.phase is Phase.TRAINING
    assert len(assignments(step.commands)) == 2
    assert only(step.commands, SetDeadline) == SetDeadline(0, at(1030))


def test_the_connections_that_a_job_states_are_those_of_every_node() -> None:
    several = replace(SPEC, round=replace(SPEC.round, connections=4))
    one = after(replace(waiting(), spec=several), work_events.NodeJoined(at_ms=at(20), node=ALICE))
    step = transition(one, work_events.NodeJoined(at_ms=at(30), node=BOB))
    assert [given_assignment.connections for _, given_assignment in assignments(step.commands)] == [
        4,
        4,
    ]


def test_a_shard_without_its_node_counts_for_the_quorum() -> None:
    three = replace(SPEC, training=replace(SPEC.training, nodes=3))
    job = after(
        training(three),
        work_events.NodeJoined(at_ms=at(30), node=CAROL),
        work_events.NodeLost(at_ms=at(40), node=ALICE, reason="gone"),
        update_event(BOB, round_=0, lease=2),
        events.DeadlineReached(at_ms=at(1030), round=0),
    )
    assert job.phase is Phase.TRAINING
    job = after(job, update_event(CAROL, round_=0, lease=3, at_ms=1040))
    assert job.phase is Phase.AGGREGATING


def test_updates_are_folded_in_slot_order_whatever_their_order_of_arrival() -> None:
    first = transition(
        after(training(), update_event(BOB, round_=0, lease=2)),
        update_event(ALICE, round_=0, lease=1),
    )
    second = transition(
        after(training(), update_event(ALICE, round_=0, lease=1)),
        update_event(BOB, round_=0, lease=2),
    )
    aggregate = only(first.commands, Aggregate)
    assert aggregate == only(second.commands, Aggregate)
    assert [update.slot for update in aggregate.updates] == [0, 1]


def test_late_update_is_refused_with_its_round() -> None:
    job = after(aggregating(), fold_event(0, at_ms=60))
    late = update_event(ALICE, round_=0, lease=1)
    assert rejection(job, late) == "round #1 is not the open one; the job is in round #2"


def test_a_deadline_without_a_quorum_leaves_the_round_open_until_there_is_one() -> None:
    job = after(training(), events.DeadlineReached(at_ms=at(1030), round=0))
    assert job.phase is Phase.TRAINING
    step = transition(job, update_event(ALICE, round_=0, lease=1, at_ms=1100))
    assert step.job.phase is Phase.AGGREGATING
    assert [command.node for command in step.commands if isinstance(command, CancelShard)] == [BOB]


def test_an_early_deadline_is_refused() -> None:
    early = events.DeadlineReached(at_ms=at(500), round=0)
    assert rejection(training(), early) == "the deadline of round #1 is at 1030 ms"


def test_the_shard_of_a_node_cut_by_the_deadline_goes_out_first_in_the_next_round() -> None:
    job = after(
        training(),
        update_event(ALICE, round_=0, lease=1),
        events.DeadlineReached(at_ms=at(1030), round=0),
        fold_event(0, at_ms=1100),
    )
    assert job.open_round.participants[ALICE].shard.ranges == (SampleRange(8, Samples(8)),)
    # He is on trial now, with fewer steps.
    assert job.open_round.participants[BOB].shard.ranges == (SampleRange(16, Samples(4)),)


def test_a_lost_nodes_shard_goes_to_a_newcomer_under_a_fresh_lease() -> None:
    job = after(training(), work_events.NodeLost(at_ms=at(40), node=BOB, reason="silent"))
    step = transition(job, work_events.NodeJoined(at_ms=at(41), node=CAROL))
    ((node, new_assignment),) = assignments(step.commands)
    assert (node, new_assignment.slot, new_assignment.lease.number) == (CAROL, 2, 3)
    assert new_assignment.task.ranges == (SampleRange(8, Samples(8)),)
    assert rejection(step.job, update_event(BOB, round_=0, lease=2)).startswith(
        "the work under lease 2"
    )


def test_a_node_that_comes_back_gets_its_own_shard_and_slot_again() -> None:
    job = after(training(), work_events.NodeLost(at_ms=at(40), node=BOB, reason="silent"))
    step = transition(job, work_events.NodeJoined(at_ms=at(50), node=BOB))
    ((node, new_assignment),) = assignments(step.commands)
    assert (node, new_assignment.slot, new_assignment.lease.number) == (BOB, 1, 3)
    assert rejection(step.job, update_event(BOB, round_=0, lease=2)) == (
        "lease 2 is void; the current one is 3"
    )


def test_a_round_closes_without_a_node_that_is_lost_for_good() -> None:
    job = after(training(), update_event(ALICE, round_=0, lease=1))
    step = transition(job, work_events.NodeLost(at_ms=at(60), node=BOB, reason="silent"))
    assert step.job.phase is Phase.AGGREGATING
    assert step.job.streams[0].returned == (SampleRange(8, Samples(8)),)


def test_a_round_whose_nodes_are_all_lost_waits_for_one_to_come_back() -> None:
    job = after(
        training(),
        work_events.NodeLost(at_ms=at(40), node=ALICE, reason="silent"),
        work_events.NodeLost(at_ms=at(40), node=BOB, reason="silent"),
        events.DeadlineReached(at_ms=at(1030), round=0),
    )
    assert job.phase is Phase.TRAINING
    back = after(job, work_events.NodeJoined(at_ms=at(2000), node=CAROL))
    assert pending(back) == {CAROL}


def test_a_node_that_drained_and_is_back_gets_its_shard_again() -> None:
    job = after(
        training(),
        work_events.NodeDraining(at_ms=at(40), node=ALICE, reason="asked"),
        events.ShardHandedBack(at_ms=at(41), node=ALICE, round=0, lease=1, reason="asked"),
        work_events.NodeDraining(at_ms=at(42), node=BOB, reason="asked"),
        events.ShardHandedBack(at_ms=at(43), node=BOB, round=0, lease=2, reason="asked"),
    )
    assert job.phase is Phase.TRAINING
    assert pending(after(job, work_events.NodeJoined(at_ms=at(50), node=ALICE))) == {ALICE}


def test_a_paused_nodes_lease_is_void_at_once_and_its_shard_waits_for_it_or_another() -> None:
    pause = work_events.NodePaused(at_ms=at(40), node=BOB, reason="paused by its owner")
    step = transition(training(), pause)
    assert only(step.commands, CancelShard) == CancelShard(BOB, 0, 2, "paused by its owner")
    assert rejection(step.job, update_event(BOB, round_=0, lease=2)).startswith("the work under")
    for taker in (BOB, CAROL):
        again = transition(step.job, work_events.NodeJoined(at_ms=at(50), node=taker))
        ((node, new_assignment),) = assignments(again.commands)
        assert (node, new_assignment.lease.number) == (taker, 3)
        assert new_assignment.task.ranges == (SampleRange(8, Samples(8)),)


def test_a_node_that_handed_back_and_was_lost_takes_part_again_when_it_is_back() -> None:
    job = after(
        training(),
        events.ShardHandedBack(at_ms=at(41), node=ALICE, round=0, lease=1, reason="full"),
        work_events.NodeLost(at_ms=at(42), node=ALICE, reason="silent"),
        work_events.NodeJoined(at_ms=at(50), node=ALICE),
    )
    assert pending(job) == {ALICE, BOB}


def test_nodes_whose_shards_were_taken_over_do_not_count_for_the_quorum() -> None:
    spec = replace(SPEC, round=replace(SPEC.round, quorum=1.0))
    job = after(
        training(spec),
        work_events.NodeLost(at_ms=at(40), node=BOB, reason="silent"),
        work_events.NodeJoined(at_ms=at(41), node=CAROL),
        update_event(ALICE, round_=0, lease=1),
        events.DeadlineReached(at_ms=at(1030), round=0),
        update_event(CAROL, round_=0, lease=3, at_ms=1100),
    )
    assert job.phase is Phase.AGGREGATING


def test_schedules_end_with_the_nodes_that_are_there_not_with_the_stated_number() -> None:
    job = after(waiting(), work_events.NodeJoined(at_ms=at(1), node=CAROL))
    job = after(job, work_events.NodeJoined(at_ms=at(20), node=ALICE))
    assert job.open_round.total_samples == 3 * 2 * 8


def test_a_job_whose_every_participant_hands_back_is_paused_with_the_reason() -> None:
    job = after(
        training(),
        events.ShardHandedBack(at_ms=at(40), node=ALICE, round=0, lease=1, reason="no memory"),
        events.ShardHandedBack(at_ms=at(41), node=BOB, round=0, lease=2, reason="no memory"),
    )
    assert job.phase is Phase.PAUSED
    assert job.reason == "every participant handed its shard back: no memory (2 nodes)"
    again = after(job, work_events.JobResumed(at_ms=at(99)))
    assert pending(again) == {ALICE, BOB}
    assert {each.reason for each in again.open_round.participants.values()} == {""}


def test_a_pause_tells_the_commonest_reasons_and_how_many_others_there_are() -> None:
    reasons = ["no memory", "no memory", "a", "b", "c", "x" * 1000]
    joins = [work_events.NodeJoined(at_ms=at(20), node=NodeId(f"0x{n:040}")) for n in range(6)]
    spec = replace(SPEC, training=replace(SPEC.training, nodes=6))
    job = after(waiting(spec), *joins)
    for node, participant in job.open_round.participants.items():
        job = after(job, hand_back(node, participant.lease, reasons.pop()))
    assert job.phase is Phase.PAUSED
    assert job.reason.startswith("every participant handed its shard back: no memory (2 nodes); ")
    assert job.reason.endswith("; and 2 other reasons")
    assert len(job.reason) < 500


def hand_back(node: NodeId, lease: int, reason: str) -> events.ShardHandedBack:
    return events.ShardHandedBack(at_ms=at(40), node=node, round=0, lease=lease, reason=reason)


def test_a_pause_keeps_what_was_accepted_and_a_resume_renews_only_the_rest() -> None:
    job = after(
        training(), update_event(ALICE, round_=0, lease=1), work_events.JobPaused(at_ms=at(530))
    )
    step = transition(job, work_events.JobResumed(at_ms=at(10_000)))
    ((node, new_assignment),) = assignments(step.commands)
    assert (node, new_assignment.lease.number) == (BOB, 3)
    assert only(step.commands, SetDeadline) == SetDeadline(0, at(10_500))


def test_a_pause_by_the_coordinator_itself_says_why() -> None:
    job = after(training(), work_events.JobPaused(at_ms=at(40), reason="its layout is gone"))
    assert job.reason == "its layout is gone"


def test_an_aggregate_that_arrives_during_a_pause_is_kept() -> None:
    job = after(
        aggregating(),
        work_events.JobPaused(at_ms=at(55)),
        fold_event(0, at_ms=60),
    )
    assert job.phase is Phase.PAUSED
    assert job.model == model(1)
    assert after(job, work_events.JobResumed(at_ms=at(70))).phase is Phase.TRAINING


def test_a_draining_node_finishes_its_shard_and_is_released() -> None:
    job = after(training(), work_events.NodeDraining(at_ms=at(40), node=ALICE, reason="asked"))
    step = transition(job, update_event(ALICE, round_=0, lease=1))
    assert [c.node for c in step.commands if isinstance(c, ReleaseNode)] == [ALICE]
    assert not step.job.members[ALICE].is_present


def test_an_unreadable_update_is_taken_out_again_and_its_samples_return() -> None:
    ready = events.AggregateReady(
        at_ms=at(60), round=0, model=model(1), omitted=((BOB, "flipped bit"),)
    )
    job = after(aggregating(), ready)
    assert job.tally.updates_accepted == 1
    assert job.tally.updates_rejected == 1
    assert job.members[BOB].last_accepted is None
    assert job.open_round.participants[ALICE].shard.ranges == (SampleRange(8, Samples(8)),)


def test_a_damaged_model_is_made_again_from_the_round_that_made_it() -> None:
    job = after(aggregating(), fold_event(0, at_ms=60))
    model_loss = events.ModelLost(at_ms=at(70), model=model(1).blob.digest, reason="flipped bit")
    step = transition(job, model_loss)
    assert only(step.commands, Aggregate).base == model(0)
    again = transition(step.job, fold_event(0, at_ms=80))
    assert again.job.phase is Phase.TRAINING
    assert {type(command) for command in again.commands} == {SetDeadline, AssignShard}


def test_a_damaged_model_that_comes_out_different_fails_the_job() -> None:
    job = after(
        aggregating(),
        fold_event(0, at_ms=60),
        events.ModelLost(at_ms=at(70), model=model(1).blob.digest, reason="flipped bit"),
        events.AggregateReady(at_ms=at(80), round=0, model=model(7)),
    )
    assert job.phase is Phase.FAILED


def test_a_damaged_model_whose_base_is_damaged_too_fails_the_job() -> None:
    job = after(
        aggregating(),
        fold_event(0, at_ms=60),
        events.ModelLost(at_ms=at(70), model=model(1).blob.digest, reason="flipped bit"),
        events.ModelLost(at_ms=at(80), model=model(0).blob.digest, reason="gone"),
    )
    assert job.phase is Phase.FAILED
    assert job.reason == "the model and the one before it are damaged: gone"


def test_changed_parameters_take_effect_at_the_next_round() -> None:
    spec = replace(SPEC, inner=replace(SPEC.inner, learning_rate=0.5))
    job = after(training(), events.ParametersChanged(at_ms=at(40), spec=spec))
    assert job.open_round.spec == SPEC
    job = after(
        job,
        *both_updates(),
        fold_event(0, at_ms=60),
    )
    assert job.open_round.spec == spec


def test_fewer_rounds_end_the_job_after_the_open_one() -> None:
    spec = replace(SPEC, training=replace(SPEC.training, rounds=1))
    job = after(
        training(),
        events.ParametersChanged(at_ms=at(40), spec=spec),
        *both_updates(),
        fold_event(0, at_ms=60),
    )
    assert job.phase is Phase.FINISHING


def test_rounds_that_are_done_cannot_be_taken_back() -> None:
    job = after(aggregating(), fold_event(0, at_ms=60))
    spec = replace(SPEC, training=replace(SPEC.training, rounds=1))
    fewer = events.ParametersChanged(at_ms=at(70), spec=spec)
    assert rejection(job, fewer) == (
        "1 of its rounds are done: training.rounds must be more, or stop the job"
    )


def test_the_best_model_is_kept_after_two_more_rounds() -> None:
    job = finishing()
    score = events.EvaluationReady(
        at_ms=at(90),
        round=2,
        model=model(2).blob.digest,
        loss=0.1,
        metric=0.9,
        metric_name="accuracy",
    )
    job = after(job, score)
    assert {"model-2", "model-3"} <= live_blobs(job)
    assert "model-0" not in live_blobs(job)


def test_outstanding_work_of_a_training_job_is_every_pending_assignment() -> None:
    job = after(training(), update_event(ALICE, round_=0, lease=1))
    ((node, new_assignment),) = assignments(outstanding(job))
    assert (node, new_assignment.lease.number) == (BOB, 2)
    assert SetDeadline(0, at(1030)) in outstanding(job)


def test_outstanding_work_outlives_events_that_come_after_the_one_that_caused_it() -> None:
    job = after(aggregating(), work_events.NodeLost(at_ms=at(60), node=BOB, reason="silent"))
    assert [type(command) for command in outstanding(job)] == [Aggregate]


def eager(spec: JobSpec) -> JobSpec:
    aware = replace(spec.aware, sparsest="int4") if spec.strategy == "aware" else spec.aware
    overlapping_round = replace(spec.round, overlap="eager")
    return replace(spec, round=overlapping_round, outer=OuterSettings(momentum=0.5), aware=aware)


EAGER = eager(SPEC)
"""Rounds of two inner steps of four samples: one of them is prefetched."""


def shard(job: Job, node: NodeId) -> tuple[SampleRange, ...]:
    return job.open_round.participants[node].shard.ranges


def run(start: int, count: int) -> SampleRange:
    return SampleRange(start, Samples(count))


def prefetch(job: Job, node: NodeId) -> tuple[SampleRange, ...]:
    member_prefetch = job.members[node].prefetch
    return () if member_prefetch is None else member_prefetch.ranges


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
    by_node = assignments_by_node(outstanding(job))
    alice, bob = by_node[ALICE].prefetch, by_node[BOB].prefetch
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
    assert by_node[ALICE].task.prefetched is None


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
        work_events.NodeLost(at_ms=at(55), node=BOB, reason="silent"),
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
        work_events.NodeLost(at_ms=at(52), node=BOB, reason="silent"),
        work_events.NodeJoined(at_ms=at(54), node=BOB),
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
    # He is on trial, with so few steps that the prefetch is all of them.
    assert shard(step.job, BOB) == (run(20, 4),)
    assert assignments_by_node(step.commands)[BOB].task.prefetched is not None
    assert violations(step.job) == ()


def test_whoever_takes_a_shard_over_takes_it_from_the_model() -> None:
    job = second_round(training(EAGER)).job
    job = after(job, work_events.NodeLost(at_ms=at(65), node=BOB, reason="silent"))
    step = transition(job, work_events.NodeJoined(at_ms=at(70), node=BOB))
    again = assignments_by_node(step.commands)[BOB]
    assert again.task.ranges == (run(20, 4), run(28, 4))
    assert again.task.prefetched is None


def test_a_pause_keeps_the_prefetch() -> None:
    before = second_round(training(EAGER)).job
    paused_job = after(before, work_events.JobPaused(at_ms=at(70)))
    step = transition(paused_job, work_events.JobResumed(at_ms=at(80)))
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
