"""Rounds of the strategy ``aware``: planned first, opened as planned, done by work not by count."""

import pytest
from msgspec.structs import replace

from coordinator.core.training.assignment import JobStep
from coordinator.core.training.job import events
from coordinator.core.training.job.commands import (
    Aggregate,
    AssignShard,
    CancelShard,
    PlanRound,
    SetDeadline,
)
from coordinator.core.training.job.events import RoundRecorded
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from coordinator.core.work.outer_step import PLAIN_STEP
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.assignment import SampleRange
from hypergpu.jobfile.spec import CodecChoice, Evaluation, OuterSettings
from hypergpu.units import Samples
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    CAROL,
    SPEC,
    after,
    at,
    both_updates,
    evaluation_ready,
    fold_event,
    model,
    node_plan,
    only,
    plan_event,
    planning,
    round_plan,
    training,
    update_event,
    waiting,
)

BOTH = {ALICE: node_plan(3, "topk64", forecast_ms=200), BOB: node_plan(1, "int8")}


def figures(step: JobStep) -> RoundRecorded:
    """The record that a step writes of its round."""
    records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
    (record,) = [each for each in records if isinstance(each, RoundRecorded)]
    return record


def open_round(number: int = 0) -> Job:
    """Alice under lease 1 with three inner steps, Bob under lease 2 with one."""
    return after(planning(), plan_event(number, BOTH))


def test_a_job_plans_its_round_as_soon_as_its_nodes_are_there() -> None:
    one = after(waiting(AWARE), work_events.NodeJoined(at_ms=at(20), node=ALICE))
    assert one.phase is Phase.WAITING
    step = transition(one, work_events.NodeJoined(at_ms=at(30), node=BOB))
    assert (step.job.phase, step.job.reason) == (Phase.PLANNING, "round #1 is being planned")
    command = only(step.commands, PlanRound)
    request = command.request
    assert request.candidates == {ALICE: 0, BOB: 1}
    assert (request.samples_done, request.samples_total) == (0, 48)
    assert (request.previous, request.results, request.agreement) == (None, {}, None)


def test_the_round_opens_as_planned() -> None:
    step = transition(planning(), plan_event(0, BOTH))
    assert step.job.reason == "round #1: as the test has it"
    assert only(step.commands, SetDeadline) == SetDeadline(0, at(1040))
    first, second = (each for each in step.commands if isinstance(each, AssignShard))
    assert first.node == ALICE
    assert first.assignment.reason == "H=3, topk64, as planned"
    assert sum(range_.count for range_ in first.assignment.task.ranges) == 12
    assert sum(range_.count for range_ in second.assignment.task.ranges) == 4
    assert first.assignment.task.total_samples == 48
    assert step.job.open_round.participants[ALICE].plan == BOTH[ALICE]


def test_a_node_that_went_while_its_round_was_planned_is_left_out() -> None:
    job = after(planning(), work_events.NodeLost(at_ms=at(35), node=BOB, reason="silent"))
    step = transition(replace(job, model=model(1)), plan_event(1, BOTH))
    assert [each.node for each in step.commands if isinstance(each, AssignShard)] == [ALICE]


def test_a_plan_of_nodes_that_have_all_gone_is_made_again() -> None:
    job = replace(planning(), model=model(1))
    job = after(job, work_events.NodeJoined(at_ms=at(33), node=CAROL))
    step = transition(job, plan_event(1, {ALICE: node_plan()}))
    assert step.job.phase is Phase.TRAINING
    job = after(job, work_events.NodeLost(at_ms=at(35), node=ALICE, reason="silent"))
    step = transition(job, plan_event(1, {ALICE: node_plan()}))
    assert step.job.phase is Phase.PLANNING
    command = only(step.commands, PlanRound)
    assert list(command.request.candidates) == [BOB, CAROL]


def test_a_job_whose_nodes_have_all_gone_while_it_planned_waits_for_one() -> None:
    job = replace(planning(), model=model(1))
    for node in (ALICE, BOB):
        job = after(job, work_events.NodeLost(at_ms=at(35), node=node, reason="silent"))
    step = transition(job, plan_event(1, BOTH))
    assert (step.job.phase, step.commands) == (Phase.WAITING, ())
    assert step.job.plan_memory is None
    again = transition(step.job, work_events.NodeJoined(at_ms=at(50), node=BOB))
    assert again.job.phase is Phase.PLANNING


def test_a_plan_of_another_round_or_of_nobody_is_refused() -> None:
    assert rejection(planning(), plan_event(1, BOTH)) == (
        "round #2 is not being planned; the job is in round #1"
    )
    nobody = events.RoundPlanned(at_ms=at(40), plan=round_plan(0, {}))
    assert rejection(planning(), nobody) == "the plan of round #1 gives nobody work"


def test_a_pause_while_a_round_is_planned_voids_the_plan() -> None:
    job = after(planning(), work_events.JobPaused(at_ms=at(35)))
    assert rejection(job, plan_event(0, BOTH)) == "job-1 is paused and plans no round now"
    step = transition(job, work_events.JobResumed(at_ms=at(90)))
    assert step.job.phase is Phase.PLANNING
    only(step.commands, PlanRound)


def test_a_restart_asks_for_the_plan_again() -> None:
    command = only(outstanding(planning()), PlanRound)
    assert command.request.round == 0


def test_the_next_plan_is_asked_with_what_became_of_the_last() -> None:
    job = after(open_round(), update_event(ALICE, round_=0, lease=1, at_ms=140))
    job = after(job, work_events.NodeLost(at_ms=at(160), node=BOB, reason="silent"))
    ready = events.AggregateReady(at_ms=at(1100), round=0, model=model(1), agreement=1.5)
    step = transition(job, ready)
    assert step.job.phase is Phase.PLANNING
    command = only(step.commands, PlanRound)
    request = command.request
    assert request.round == 1
    assert request.previous == round_plan(0, {}).memory
    assert request.agreement == 1.5
    assert {node: result.took_ms for node, result in request.results.items()} == {
        ALICE: 100,
        BOB: 0,
    }
    assert request.results[ALICE].plan == BOTH[ALICE]
    assert request.samples_done == 12


def test_each_update_is_folded_by_the_codec_that_its_sender_was_given() -> None:
    step = transition(
        after(open_round(), update_event(BOB, round_=0, lease=2, at_ms=60)),
        update_event(ALICE, round_=0, lease=1, at_ms=90),
    )
    command = only(step.commands, Aggregate)
    assert [(each.codec, each.weight) for each in command.updates] == [
        ("topk64", 12),
        ("int8", 4),
    ]
    assert (command.down, command.outer_reason) == ("int4", "momentum 0.00 after 0 rounds")


def test_a_model_that_is_lost_is_made_again_by_the_very_same_fold() -> None:
    step = transition(
        after(open_round(), update_event(BOB, round_=0, lease=2, at_ms=60)),
        update_event(ALICE, round_=0, lease=1, at_ms=90),
    )
    job = after(step.job, fold_event(0, at_ms=95))
    model_loss = events.ModelLost(at_ms=at(99), model=model(1).blob.digest, reason="flipped bit")
    again = transition(job, model_loss)
    assert only(again.commands, Aggregate) == only(step.commands, Aggregate)
    restored_step = transition(again.job, fold_event(0, at_ms=120))
    assert restored_step.job.phase is Phase.PLANNING
    only(restored_step.commands, PlanRound)


def test_a_plan_that_comes_while_the_model_is_made_again_opens_nothing() -> None:
    job = replace(planning(), previous=model(0), model=model(1))
    model_loss = events.ModelLost(at_ms=at(35), model=model(1).blob.digest, reason="flipped bit")
    job = after(job, model_loss, plan_event(1, BOTH))
    assert (job.phase, job.round) == (Phase.WAITING, None)


def test_who_takes_a_shard_over_gets_the_plan_it_was_cut_for() -> None:
    job = after(open_round(), work_events.NodeLost(at_ms=at(60), node=ALICE, reason="silent"))
    step = transition(job, work_events.NodeJoined(at_ms=at(70), node=CAROL))
    command = only(step.commands, AssignShard)
    work = command.assignment
    assert (work.task.inner_steps, work.task.codec, work.upload_after_ms) == (3, "topk64", 0)
    assert work.reason == "H=3, topk64, taken over"


def test_a_batch_of_its_own_is_counted_and_taken_over_as_it_is() -> None:
    alice, bob = (replace(node_plan(1), batch_size=size) for size in (6, 2))
    job = after(planning(), plan_event(0, {ALICE: alice, BOB: bob}))
    ranges = {node: part.shard.ranges for node, part in job.open_round.participants.items()}
    assert ranges == {ALICE: (SampleRange(0, Samples(6)),), BOB: (SampleRange(6, Samples(2)),)}
    step = transition(job, update_event(ALICE, round_=0, lease=1, at_ms=60))
    assert step.job.tally.samples == 6
    job = after(step.job, work_events.NodeJoined(at_ms=at(70), node=CAROL))
    step = transition(job, work_events.NodeLost(at_ms=at(80), node=BOB, reason="silent"))
    command = only(step.commands, AssignShard)
    assert (command.node, command.assignment.task.batch_size) == (CAROL, 2)
    assert command.assignment.task.ranges == ranges[BOB]


def test_a_resting_node_takes_a_shard_over_only_when_nobody_else_is_left() -> None:
    plan = replace(round_plan(0, {ALICE: node_plan()}), resting={BOB: "its uplink is too slow"})
    job = after(planning(), events.RoundPlanned(at_ms=at(40), plan=plan))
    joined_job = after(job, work_events.NodeJoined(at_ms=at(45), node=CAROL))
    step = transition(joined_job, work_events.NodeLost(at_ms=at(50), node=ALICE, reason="silent"))
    assert [each.node for each in step.commands if isinstance(each, AssignShard)] == [CAROL]
    step = transition(job, work_events.NodeLost(at_ms=at(50), node=ALICE, reason="silent"))
    assert [each.node for each in step.commands if isinstance(each, AssignShard)] == [BOB]


def test_a_resting_node_takes_nothing_over_while_others_work() -> None:
    nodes = {ALICE: node_plan(), CAROL: node_plan()}
    plan = replace(round_plan(0, nodes), resting={BOB: "its uplink is too slow"})
    job = after(planning(), work_events.NodeJoined(at_ms=at(35), node=CAROL))
    job = after(job, events.RoundPlanned(at_ms=at(40), plan=plan))
    step = transition(job, work_events.NodeLost(at_ms=at(50), node=ALICE, reason="silent"))
    assert step.commands == ()


def test_the_deadline_of_the_plan_closes_the_round_at_its_quorum() -> None:
    job = after(open_round(), update_event(ALICE, round_=0, lease=1, at_ms=140))
    step = transition(job, events.DeadlineReached(at_ms=at(1040), round=0))
    assert step.job.phase is Phase.TRAINING, "one of two is less than the quorum of 0.6"
    three = {**BOTH, CAROL: node_plan()}
    job = after(planning(), work_events.NodeJoined(at_ms=at(35), node=CAROL), plan_event(0, three))
    job = after(
        job,
        update_event(ALICE, round_=0, lease=1, at_ms=140),
        update_event(BOB, round_=0, lease=2, at_ms=150),
    )
    step = transition(job, events.DeadlineReached(at_ms=at(1040), round=0))
    assert step.job.phase is Phase.AGGREGATING
    assert step.job.reason == "round #1 closed: deadline passed with a quorum (2 of 3, 2 needed)"
    assert [each for each in step.commands if isinstance(each, CancelShard)] == []
    assert set(step.job.long_leases) == {CAROL}, "its work goes on"


def opening_round() -> Job:
    """Alice, Bob and Carol under leases 1 to 3 in a round of which nothing was known."""
    three = {**BOTH, CAROL: node_plan()}
    unmeasured_plan = events.RoundPlanned(at_ms=at(40), plan=round_plan(0, three))
    return after(planning(), work_events.NodeJoined(at_ms=at(35), node=CAROL), unmeasured_plan)


def test_a_round_of_nodes_that_nobody_knows_has_no_deadline_until_its_quorum_is_there() -> None:
    job = after(opening_round(), update_event(ALICE, round_=0, lease=1, at_ms=140))
    assert job.open_round.deadline_at_ms == 0
    step = transition(job, update_event(BOB, round_=0, lease=2, at_ms=840))
    assert step.commands == (SetDeadline(0, at(1640)),), "twice the 800 ms of Bob"
    assert SetDeadline(0, at(1640)) in outstanding(step.job)


def test_a_node_that_hangs_in_its_first_round_holds_nobody_up_for_ever() -> None:
    job = after(
        opening_round(),
        update_event(ALICE, round_=0, lease=1, at_ms=140),
        update_event(BOB, round_=0, lease=2, at_ms=840),
    )
    step = transition(job, events.DeadlineReached(at_ms=at(1640), round=0))
    assert step.job.phase is Phase.AGGREGATING
    assert set(step.job.long_leases) == {CAROL}


def test_a_quorum_that_comes_during_a_pause_sets_the_deadline_when_it_is_over() -> None:
    job = after(
        opening_round(),
        update_event(ALICE, round_=0, lease=1, at_ms=140),
        work_events.JobPaused(at_ms=at(200)),
        update_event(BOB, round_=0, lease=2, at_ms=840),
    )
    step = transition(job, work_events.JobResumed(at_ms=at(1000)))
    assert only(step.commands, SetDeadline) == SetDeadline(0, at(2440)), "1,600 ms and the pause"


def test_a_model_that_is_made_again_while_the_quorum_comes_takes_no_work_from_anybody() -> None:
    job = after(
        opening_round(),
        events.ModelLost(at_ms=at(50), model=model(0).blob.digest, reason="flipped bit"),
        update_event(ALICE, round_=0, lease=1, at_ms=140),
        update_event(BOB, round_=0, lease=2, at_ms=840),
    )
    again = events.ModelInitialised(at_ms=at(300), model=model(0), partition_sizes=(Samples(9),))
    step = transition(job, again)
    assert only(step.commands, SetDeadline) == SetDeadline(0, at(1640))
    assert [each.node for each in step.commands if isinstance(each, AssignShard)] == [CAROL]


def test_a_round_that_needs_every_update_waits_for_everybody() -> None:
    spec = replace(SPEC, round=replace(SPEC.round, deadline_ms=0, quorum=1.0))
    step = transition(training(spec), update_event(ALICE, round_=0, lease=1, at_ms=140))
    assert step.commands == ()


def test_the_record_of_a_round_has_what_was_planned_and_how_far_off_it_was() -> None:
    job = after(
        open_round(),
        update_event(BOB, round_=0, lease=2, at_ms=60),
        update_event(ALICE, round_=0, lease=1, at_ms=140),
    )
    step = transition(job, fold_event(0, at_ms=150))
    record = figures(step)
    assert (record.inner_steps, record.codecs, record.resting) == (2, {"topk64": 1, "int8": 1}, 0)
    assert record.forecast_error == pytest.approx(1.0)  # 200 ms forecast, 100 taken


def test_forecasts_of_those_who_go_on_count_as_off_by_at_least_what_they_were_late() -> None:
    three = {**BOTH, CAROL: node_plan(forecast_ms=200)}
    job = after(
        planning(),
        work_events.NodeJoined(at_ms=at(35), node=CAROL),
        plan_event(0, three),
        update_event(ALICE, round_=0, lease=1, at_ms=240),
        update_event(BOB, round_=0, lease=2, at_ms=240),
        events.DeadlineReached(at_ms=at(1040), round=0),
    )
    step = transition(job, fold_event(0, at_ms=1100))
    assert figures(step).forecast_error == pytest.approx((0 + 0.8) / 2)


def test_a_job_is_done_when_its_work_is_done_however_few_the_rounds() -> None:
    big = {ALICE: node_plan(6), BOB: node_plan(6)}
    job = after(
        planning(),
        plan_event(0, big),
        *both_updates(at_ms=60),
    )
    assert job.tally.samples == 48
    job = after(job, fold_event(0, at_ms=70))
    assert job.phase is Phase.FINISHING
    done_job = after(job, replace(evaluation_ready(1), round=1))
    assert done_job.phase is Phase.FINISHED


def test_a_job_goes_on_past_its_stated_rounds_until_its_work_is_done() -> None:
    job = planning()
    for number in range(SPEC.training.rounds + 2):
        job = after(
            job,
            plan_event(number, {ALICE: node_plan(1), BOB: node_plan(1)}, at_ms=100 * number + 100),
            *both_updates(number, first_lease=2 * number + 1, at_ms=100 * number + 150),
            fold_event(number, at_ms=100 * number + 160),
        )
        assert (job.phase is Phase.FINISHING) == (job.tally.samples >= 48)
    assert job.tally.samples == 40


def test_settings_that_are_done_already_are_refused() -> None:
    job = after(
        planning(),
        plan_event(0, {ALICE: node_plan(3), BOB: node_plan(3)}),
        *both_updates(at_ms=60),
        fold_event(0, at_ms=70),
    )
    spec = replace(AWARE, training=replace(AWARE.training, rounds=1))
    assert rejection(job, events.ParametersChanged(at_ms=at(80), spec=spec)) == (
        "24 samples are trained on, 16 would be all: training.rounds must be more, or stop the job"
    )


def test_a_pause_does_not_count_as_the_time_that_an_update_took() -> None:
    job = after(
        open_round(),
        work_events.JobPaused(at_ms=at(60)),
        work_events.JobResumed(at_ms=at(560)),
        update_event(ALICE, round_=0, lease=3, at_ms=640),
    )
    assert job.open_round.participants[ALICE].took_ms == 100


def test_a_sparse_codec_takes_the_plain_outer_step() -> None:
    outer = OuterSettings(learning_rate=1.0, momentum=0.0)
    spec = replace(SPEC, codec=CodecChoice("topk64", "int4"), outer=outer)
    job = after(training(spec), update_event(ALICE, round_=0, lease=1))
    command = only(transition(job, update_event(BOB, round_=0, lease=2)).commands, Aggregate)
    assert command.outer == PLAIN_STEP


def test_a_job_that_reaches_its_target_is_finished_at_once() -> None:
    spec = replace(SPEC, evaluation=Evaluation(every=1, target=0.95))
    job = after(
        training(spec),
        *both_updates(),
        fold_event(0, at_ms=60),
    )
    below = replace(evaluation_ready(1), metric=0.94)
    assert after(job, below).phase is Phase.TRAINING
    step = transition(job, replace(evaluation_ready(1), metric=0.95))
    assert step.job.phase is Phase.FINISHED
    assert step.job.reason == "the target is reached: accuracy 0.95 by the model of round 1"
    assert len([each for each in step.commands if isinstance(each, CancelShard)]) == 2


def test_a_target_reached_while_the_job_is_paused_finishes_it() -> None:
    spec = replace(AWARE, evaluation=Evaluation(every=1, target=0.95))
    job = after(
        planning(spec),
        plan_event(0, BOTH),
        *both_updates(at_ms=50),
        fold_event(0, at_ms=60),
        work_events.JobPaused(at_ms=at(70)),
        evaluation_ready(1),
    )
    assert (job.phase, job.resume_to) == (Phase.FINISHED, None)


def test_the_samples_of_an_update_that_was_unreadable_are_work_again() -> None:
    big = {ALICE: node_plan(6), BOB: node_plan(6)}
    job = after(
        planning(),
        plan_event(0, big),
        *both_updates(at_ms=60),
        events.AggregateReady(
            at_ms=at(70), round=0, model=model(1), omitted=((BOB, "flipped bit"),)
        ),
    )
    assert job.phase is Phase.PLANNING
    assert job.tally.samples == Samples(24)
