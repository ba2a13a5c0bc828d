"""Nodes that hold a shard and deliver nothing: who is waited for, for how long, and who rests."""

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.core.training.assignment import JobStep, plan_reason
from coordinator.core.training.job import events
from coordinator.core.training.job.commands import AssignShard, CancelShard, SetDeadline
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.transition import rejection, transition
from coordinator.core.training.waiting import late_at_ms
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from coordinator.core.work.standing import Standing
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, RoundRule
from hypergpu.units import Samples
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    CAROL,
    SPEC,
    after,
    at,
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

PLAIN = replace(SPEC, round=RoundRule(quorum=0.5), training=replace(SPEC.training, rounds=90))
TOOK_MS = 10_000


def due(job: Job) -> Job:
    """The job once the timer of its round has come."""
    at_ms = job.open_round.timer_at_ms
    return after(job, events.DeadlineReached(at_ms=at_ms, round=job.open_round.number))


def closed_round(job: Job, *silent: NodeId) -> Job:
    """The job after a round in which everybody but the silent delivers within ten seconds."""
    round_ = job.open_round
    for node, participant in round_.participants.items():
        if node not in silent:
            now_ms = round_.opened_at_ms + TOOK_MS
            sent_event = update_event(
                node, round_=round_.number, lease=participant.lease, at_ms=now_ms
            )
            job = after(job, sent_event)
    while job.phase is Phase.TRAINING:
        job = due(job)
    return job


def next_round(job: Job) -> Job:
    return after(job, fold_event(job.open_round.number, at_ms=job.at_ms + 100))


def two_rounds() -> Job:
    """A job in round 1 whose Alice has delivered, and whose Bob was silent."""
    return next_round(closed_round(training(PLAIN), BOB))


def test_a_job_without_a_deadline_goes_on_without_a_node_that_never_delivers() -> None:
    job = closed_round(training(PLAIN), BOB)
    assert job.phase is Phase.AGGREGATING
    assert job.at_ms <= 30 + 3 * TOOK_MS + 1000
    assert job.reason == (
        "round #1 closed: every expected update is there (1 of 1); 1 node passed over"
    )
    assert job.open_round.participants[BOB].work is WorkState.PASSED_OVER


def test_the_shard_of_a_silent_node_goes_on_to_another_in_the_next_round() -> None:
    job = training(PLAIN)
    missed_ranges = job.open_round.participants[BOB].shard.ranges
    job = next_round(closed_round(job, BOB))
    assert job.open_round.participants[ALICE].shard.ranges == missed_ranges


def test_a_shard_of_a_partition_that_nobody_serves_goes_on_to_another_node() -> None:
    two = events.ModelInitialised(
        at_ms=at(10), model=model(0), partition_sizes=(Samples(50), Samples(50))
    )
    job = after(None, events.JobCreated(at_ms=at(0), job_id=waiting().job_id, spec=PLAIN), two)
    for node in (ALICE, BOB):
        job = after(job, work_events.NodeJoined(at_ms=at(30), node=node))
    missed_shard = job.open_round.participants[BOB].shard
    job = after(job, update_event(ALICE, round_=0, lease=1, at_ms=60))
    job = after(job, work_events.NodeLost(at_ms=at(70), node=BOB, reason="gone"))
    assert next_round(job).open_round.participants[ALICE].shard == missed_shard


def test_a_late_update_counts_while_the_round_waits_for_others() -> None:
    # Of steps that are fixed a round waits for no such node.
    plain = replace(PLAIN, strategy="fedavg")
    job = after(training(plain), work_events.NodeJoined(at_ms=at(40), node=CAROL))
    job = next_round(closed_round(job))
    for node, pace_ms in ((ALICE, TOOK_MS), (BOB, 2 * TOOK_MS), (CAROL, 9 * TOOK_MS)):
        member = replace(job.members[node], standing=Standing(at(pace_ms), 2))
        job = replace(job, members={**job.members, node: member})
    works = {
        node: replace(part, plan=replace(part.plan, inner_steps=2), work=WorkState.PENDING)
        for node, part in job.open_round.participants.items()
    }
    counts = {WorkState.PENDING: 3}
    job = replace(job, round=replace(job.open_round, participants=works, counts=counts))
    leases = {node: part.lease for node, part in works.items()}
    opened_ms = job.open_round.opened_at_ms
    sent_event = update_event(ALICE, round_=1, lease=leases[ALICE], at_ms=opened_ms + TOOK_MS)
    job = after(job, sent_event)
    while job.open_round.participants[BOB].work is WorkState.PENDING:
        job = due(job)
    assert job.open_round.participants[BOB].work is WorkState.LATE
    assert job.phase is Phase.TRAINING, "Carol is awaited, whose pace is slower"
    late = update_event(BOB, round_=1, lease=leases[BOB], at_ms=job.at_ms + 1)
    assert after(job, late).open_round.participants[BOB].work is WorkState.RECEIVED


def test_nobody_is_late_while_no_update_is_in() -> None:
    job = due(due(training(PLAIN)))
    assert set(job.open_round.pending) == {ALICE, BOB}
    assert {part.work for part in job.open_round.participants.values()} == {WorkState.PENDING}


def test_a_round_of_silent_nodes_gives_a_shard_to_one_that_joins_later() -> None:
    job = after(training(PLAIN), work_events.NodeJoined(at_ms=at(40), node=CAROL))
    step = transition(job, events.DeadlineReached(at_ms=job.open_round.timer_at_ms, round=0))
    assert only(step.commands, CancelShard).node == ALICE
    assert only(step.commands, AssignShard).node == CAROL
    assert rejection(step.job, update_event(ALICE, round_=0, lease=1)).endswith(
        "is passed over already"
    )


def test_where_all_are_slower_than_usual_the_first_update_makes_nobody_late() -> None:
    job = next_round(closed_round(training(PLAIN)))
    slow_ms = job.open_round.opened_at_ms + 8 * TOOK_MS
    sent_event = update_event(
        ALICE, round_=1, lease=job.open_round.participants[ALICE].lease, at_ms=slow_ms
    )
    job = after(job, sent_event)
    assert job.open_round.participants[BOB].work is WorkState.PENDING
    assert late_at_ms(job, BOB) >= slow_ms + 3 * TOOK_MS


def test_a_planned_node_is_late_at_twice_its_forecast() -> None:
    parts = {ALICE: node_plan(forecast_ms=10_000), BOB: node_plan(forecast_ms=12_000)}
    job = after(planning(AWARE), plan_event(0, parts))
    job = after(job, update_event(ALICE, round_=0, lease=1, at_ms=10_000))
    assert late_at_ms(job, BOB) == 40 + 24_000
    closed_job = due(due(job))
    assert closed_job.phase is Phase.AGGREGATING
    assert closed_job.long_leases[BOB].work is WorkState.UNDER_WAY


def test_nobody_waits_again_for_a_node_that_was_silent_once_patience_is_spent() -> None:
    job = two_rounds()
    assert job.patience_ms is not None
    assert job.patience_ms <= TOOK_MS // 16
    assert job.open_round.participants[BOB].work is WorkState.ON_TRIAL
    opened_ms = job.open_round.opened_at_ms
    job = closed_round(job, BOB)
    assert job.at_ms - opened_ms <= 1.1 * TOOK_MS


def test_a_silent_node_rests_longer_each_time_and_says_why() -> None:
    job, rounds_of_bob = two_rounds(), []
    for number in range(1, 40):
        if BOB in job.open_round.participants:
            rounds_of_bob.append(number)
        job = next_round(closed_round(job, BOB))
    assert rounds_of_bob == [1, 3, 7, 15, 31]
    reason = "no update in time, 6 rounds in a row; tries again in round #64"
    assert plan_reason(job, BOB) == reason
    assert plan_reason(job, ALICE) == ""


def test_a_node_that_works_again_is_waited_for_again() -> None:
    job = next_round(closed_round(two_rounds()))
    assert job.members[BOB].standing.is_proven
    assert job.open_round.participants[BOB].work is WorkState.PENDING
    assert job.open_round.participants[BOB].inner_steps == PLAIN.training.inner_steps


def test_a_node_on_trial_has_a_part_of_the_work() -> None:
    spec = replace(PLAIN, training=replace(PLAIN.training, inner_steps=20))
    job = next_round(closed_round(training(spec), BOB))
    assert {n: part.inner_steps for n, part in job.open_round.participants.items()} == {
        ALICE: 20,
        BOB: 5,
    }


def test_silent_nodes_count_for_no_quorum_at_the_deadline() -> None:
    spec = replace(PLAIN, round=RoundRule(deadline_ms=1000, quorum=0.9))
    job = closed_round(training(spec), BOB)
    assert job.phase is Phase.AGGREGATING


def test_a_job_whose_nodes_were_all_silent_still_gives_them_work() -> None:
    job = after(two_rounds(), work_events.NodeLost(at_ms=at(90_000), node=ALICE, reason="gone"))
    job = after(job, work_events.NodeJoined(at_ms=at(90_001), node=CAROL))
    assert job.phase is Phase.TRAINING
    assert job.open_round.participants[CAROL].is_open


def test_a_job_that_needs_every_update_is_never_passed_over() -> None:
    spec = replace(PLAIN, round=RoundRule(quorum=1.0))
    job = after(training(spec), update_event(ALICE, round_=0, lease=1, at_ms=100))
    assert job.open_round.timer_at_ms == 0
    assert rejection(job, events.DeadlineReached(at_ms=at(10**9), round=0)).endswith("now")


def test_a_pause_makes_nobody_late() -> None:
    job = after(
        training(PLAIN),
        update_event(ALICE, round_=0, lease=1, at_ms=TOOK_MS),
        work_events.JobPaused(at_ms=at(TOOK_MS + 1)),
    )
    step = transition(job, work_events.JobResumed(at_ms=at(10**7)))
    (timer,) = [each for each in step.commands if isinstance(each, SetDeadline)]
    assert timer.at_ms > 10**7 + TOOK_MS


@pytest.mark.parametrize("spec", [PLAIN, AWARE])
def test_what_is_known_of_a_silent_node_survives_being_written_down(spec: JobSpec) -> None:
    job = replace(two_rounds(), spec=spec)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


def test_a_node_that_delivers_every_second_time_is_waited_for_ever_less() -> None:
    standing, awaited_rounds = Standing(at(TOOK_MS), 2), []
    for number in range(100):
        if standing.is_proven:
            awaited_rounds.append(number)
            standing = standing.after_miss()
        else:
            standing = standing.after_work(at(TOOK_MS), 2)
    assert len(awaited_rounds) <= 8


def test_an_honest_node_that_was_slow_once_owes_nothing_after_two_rounds() -> None:
    standing = Standing(at(TOOK_MS), 2).after_miss()
    assert standing.is_proven
    assert standing.rests_until == 0
    for _ in range(2):
        standing = standing.after_work(at(TOOK_MS), 2)
    assert (standing.arrears, standing.misses, standing.missed_in_a_row) == (0, 0, 0)


def commands_of(step: JobStep) -> list[str]:
    return [type(command).__name__ for command in step.commands]


def test_an_end_of_patience_closes_the_round_once() -> None:
    job = after(two_rounds(), update_event(ALICE, round_=1, lease=3, at_ms=60_000))
    assert job.phase is Phase.TRAINING, "there is a little patience left for Bob"
    event = events.DeadlineReached(at_ms=job.open_round.timer_at_ms, round=1)
    step = transition(job, event)
    assert commands_of(step) == ["CancelShard", "Aggregate"]
    assert step.job.patience_ms is not None
