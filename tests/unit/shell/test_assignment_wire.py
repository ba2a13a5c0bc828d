"""What the coordinator plans for a participant is what the node reads off the wire."""

from msgspec.structs import replace

from coordinator.core.round.assigning import assignment
from coordinator.shell.translate import participant_summary
from hypergpu.ids import Digest
from hypergpu.statements.assignment import Assignment, InitialModel, Prefetch, SampleRange
from hypergpu.units import Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import assignment_message, assignment_value
from tests.unit.job_states import ALICE, BOB, after, at, node_plan, plan_event, planning

LAYOUT = Digest("0d" * 32)
MODEL = Digest("0e" * 32)


def assignment_of(batch_size: int = 0) -> Assignment:
    plan = replace(
        node_plan(3, "topk64"), upload_after_ms=at(700), connections=4, batch_size=batch_size
    )
    job = after(planning(), plan_event(0, {ALICE: plan, BOB: node_plan()}))
    assert job.model is not None
    model = replace(job.model, blob=replace(job.model.blob, digest=MODEL))
    training = replace(job.spec.training, seed=2**40)
    spec = replace(job.spec, training=training, options={"width": 3, "a": "b"})
    assert job.round is not None
    job = replace(job, model=model, layout=LAYOUT, round=replace(job.round, spec=spec))
    return assignment(job, ALICE).assignment_at(at(40))


def wire_round_trip(work: Assignment) -> node_pb2.Assignment:
    return node_pb2.Assignment.FromString(assignment_message(work).SerializeToString())


def test_the_assignment_reaches_the_node() -> None:
    work = assignment_of()
    assert assignment_value(wire_round_trip(work)) == work
    assert (work.task.inner_steps, work.task.codec) == (3, "topk64")
    assert (work.upload_after_ms, work.connections) == (700, 4)
    assert work.reason == "round 0, slot 0: H=3, topk64, as planned"
    assert work.deadline_in_ms == 1000
    assert work.initial == InitialModel(MODEL, seed=2**40)
    assert (work.task.prefetched, work.prefetch) == (None, None)


def test_a_prefetch_reaches_the_node() -> None:
    first = Prefetch(
        round=3,
        inner_steps=5,
        ranges=(SampleRange(7, Samples(20)), SampleRange(90, Samples(1))),
        seed=2**62,
        global_samples=Samples(11),
        total_samples=Samples(12),
    )
    work = assignment_of()
    work = replace(
        work, task=replace(work.task, prefetched=first), prefetch=replace(first, round=4)
    )
    assert assignment_value(wire_round_trip(work)) == work


def test_an_assignment_that_names_no_connections_means_one() -> None:
    message = wire_round_trip(assignment_of())
    message.connections = 0
    assert assignment_value(message).connections == 1


def test_the_tables_show_why_a_participant_has_its_work() -> None:
    job = after(planning(), plan_event(0, {ALICE: node_plan(3)}))
    assert job.round is not None
    summary = participant_summary(ALICE, job.round.participants[ALICE], None)
    assert summary.reason == "H=3, int4, as planned"


def test_a_batch_of_its_own_reaches_the_node_beside_the_jobs() -> None:
    work = assignment_of().task
    assert (work.batch_size, work.stated_batch_size, work.full_steps) == (4, 4, 3)
    own = assignment_of(batch_size=6).task
    assert (own.batch_size, own.stated_batch_size, own.full_steps) == (6, 4, 4.5)
    assert sum(run.count for run in own.ranges) == 18


def test_a_model_that_cannot_be_drawn_is_not_said_to_be() -> None:
    message = wire_round_trip(assignment_of())
    message.model.ClearField("initial")
    assert assignment_value(message).initial is None
