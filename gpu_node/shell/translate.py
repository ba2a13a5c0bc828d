"""Between protobuf and the core's values: the only place where both are known."""

import math

from gpu_node.core.update import Update
from gpu_node.shell.worker.messages import Ready
from hypergpu.ids import NodeId
from hypergpu.statements.assignment import (
    Assignment,
    Lease,
)
from hypergpu.statements.contribution import Contribution, shard_digest
from hypergpu.units import Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import digest_message, lease_message
from hypergpu.wire.protocol import PROTOCOL, SOFTWARE, refuse_other_protocol


def version_message() -> node_pb2.Version:
    """What this node speaks."""
    return node_pb2.Version(protocol=PROTOCOL, software=SOFTWARE)


def refuse_other_version(theirs: node_pb2.Version) -> None:
    """Refuse a coordinator of another protocol.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    who = f"the coordinator ({theirs.software})"
    refuse_other_protocol(theirs.protocol, who, there="where the coordinator runs", here="here")


def capabilities_message(ready: Ready, name: str) -> node_pb2.Capabilities:
    """What the worker says it can do, and what the machine is called."""
    return node_pb2.Capabilities(
        device=ready.device,
        device_name=ready.device_name,
        memory_bytes=ready.memory_bytes,
        worker=ready.kind,
        workloads=[
            node_pb2.WorkloadVersion(name=workload, version=number)
            for workload, number in sorted(ready.workloads.items())
        ],
        name=name,
    )


def contribution(node: NodeId, assignment: Assignment, update: Update, nonce: int) -> Contribution:
    """What the node signs when it sends an update."""
    task = assignment.task
    return Contribution(
        job=assignment.terms.job,
        epoch=assignment.epoch,
        round=assignment.lease.round,
        node=node,
        shard=shard_digest(task.partition, ((run.start, run.count) for run in task.ranges)),
        model=task.model.digest,
        update=update.digest,
        samples=Samples(sum(run.count for run in task.ranges)),
        inner_steps=task.inner_steps,
        compute_ms=update.compute_ms,
        update_bytes=update.size_bytes,
        lease=assignment.lease.number,
        nonce=nonce,
    )


def update_header(
    lease: Lease, update: Update, *, nonce: int, signature: bytes
) -> node_pb2.UpdateHeader:
    """What goes before an update's bytes."""
    return node_pb2.UpdateHeader(
        lease=lease_message(lease),
        digest=digest_message(update.digest),
        size_bytes=update.size_bytes,
        nonce=nonce,
        signature=signature,
        report=node_pb2.TrainingReport(
            inner_steps=update.inner_steps,
            samples=update.samples,
            compute_ms=update.compute_ms,
            loss_first=math.nan if update.loss_first is None else update.loss_first,
            loss_last=math.nan if update.loss_last is None else update.loss_last,
        ),
    )
