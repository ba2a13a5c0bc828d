"""Assignments on the wire carry every optimizer's settings."""

import pytest

from hypergpu.assignment import Assignment, Lease, SampleRange, Task
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.jobfile.spec import Inner
from hypergpu.optimizer import OptimizerRule
from hypergpu.units import Bytes, Samples
from hypergpu.wire.messages import assignment_message, assignment_value


def assignment(rule: OptimizerRule) -> Assignment:
    task = Task(
        workload="digits-cnn",
        workload_version=1,
        inner_steps=4,
        batch_size=16,
        learning_rate=1e-3,
        optimizer=rule,
        codec="int4",
        seed=1,
        ranges=(SampleRange(0, Samples(64)),),
        model=BlobRef(Digest("1" * 64), Bytes(0)),
        layout=Digest("2" * 64),
    )
    return Assignment(lease=Lease(JobId("job-000000000001"), 0, 1), slot=Slot(0), task=task)


@pytest.mark.parametrize(
    "inner",
    [
        Inner(),
        Inner(optimizer="sgd", momentum=0.9),
        Inner(optimizer="muon"),
        Inner(optimizer="muon", muon_ratio=2.5, momentum=0.8),
    ],
)
def test_an_optimizer_arrives_as_it_was_sent(inner: Inner) -> None:
    assignment_sent = assignment(inner.rule)
    assert (
        assignment_value(assignment_message(assignment_sent)).task.optimizer
        == assignment_sent.task.optimizer
    )


def test_what_older_nodes_are_sent_has_no_field_of_muon() -> None:
    message = assignment_message(assignment(Inner().rule)).training.optimizer
    assert "muon_ratio" not in {field.name for field, _ in message.ListFields()}
