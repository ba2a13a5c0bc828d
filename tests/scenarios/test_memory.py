"""Transcripts of nodes that run out of memory."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.training.assignment import newest_plan_reason, plan_reason
from coordinator.core.training.job import events
from coordinator.core.training.job.commands import Aggregate, AssignShard
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.plan.decision import MemoryFit, MemoryUse, NodePlan
from coordinator.core.training.plan.memory_fit import fit_plan, fitted_rule, tighter_fit
from coordinator.core.training.transition import transition
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Inner, JobSpec
from hypergpu.optimizer import pass_sizes
from hypergpu.units import Bytes
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    CAROL,
    SPEC,
    after,
    at,
    both_updates,
    fold_event,
    node_plan,
    only,
    plan_event,
    planning,
    training,
    update_event,
    waiting,
)

HALF = "micro-batch 2 of 4: a larger one ran out of memory"


def shortage(job: Job, node: NodeId) -> events.ShardHandedBack:
    """The node's worker ran out of memory under its newest lease."""
    return events.ShardHandedBack(
        at_ms=at(40),
        node=node,
        round=job.open_round.number,
        lease=job.open_round.participants[node].lease,
        reason="out of memory: 2 GiB",
        lacks_memory=True,
    )


def shortages(job: Job, *nodes: NodeId) -> Job:
    for node in nodes:
        job = after(job, shortage(job, node))
    return job


def test_a_node_short_of_memory_takes_its_shard_again_with_half_as_much_at_once() -> None:
    job = training()
    before = job.open_round.participants[ALICE]
    step = transition(job, shortage(job, ALICE))
    command = only(step.commands, AssignShard)
    assert (command.node, command.assignment.lease.number) == (ALICE, 3)
    task = command.assignment.task
    assert (task.batch_size, task.inner_steps, task.optimizer.micro_batch) == (4, 2, 2)
    assert task.ranges == before.shard.ranges
    assert command.assignment.reason.endswith(HALF)
    record = only(step.commands, WriteRecord).record
    assert isinstance(record, events.MemoryFitted)
    assert (record.node, record.micro_batch, record.reason.endswith(HALF)) == (ALICE, 2, True)
    assert plan_reason(step.job, ALICE) == f"H=2, int4, once more; {HALF}"


def test_a_journal_from_before_refits_replays_as_it_was() -> None:
    fields = {"node": ALICE, "round": 0, "lease": 1, "reason": "out of memory: 2 GiB"}
    row = {"kind": "ShardHandedBack", "at_ms": 40, **fields, "is_out_of_memory": True}
    before = training()
    job = after(before, msgspec.convert(row, events.Event))
    assert job.open_round.participants[ALICE].work is WorkState.HANDED_BACK
    assert job.next_lease == before.next_lease


def test_what_fits_is_known_in_later_rounds() -> None:
    job = shortages(training(), ALICE)
    job = after(job, update_event(ALICE, round_=0, lease=3), update_event(BOB, round_=0, lease=2))
    job = after(job, fold_event(0))
    parts = job.open_round.participants
    assert (parts[ALICE].plan.micro_batch, parts[BOB].plan.micro_batch) == (2, 0)
    assert parts[ALICE].plan.reason == f"H=2, int4; {HALF}"


def test_a_plan_is_asked_for_with_what_fits() -> None:
    job = after(planning(), plan_event(0, {ALICE: node_plan(), BOB: node_plan()}))
    job = after(shortages(job, ALICE), *both_updates_after_one_retry(), fold_event(0))
    assert job.phase is Phase.PLANNING
    assert job.members[ALICE].fit == MemoryFit(2, why="a larger one ran out of memory")


def both_updates_after_one_retry() -> tuple[events.Event, events.Event]:
    return update_event(ALICE, round_=0, lease=3), update_event(BOB, round_=0, lease=2)


def test_every_participant_may_run_out_of_memory_and_the_round_goes_on() -> None:
    job = shortages(training(), ALICE, BOB)
    assert job.phase is Phase.TRAINING
    assert {each.plan.micro_batch for each in job.open_round.participants.values()} == {2}
    assert after(job, *both_updates(first_lease=3)).phase is Phase.AGGREGATING


def test_a_node_in_which_no_sample_fits_is_left_out_and_its_shard_goes_to_another() -> None:
    job = after(training(), work_events.NodeJoined(at_ms=at(35), node=CAROL))
    job = shortages(job, ALICE, ALICE, ALICE)
    parts = job.open_round.participants
    assert parts[CAROL].shard == parts[ALICE].shard
    job = after(job, update_event(BOB, round_=0, lease=2), update_event(CAROL, round_=0, lease=5))
    job = after(job, fold_event(0))
    why = "left out: one sample at a time runs out of memory"
    assert job.open_round.resting == {ALICE: why}
    assert plan_reason(job, ALICE) == why
    ended_job = after(job, work_events.JobStopped(at_ms=job.at_ms))
    newer = replace(training(), members={BOB: ended_job.members[BOB]})
    assert newest_plan_reason([newer, ended_job], ALICE) == f"in {ended_job.job_id}: {why}"
    assert newest_plan_reason([newer], ALICE) == ""


def test_a_pair_of_which_one_ran_out_of_memory_is_not_compared() -> None:
    def aggregate_command(*short: NodeId) -> Aggregate:
        job = training()
        job = replace(job, round=replace(job.open_round, duplicates={BOB: ALICE}))
        job = shortages(job, *short)
        lease = job.open_round.participants[ALICE].lease
        job = after(job, update_event(ALICE, round_=0, lease=lease))
        return only(transition(job, update_event(BOB, round_=0, lease=2)).commands, Aggregate)

    assert aggregate_command(ALICE).duplicates.pairs == {BOB: ALICE}
    assert not aggregate_command().duplicates.incomparable
    assert aggregate_command(ALICE).duplicates.incomparable == {BOB}


def test_a_node_that_left_and_came_back_is_tried_with_one_sample_at_a_time() -> None:
    job = shortages(training(), ALICE, ALICE, ALICE)
    job = after(job, work_events.NodeLost(at_ms=at(50), node=ALICE, reason="asked"))
    job = after(job, work_events.NodeJoined(at_ms=at(60), node=ALICE))
    part = job.open_round.participants[ALICE]
    assert (part.is_open, part.plan.micro_batch) == (True, 1)


def test_activations_are_computed_again_before_a_node_is_left_out() -> None:
    job = shortages(replace(training(), can_checkpoint=True), ALICE, ALICE)
    assert not job.open_round.participants[ALICE].plan.checkpoints_activations
    step = transition(job, shortage(job, ALICE))
    task = only(step.commands, AssignShard).assignment.task
    assert (task.optimizer.micro_batch, task.optimizer.checkpoints_activations) == (1, True)
    why = "micro-batch 1 of 4 with activation checkpointing: it ran out of memory without"
    assert step.job.open_round.participants[ALICE].plan.reason.endswith(why)
    job = shortages(step.job, ALICE)
    assert "with activation checkpointing" in job.members[ALICE].fit.shortage


def test_a_job_without_a_node_that_has_the_memory_waits_for_one_that_does() -> None:
    job = shortages(training(), *(3 * [ALICE]), *(3 * [BOB]))
    assert job.phase is Phase.TRAINING
    assert job.reason.startswith("waits for a node with more memory: out of memory: 2 GiB")
    job = after(job, work_events.NodeJoined(at_ms=at(70), node=CAROL))
    assert job.open_round.participants[CAROL].is_open


def test_a_node_that_runs_out_of_memory_while_the_job_is_paused_tries_again_on_resume() -> None:
    job = after(training(), work_events.JobPaused(at_ms=at(35)))
    step = transition(job, shortage(job, ALICE))
    assert not [each for each in step.commands if isinstance(each, AssignShard)]
    step = transition(step.job, work_events.JobResumed(at_ms=at(90)))
    tasks = {
        each.node: each.assignment.task for each in step.commands if isinstance(each, AssignShard)
    }
    assert tasks[ALICE].optimizer.micro_batch == 2
    assert tasks[BOB].optimizer.micro_batch == 0


def measured_update(node: NodeId, *, lease: int, peak_bytes: int) -> events.Event:
    """An update whose first step was measured: 1 GB before it."""
    event = update_event(node, round_=0, lease=lease)
    assert isinstance(event, events.UpdateReceived)
    memory = MemoryUse(Bytes(10**9), Bytes(peak_bytes))
    return replace(event, update=replace(event.update, memory=memory))


def with_memory(node: NodeId, memory_bytes: int) -> events.Event:
    return work_events.NodeJoined(at_ms=at(45), node=node, memory_bytes=Bytes(memory_bytes))


@pytest.mark.parametrize(
    ("memory_bytes", "micro_batch", "checkpoints"),
    [(0, 0, False), (8 * 10**9, 0, False), (4 * 10**9, 2, False), (2 * 10**9, 1, True)],
)
def test_a_newcomer_begins_with_what_fits_by_the_least_that_others_measured(
    *, memory_bytes: int, micro_batch: int, checkpoints: bool
) -> None:
    job = after(replace(training(), can_checkpoint=True), with_memory(CAROL, memory_bytes))
    # Bob's 4 GB are Alice's or an exaggeration: a sample takes 1 GB.
    updates = (
        measured_update(ALICE, lease=1, peak_bytes=5 * 10**9),
        measured_update(BOB, lease=2, peak_bytes=17 * 10**9),
    )
    job = after(job, *updates, fold_event(0))
    plan = job.open_round.participants[CAROL].plan
    assert (plan.micro_batch, plan.checkpoints_activations) == (micro_batch, checkpoints)
    if micro_batch == 2:
        assert plan.reason.endswith("micro-batch 2 of 4: a sample takes 1 GB of 4 GB")


def test_a_node_keeps_what_its_own_updates_showed_to_fit() -> None:
    job = after(waiting(), with_memory(ALICE, 6 * 10**9), with_memory(BOB, 6 * 10**9))
    for lease, node in enumerate((ALICE, BOB), 1):
        job = after(job, measured_update(node, lease=lease, peak_bytes=5 * 10**9))
    job = after(job, with_memory(CAROL, 4 * 10**9), fold_event(0))
    # Four fifths of 6 GB are less than a whole batch has taken of it.
    micro_batches = {n: p.plan.micro_batch for n, p in job.open_round.participants.items()}
    assert micro_batches == {ALICE: 0, BOB: 0, CAROL: 2}
    job = after(job, update_event(CAROL, round_=1, lease=5))
    assert job.members[CAROL].fit.micro_batch == 2


def test_a_measure_that_cannot_be_is_of_no_use() -> None:
    job = after(training(), with_memory(CAROL, 10**9))
    job = after(
        job,
        measured_update(ALICE, lease=1, peak_bytes=1),
        measured_update(BOB, lease=2, peak_bytes=1),
    )
    job = after(job, fold_event(0))
    assert job.open_round.participants[CAROL].plan.micro_batch == 0


def test_a_peak_above_the_memory_of_its_device_binds_nobody() -> None:
    job = after(waiting(), *(with_memory(node, 8 * 10**9) for node in (ALICE, BOB, CAROL)))
    job = after(job, measured_update(ALICE, lease=1, peak_bytes=2**62))
    assert job.memory_use is None
    job = after(job, update_event(BOB, round_=0, lease=2), fold_event(0))
    assert job.open_round.participants[CAROL].plan.micro_batch == 0


@pytest.mark.parametrize("spec", [SPEC, AWARE], ids=["stated", "planned"])
def test_a_node_without_a_shortage_has_no_passes(spec: JobSpec) -> None:
    plan = node_plan()
    assert fit_plan(plan, MemoryFit(), spec) == plan
    assert fitted_rule(plan, spec) == spec.inner.rule


def fits(plan: NodePlan, spec: JobSpec, *, can_checkpoint: bool) -> Iterator[MemoryFit]:
    """Everything that is tried, until nothing is left."""
    fit = MemoryFit()
    while not fit.shortage:
        fit = tighter_fit(fit_plan(plan, fit, spec), spec, can_checkpoint=can_checkpoint)
        yield fit


@given(batch=st.integers(1, 65_536), stated=st.integers(0, 65_536), can_checkpoint=st.booleans())
def test_each_try_takes_less_memory_than_the_one_before(
    *, batch: int, stated: int, can_checkpoint: bool
) -> None:
    plan = replace(node_plan(), batch_size=batch)
    spec = replace(SPEC, inner=Inner(micro_batch=stated))
    tried_fits = list(fits(plan, spec, can_checkpoint=can_checkpoint))
    rules = [
        fitted_rule(fit_plan(plan, fit, spec), spec) for fit in (MemoryFit(), *tried_fits[:-1])
    ]
    needs = [
        (not rule.checkpoints_activations, pass_sizes(batch, rule.micro_batch)[0]) for rule in rules
    ]
    assert needs == sorted(set(needs), reverse=True)
    assert needs[-1] == (not can_checkpoint, 1)
    assert len(tried_fits) <= 19
