"""Leases over several rounds where rounds overlap, data stay on nodes, and coordinators change."""

from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.commands import AssignShard
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.streams import shard_samples
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from hypergpu.assignment import Assignment
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Data, JobSpec
from hypergpu.units import Samples
from netsim.virtual.invariants import violations
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    after,
    at,
    fold_event,
    model,
    new_job,
    node_plan,
    plan_event,
    planning,
    update_event,
)

AHEAD = replace(node_plan(2), prefetch_steps=1)
LONG = replace(node_plan(1), rounds=6)
OVERLAPPING = replace(AWARE, round=replace(AWARE.round, overlap="eager", quorum=0.5))
OWN = replace(AWARE, data=Data(source="node", name="wards", path="held-out"))


def alices_update(job: Job) -> events.Event:
    round_ = job.open_round
    lease = round_.participants[ALICE].lease
    return update_event(ALICE, round_=round_.number, lease=lease, at_ms=job.at_ms + 10)


def fold(job: Job) -> Job:
    """The closing round folded."""
    return after(job, fold_event(job.open_round.number, at_ms=job.at_ms + 5))


def next_round(job: Job) -> Job:
    """The round of Alice's update closed and folded, and the next one open, of her alone."""
    job = fold(after(job, alices_update(job)))
    assert not violations(job)
    return after(job, plan_event(job.newest_model.round, {ALICE: AHEAD}, at_ms=job.at_ms + 1))


def work_of(job: Job, node: NodeId) -> Assignment:
    """What a node that comes back is sent."""
    (command,) = [e for e in outstanding(job) if isinstance(e, AssignShard) and e.node == node]
    return command.assignment


def late_in_an_overlapping_round() -> Job:
    """Round 0 has closed without Bob, who was to take the first steps of round 1 after it."""
    job = after(planning(OVERLAPPING), plan_event(0, {ALICE: AHEAD, BOB: AHEAD}))
    assert job.members[BOB].prefetch is not None
    job = after(job, alices_update(job), events.DeadlineReached(at_ms=at(1_100), round=0))
    assert job.long_leases[BOB].work is WorkState.UNDER_WAY
    return job


def test_steps_ahead_of_a_round_that_goes_on_without_its_node_go_back_into_the_stream() -> None:
    job = late_in_an_overlapping_round()
    kept_shard, ahead = job.long_leases[BOB].shard, job.members[BOB].prefetch
    assert ahead is not None
    job = fold(job)
    assert not violations(job)
    job = after(job, plan_event(1, {ALICE: AHEAD}, at_ms=job.at_ms + 1))
    assert job.members[BOB].prefetch is None
    assert job.long_leases[BOB].shard == kept_shard
    assert ahead.ranges[0] in job.open_round.participants[ALICE].shard.ranges
    assert not violations(job)
    assert work_of(job, BOB).prefetch is None


def test_a_round_begins_with_the_steps_ahead_of_who_is_in_it_while_a_lease_goes_on() -> None:
    job = after(planning(OVERLAPPING), plan_event(0, {ALICE: AHEAD, BOB: LONG}))
    assert job.members[BOB].prefetch is None
    for _ in range(3):
        ahead = job.members[ALICE].prefetch
        assert ahead is not None
        job = next_round(job)
        assert job.open_round.participants[ALICE].prefetched == ahead
        assert work_of(job, BOB).prefetch is None
    job = after(job, update_event(BOB, round_=0, lease=2, at_ms=job.at_ms + 1))
    job = after(job, alices_update(job))
    assert {node for node, _, _ in job.open_round.accepted_updates} == {ALICE, BOB}


def own_job(spec: JobSpec = OWN) -> Job:
    """Round 0 on data that stay on nodes: Bob under a lease over several rounds."""
    initialisation = events.ModelInitialised(at_ms=at(10), model=model(0), partition_sizes=())
    joins = [work_events.NodeJoined(at_ms=at(20), node=node) for node in (ALICE, BOB)]
    return after(
        new_job(spec), initialisation, *joins, plan_event(0, {ALICE: node_plan(2), BOB: LONG})
    )


def test_samples_of_a_void_lease_on_own_data_wait_for_the_node_that_has_them() -> None:
    job = own_job()
    held_shard = job.long_leases[BOB].shard
    assert held_shard.partition == job.members[BOB].slot
    job = next_round(job)
    job = after(job, work_events.NodeLost(at_ms=at(500), node=BOB, reason="silent"))
    job = next_round(job)
    assert job.open_round.participants[ALICE].shard.partition == job.members[ALICE].slot
    assert job.streams[held_shard.partition].returned == held_shard.ranges
    job = after(job, work_events.NodeJoined(at_ms=at(600), node=BOB), alices_update(job))
    job = after(fold(job), plan_event(3, {ALICE: node_plan(2), BOB: LONG}, at_ms=700))
    assert job.long_leases[BOB].shard == held_shard
    assert not violations(job)


def test_an_update_of_own_data_that_comes_late_tells_how_many_samples_there_are() -> None:
    job = next_round(own_job())
    event = update_event(BOB, round_=0, lease=2, at_ms=job.at_ms + 1)
    assert isinstance(event, events.UpdateReceived)
    counted_event = replace(event, update=replace(event.update, data_samples=Samples(3)))
    job = after(job, counted_event)
    assert job.streams[job.members[BOB].slot].size == 3
    job = after(job, alices_update(job))
    (bobs,) = [each for node, each, _ in job.open_round.accepted_updates if node == BOB]
    assert shard_samples(bobs.shard.ranges) == 4
    assert not violations(job)


def test_another_coordinator_goes_on_with_a_lease_that_is_under_way() -> None:
    job = next_round(next_round(after(planning(), plan_event(0, {ALICE: AHEAD, BOB: LONG}))))
    before = work_of(job, BOB)
    job = after(
        job, work_events.CoordinatorChanged(at_ms=job.at_ms, reason="the second one took over")
    )
    assert work_of(job, BOB) == before
    assert before.lease.round == 0
    job = after(job, update_event(BOB, round_=0, lease=2, at_ms=job.at_ms + 1))
    assert "already" in rejection(job, update_event(BOB, round_=0, lease=2))
    job = after(job, alices_update(job))
    assert job.phase is Phase.AGGREGATING
    assert {node for node, _, _ in job.open_round.accepted_updates} == {ALICE, BOB}
    assert transition(job, fold_event(2, at_ms=job.at_ms + 5)).job.tally.updates_accepted
