"""Leases over several rounds: what no round waits for, and what becomes of it."""

from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.commands import Aggregate, AssignShard, CancelShard, PlanRound
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.long_leases import BASES_MOST, staleness_factor, within_quota
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.streams import shard_samples
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from netsim.virtual.invariants import violations
from tests.unit.job_states import (
    ALICE,
    BOB,
    after,
    at,
    fold_event,
    node_plan,
    only,
    plan_event,
    planning,
    round_plan,
    update_event,
)

LASTS = 4


def long_plan(rounds: int = LASTS) -> NodePlan:
    return replace(node_plan(1), rounds=rounds)


def open_round(rounds: int = LASTS) -> Job:
    """Round 0, in which Alice works, and Bob under a lease over several rounds."""
    return after(planning(), plan_event(0, {ALICE: node_plan(2), BOB: long_plan(rounds)}))


def next_round(job: Job, number: int, at_ms: int) -> Job:
    """The open round closed and folded, and the next one open, in which Alice alone takes part."""
    lease = job.open_round.participants[ALICE].lease
    job = after(job, update_event(ALICE, round_=number, lease=lease, at_ms=at_ms))
    assert job.phase is Phase.AGGREGATING
    job = after(job, fold_event(number, at_ms=at_ms + 10))
    assert not violations(job)
    return after(job, plan_event(number + 1, {ALICE: node_plan(2)}))


def bobs_update(at_ms: int, *, round_: int = 0, lease: int = 2) -> events.Event:
    return update_event(BOB, round_=round_, lease=lease, at_ms=at_ms)


def test_no_round_waits_for_it_and_the_next_plan_does_not_ask_its_node() -> None:
    job = open_round()
    assert set(job.open_round.participants) == {ALICE}
    assert job.long_leases[BOB].work is WorkState.UNDER_WAY
    job = after(job, update_event(ALICE, round_=0, lease=1, at_ms=140))
    assert job.phase is Phase.AGGREGATING
    step = transition(job, fold_event(0, at_ms=150))
    plan = only(step.commands, PlanRound).request
    assert set(plan.candidates) == {ALICE}
    assert plan.under_way == {BOB}


def test_its_update_is_folded_by_the_round_that_closes_next_and_counts_less() -> None:
    job = next_round(open_round(), 0, 140)
    job = after(job, bobs_update(200))
    assert job.long_leases[BOB].work is WorkState.RECEIVED
    assert job.phase is Phase.TRAINING, "it fills no quorum"
    alice = job.open_round.participants[ALICE]
    step = transition(job, update_event(ALICE, round_=1, lease=alice.lease, at_ms=240))
    updates_by_node = {each.node: each for each in only(step.commands, Aggregate).updates}
    assert set(updates_by_node) == {ALICE, BOB}
    samples = {
        ALICE: shard_samples(alice.shard.ranges),
        BOB: shard_samples(job.long_leases[BOB].shard.ranges),
    }
    relative = (updates_by_node[BOB].weight / samples[BOB]) / (
        updates_by_node[ALICE].weight / samples[ALICE]
    )
    assert abs(relative - staleness_factor(1)) < 0.01
    assert BOB not in step.job.long_leases
    record = transition(step.job, fold_event(1, at_ms=250))
    (measurement,) = [
        each.record
        for each in record.commands
        if isinstance(each, WriteRecord) and isinstance(each.record, events.RoundMeasured)
    ]
    contributions = {each.contribution.node: each.contribution for each in measurement.updates}
    assert contributions[BOB].round == 0
    assert contributions[BOB].model == "model-0"
    assert contributions[ALICE].round == 1


def test_the_factor_falls_with_every_round_and_is_a_quarter_at_last() -> None:
    factors = [staleness_factor(rounds) for rounds in range(16)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == 0.25


def test_an_update_that_comes_while_a_round_is_folded_is_in() -> None:
    job = after(open_round(), update_event(ALICE, round_=0, lease=1, at_ms=140), bobs_update(145))
    assert job.long_leases[BOB].work is WorkState.RECEIVED
    job = after(job, fold_event(0, at_ms=150), plan_event(1, {ALICE: node_plan(2)}))
    lease = job.open_round.participants[ALICE].lease
    step = transition(job, update_event(ALICE, round_=1, lease=lease, at_ms=190))
    assert {each.node for each in only(step.commands, Aggregate).updates} == {ALICE, BOB}


def test_it_is_void_after_its_last_round_and_its_samples_go_out_again() -> None:
    job = open_round(rounds=2)
    held_shard = job.long_leases[BOB].shard
    job = next_round(job, 0, 140)
    lease = job.open_round.participants[ALICE].lease
    step = transition(job, update_event(ALICE, round_=1, lease=lease, at_ms=240))
    cancels = [each for each in step.commands if isinstance(each, CancelShard)]
    assert cancels == [CancelShard(BOB, 0, 2, "its lease of 2 rounds is over")]
    assert step.job.streams[held_shard.partition].returned == held_shard.ranges
    assert rejection(step.job, bobs_update(250))


def test_a_node_that_is_lost_gives_it_back() -> None:
    job = open_round()
    held_shard = job.long_leases[BOB].shard
    job = after(job, work_events.NodeLost(at_ms=at(60), node=BOB, reason="silent"))
    assert not job.long_leases
    assert job.streams[held_shard.partition].returned == held_shard.ranges
    assert not violations(job)


def test_one_that_is_handed_back_is_given_back_and_memory_that_lacked_is_minded() -> None:
    back = events.ShardHandedBack(
        at_ms=at(60), node=BOB, round=0, lease=2, reason="out of memory", lacks_memory=True
    )
    job = after(open_round(), back)
    assert not job.long_leases
    assert job.members[BOB].fit.micro_batch
    assert not violations(job)


def test_a_pause_takes_it_back_and_a_resume_plans_its_node_again() -> None:
    step = transition(open_round(), work_events.JobPaused(at_ms=at(60)))
    cancelled_nodes = {each.node for each in step.commands if isinstance(each, CancelShard)}
    assert cancelled_nodes == {ALICE, BOB}
    job = after(step.job, work_events.JobResumed(at_ms=at(70)))
    assert not job.long_leases
    assert not violations(job)


def test_a_drained_node_ends_it_and_leaves() -> None:
    job = after(open_round(), work_events.NodeDraining(at_ms=at(60), node=BOB, reason="its owner"))
    assert job.long_leases[BOB].is_open
    job = after(job, bobs_update(80))
    assert not job.members[BOB].is_present
    assert job.long_leases[BOB].work is WorkState.RECEIVED


def test_a_job_that_stops_takes_it_back_and_pays_what_had_come() -> None:
    job = after(next_round(open_round(), 0, 140), bobs_update(200))
    step = transition(job, work_events.JobStopped(at_ms=at(210)))
    (measurement,) = [
        each.record
        for each in step.commands
        if isinstance(each, WriteRecord) and isinstance(each.record, events.RoundMeasured)
    ]
    assert [each.contribution.node for each in measurement.updates] == [BOB]
    stop_step = transition(next_round(open_round(), 0, 140), work_events.JobStopped(at_ms=at(210)))
    assert BOB in {each.node for each in stop_step.commands if isinstance(each, CancelShard)}
    assert not violations(stop_step.job)


def test_a_node_that_comes_back_gets_the_same_work_and_its_base_is_kept() -> None:
    job = open_round()
    (first,) = [
        each for each in outstanding(job) if isinstance(each, AssignShard) and each.node == BOB
    ]
    later = next_round(job, 0, 140)
    (again,) = [
        each for each in outstanding(later) if isinstance(each, AssignShard) and each.node == BOB
    ]
    assert again == first
    assert first.deadline_at_ms == 0
    assert first.assignment.task.model.digest in live_blobs(later)


def test_an_old_lease_number_is_void() -> None:
    job = next_round(open_round(), 0, 140)
    assert "is void" in rejection(job, bobs_update(200, lease=1))
    assert "is not the open one" in rejection(job, bobs_update(200, round_=7))
    assert not rejection(job, bobs_update(200))


def test_funding_covers_it_while_it_is_under_way() -> None:
    job = open_round()
    reserved_samples = shard_samples(job.long_leases[BOB].shard.ranges)
    alice = shard_samples(job.open_round.participants[ALICE].shard.ranges)
    enough = 2 * alice + reserved_samples
    for funded_units, phase in ((enough, Phase.TRAINING), (enough - 1, Phase.WAITING)):
        funding_event = work_events.FundingChanged(
            at_ms=Milliseconds(at(50)), funded_units=funded_units
        )
        assert next_round(after(job, funding_event), 0, 140).phase is phase


def test_no_further_model_is_kept_than_the_quota_says() -> None:
    job = open_round()
    long_lease = job.long_leases[BOB]
    assert long_lease.base is not None
    bases = [replace(long_lease.base, round=-number) for number in range(BASES_MOST)]
    names = [NodeId(f"held-{number}") for number in range(BASES_MOST)]
    leases = {name: replace(long_lease, base=base) for name, base in zip(names, bases, strict=True)}
    plan = round_plan(0, {ALICE: node_plan(2), BOB: long_plan()})
    assert within_quota(job, plan) == plan
    full = within_quota(replace(job, long_leases=leases), plan)
    assert set(full.nodes) == {ALICE}
    assert full.resting[BOB].endswith("the most: it waits for one to end")
