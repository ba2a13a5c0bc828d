"""Rounds of a job whose samples stay on nodes, event by event."""

from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.commands import Aggregate, AssignShard
from coordinator.core.training.job.state import Job
from coordinator.core.training.streams import shard_samples
from coordinator.core.training.transition import transition
from coordinator.core.work import work_events
from coordinator.core.work.allocation import Lend, plan_allocation
from coordinator.core.work.demand import JobDemand, NodeOffer
from hypergpu.assignment import Task
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import Data
from hypergpu.units import Samples
from tests.unit.job_states import (
    ALICE,
    BOB,
    CAROL,
    SPEC,
    after,
    at,
    fold_event,
    model,
    new_job,
    update,
)

OWN = replace(SPEC, data=Data(source="node", name="wards", path="held-out"))
"""Two inner steps of four samples, two nodes."""


def first_round() -> Job:
    """Alice and Bob train in the first round."""
    initialisation = events.ModelInitialised(at_ms=at(0), model=model(0), partition_sizes=())
    return after(new_job(OWN), initialisation, *(join(node) for node in (ALICE, BOB)))


def join(node: NodeId, at_ms: int = 0) -> events.Event:
    return work_events.NodeJoined(at_ms=at(at_ms), node=node)


def update_of(node: NodeId, lease: int, own: int, round_: int = 0) -> events.Event:
    """An update whose sender says how many samples it has."""
    counted_update = replace(update(f"{node}-{round_}"), data_samples=Samples(own))
    return events.UpdateReceived(
        at_ms=at(50), node=node, round=round_, lease=lease, update=counted_update
    )


def partitions(job: Job) -> dict[NodeId, int]:
    return {node: each.shard.partition for node, each in job.open_round.participants.items()}


def test_each_node_has_a_stream_of_its_own_also_one_that_joins_late() -> None:
    job = first_round()
    assert partitions(job) == {ALICE: 0, BOB: 1}
    job = after(
        job, join(CAROL, 10), update_of(ALICE, 1, 100), update_of(BOB, 2, 100), fold_event(0)
    )
    assert partitions(job) == {ALICE: 0, BOB: 1, CAROL: 2}
    assert [stream.size for stream in job.streams] == [100, 100, 0]


def test_who_takes_a_lost_nodes_place_brings_samples_of_its_own() -> None:
    node_loss = work_events.NodeLost(at_ms=at(20), node=BOB, reason="silent")
    job = after(first_round(), join(CAROL, 10), node_loss)
    assert partitions(job) == {ALICE: 0, BOB: 1, CAROL: 2}
    assert [stream.cursor for stream in job.streams] == [8, 8, 8]
    (left_range,) = job.streams[1].returned
    assert (left_range.start, left_range.count) == (0, 8)
    # Bob is back for the next round and begins with what he left.
    job = after(
        job, join(BOB, 30), update_of(ALICE, 1, 100), update_of(CAROL, 3, 100), fold_event(0)
    )
    assert job.open_round.participants[BOB].shard.ranges == (left_range,)


def test_who_takes_a_lost_nodes_place_makes_no_second_participant() -> None:
    alone = replace(OWN, training=replace(OWN.training, nodes=1))
    initialisation = events.ModelInitialised(at_ms=at(0), model=model(0), partition_sizes=())
    node_loss = work_events.NodeLost(at_ms=at(20), node=ALICE, reason="silent")
    job = after(new_job(alone), initialisation, join(ALICE), join(BOB, 10), node_loss)
    step = transition(job, update_of(BOB, 2, 100))
    (command,) = [each for each in step.commands if isinstance(each, Aggregate)]
    assert command.outer_reason == "plain: one node takes part"


def test_a_lost_node_that_is_back_in_time_goes_on_with_its_shard() -> None:
    job = after(first_round(), work_events.NodeLost(at_ms=at(20), node=BOB, reason="silent"))
    step = transition(job, join(BOB, 30))
    (command,) = [each for each in step.commands if isinstance(each, AssignShard)]
    assert (command.node, command.assignment.task.partition) == (BOB, 1)
    assert [stream.returned for stream in step.job.streams] == [(), ()]


def test_an_update_weighs_by_its_nodes_own_samples_and_never_by_more_than_it_trained_on() -> None:
    """All take the same steps, whatever they say that they have."""
    job = after(first_round(), update_of(ALICE, 1, 5))
    step = transition(job, update_of(BOB, 2, 10**9))
    (command,) = [each for each in step.commands if isinstance(each, Aggregate)]
    assert {each.node: each.weight for each in command.updates} == {ALICE: 5, BOB: 8}
    job = after(step.job, fold_event(0))
    steps = {node: each.inner_steps for node, each in job.open_round.participants.items()}
    assert steps == {ALICE: 2, BOB: 2}
    assert shard_samples(job.open_round.participants[ALICE].shard.ranges) == 8


def test_a_task_does_not_change_when_others_join() -> None:
    def task(job: Job) -> Task:
        again = transition(job, work_events.NodeLost(at_ms=at(5), node=BOB, reason="silent"))
        step = transition(again.job, join(BOB, 6))
        (command,) = [each for each in step.commands if isinstance(each, AssignShard)]
        return command.assignment.task

    job = first_round()
    assert task(job).data_name == "wards"
    assert task(job) == task(after(job, join(CAROL, 4), leave(CAROL)))


def leave(node: NodeId) -> events.Event:
    return work_events.NodeDraining(at_ms=at(4), node=node, reason="it has to go")


def test_only_nodes_with_the_data_set_are_lent() -> None:
    demand = JobDemand(JobId("job-1"), 1, "text-gpt", 1, frozenset(), data_name="wards")
    offers = [
        NodeOffer(ALICE, None, {"text-gpt": 1}, data_names=frozenset({"wards", "other"})),
        NodeOffer(BOB, None, {"text-gpt": 1}, data_names=frozenset({"other"})),
    ]
    (move,) = plan_allocation([demand], offers)
    assert isinstance(move, Lend)
    assert move.node == ALICE
