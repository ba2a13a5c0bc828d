"""Messages of the control stream and of uploads, to and from the core's values."""

import math
from collections.abc import Iterable

from gpu_node.core.commands import AnnounceDraining, HandBack, NodeCommand
from gpu_node.core.events import DrainRequested, JobReleased, NodeEvent, ShardCancelled
from gpu_node.core.update import TrainedUpdate
from gpu_node.shell.worker.messages import ShardProgress, WorkerCapabilities
from hypergpu.ids import JobId, NodeId
from hypergpu.statements.assignment import Assignment, Lease
from hypergpu.statements.contribution import Contribution, shard_digest
from hypergpu.statements.receipt import SignedReceipt
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2, receipt_pb2
from hypergpu.wire.assignment import digest_message, lease_message, lease_value
from hypergpu.wire.protocol import PROTOCOL, SOFTWARE, refuse_other_protocol
from hypergpu.wire.statements import receipt_message


def version_message() -> node_pb2.Version:
    """The protocol and the software of this node."""
    return node_pb2.Version(protocol=PROTOCOL, software=SOFTWARE)


def reject_other_version(theirs: node_pb2.Version) -> None:
    """Reject a coordinator of another protocol.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    who = f"the coordinator ({theirs.software})"
    refuse_other_protocol(theirs.protocol, who, there="where the coordinator runs", here="here")


def capabilities_message(capabilities: WorkerCapabilities, name: str) -> node_pb2.Capabilities:
    """The worker's capabilities, and the machine's name."""
    return node_pb2.Capabilities(
        device=capabilities.device,
        device_name=capabilities.device_name,
        memory_bytes=capabilities.memory_bytes,
        worker=capabilities.kind,
        workloads=[
            node_pb2.WorkloadVersion(name=workload, version=number)
            for workload, number in sorted(capabilities.workloads.items())
        ],
        name=name,
    )


def hello_message(
    capabilities: node_pb2.Capabilities,
    working: Iterable[Lease],
    receipts: Iterable[tuple[JobId, SignedReceipt]],
) -> node_pb2.Hello:
    """The greeting, with the newest receipt of each job."""
    return node_pb2.Hello(
        version=version_message(),
        capabilities=capabilities,
        working=[lease_message(lease) for lease in working],
        newest_receipts=[
            receipt_pb2.NewestReceipt(job_id=job_id, receipt=receipt_message(signed))
            for job_id, signed in receipts
        ],
    )


def event_in(message: node_pb2.ControlResponse, at_ms: Milliseconds) -> NodeEvent | None:
    """The event that a message of the coordinator is; None for other messages."""
    match message.WhichOneof("message"):
        case "cancel":
            lease, reason = lease_value(message.cancel.lease), message.cancel.reason
            return ShardCancelled(at_ms=at_ms, lease=lease, reason=reason)
        case "release":
            job_id, reason = JobId(message.release.job_id), message.release.reason
            return JobReleased(at_ms=at_ms, job_id=job_id, reason=reason)
        case "drain":
            reason = message.drain.reason or "the coordinator asked it to leave"
            return DrainRequested(at_ms=at_ms, reason=reason)
        case _:
            return None


def command_message(command: NodeCommand) -> node_pb2.ControlRequest | None:
    """The message that a command is; None for other commands."""
    match command:
        case HandBack(lease=lease, reason=reason):
            back = node_pb2.HandBack(lease=lease_message(lease), reason=reason)
            return node_pb2.ControlRequest(hand_back=back)
        case AnnounceDraining(reason=reason):
            return node_pb2.ControlRequest(draining=node_pb2.Draining(reason=reason))
        case _:
            return None


def progress_message(progress: ShardProgress) -> node_pb2.ControlRequest:
    """Progress of a training."""
    message = node_pb2.Progress(
        lease=lease_message(progress.lease),
        steps_done=progress.steps_done,
        steps_total=progress.steps_total,
        loss=progress.loss,
    )
    return node_pb2.ControlRequest(progress=message)


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


def update_header(
    lease: Lease, update: TrainedUpdate, *, nonce: int, signature: bytes
) -> node_pb2.UpdateHeader:
    """The header that goes before an update's bytes."""
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
