"""What the coordinator plans for a participant is what the node reads off the wire."""

from msgspec.structs import replace

from coordinator.core.job import Ahead, SampleRange, Shard
from coordinator.core.round.rounds import assignment
from coordinator.shell.translate import assignment_message, participant_summary
from gpu_node.core.assignment import InitialModel
from gpu_node.shell.translate import assignment_value
from hypergpu.ids import Digest, JobId
from hypergpu.units import Samples
from hypergpu.v1 import node_pb2
from netsim.virtual.translation import assignment_of
from tests.unit.job_states import ALICE, BOB, after, at, node_plan, planned, planning

LAYOUT = Digest("0d" * 32)
MODEL = Digest("0e" * 32)


def sent(batch_size: int = 0) -> node_pb2.Assignment:
    plan = replace(
        node_plan(3, "topk64"), upload_after_ms=at(700), connections=4, batch_size=batch_size
    )
    job = after(planning(), planned(0, {ALICE: plan, BOB: node_plan()}))
    assert job.model is not None
    job = replace(job, model=replace(job.model, blob=replace(job.model.blob, digest=MODEL)))
    command = assignment(job, ALICE)
    spec = replace(command.spec, training=replace(command.spec.training, seed=2**40))
    command = replace(command, spec=spec)
    message = assignment_message(
        JobId("job-1"), command, layout=LAYOUT, workload_version=1, now_ms=at(40)
    )
    return node_pb2.Assignment.FromString(message.assignment.SerializeToString())


def test_the_plan_reaches_the_node() -> None:
    work = assignment_value(sent())
    assert (work.task.inner_steps, work.task.codec) == (3, "topk64")
    assert (work.upload_after_ms, work.connections) == (700, 4)
    assert work.reason == "round 0, slot 0: H=3, topk64, as planned"
    assert work.deadline_in_ms == 1000


def test_an_assignment_that_names_no_connections_means_one() -> None:
    message = sent()
    message.connections = 0
    assert assignment_value(message).connections == 1


def test_the_tables_show_why_a_participant_has_its_work() -> None:
    job = after(planning(), planned(0, {ALICE: node_plan(3)}))
    assert job.round is not None
    summary = participant_summary(ALICE, job.round.participants[ALICE], None)
    assert summary.reason == "H=3, int4, as planned"


def test_what_was_begun_and_what_may_be_reach_the_node() -> None:
    grant = Ahead(
        round=3,
        inner_steps=5,
        shard=Shard(0, (SampleRange(7, Samples(20)), SampleRange(90, Samples(1)))),
        seed=2**62,
        global_samples=Samples(11),
        total_samples=Samples(12),
    )
    job = after(planning(), planned(0, {ALICE: node_plan(), BOB: node_plan()}))
    assert job.model is not None
    job = replace(job, model=replace(job.model, blob=replace(job.model.blob, digest=MODEL)))
    command = replace(assignment(job, ALICE), begun=grant, ahead=replace(grant, round=4))
    message = assignment_message(
        JobId("job-1"), command, layout=LAYOUT, workload_version=1, now_ms=at(40)
    )
    work = assignment_value(message.assignment)
    expected = assignment_of(JobId("job-1"), command, at(40))
    assert work.task.begun is not None
    assert (work.task.begun, work.ahead) == (expected.task.begun, expected.ahead)
    assert (work.task.begun.round, work.task.begun.seed) == (3, 2**62)
    assert sum(run.count for run in work.task.begun.ranges) == 21
    without = assignment_value(sent())
    assert (without.task.begun, without.ahead) == (None, None)


def test_a_batch_of_its_own_reaches_the_node_beside_the_jobs() -> None:
    work = assignment_value(sent()).task
    assert (work.batch_size, work.stated_batch_size, work.full_steps) == (4, 4, 3)
    own = assignment_value(sent(batch_size=6)).task
    assert (own.batch_size, own.stated_batch_size, own.full_steps) == (6, 4, 4.5)
    assert sum(run.count for run in own.ranges) == 18


def test_the_first_model_reaches_the_node_with_the_seed_that_draws_it() -> None:
    work = assignment_value(sent())
    assert work.initial == InitialModel(MODEL, seed=2**40)
    assert work.task.model.digest == MODEL


def test_a_model_that_cannot_be_drawn_is_not_said_to_be() -> None:
    message = sent()
    message.model.ClearField("initial")
    assert assignment_value(message).initial is None
