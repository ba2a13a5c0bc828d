"""The contribution that a node signs with an update."""

from gpu_node.core.events import TrainedUpdate
from hypergpu.assignment import Assignment
from hypergpu.ids import NodeId
from hypergpu.statements import Contribution, shard_digest


def contribution(
    node: NodeId, assignment: Assignment, update: TrainedUpdate, nonce: int
) -> Contribution:
    """The statement that the node signs with an update."""
    task = assignment.task
    return Contribution(
        job=assignment.terms.job,
        epoch=assignment.epoch,
        round=assignment.lease.round,
        node=node,
        shard=shard_digest(task.partition, ((run.start, run.count) for run in task.ranges)),
        model=task.model.digest,
        update=update.digest,
        samples=task.samples,
        inner_steps=task.inner_steps,
        compute_ms=update.compute_ms,
        update_bytes=update.size_bytes,
        lease=assignment.lease.number,
        nonce=nonce,
    )
