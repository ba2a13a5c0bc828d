"""Between protobuf and the core's values: the only place where both are known."""

import math
from collections.abc import Iterable

import msgspec

from gpu_node.core.assignment import (
    Ahead,
    Assignment,
    BlobRef,
    Delta,
    InitialModel,
    Lease,
    SampleRange,
    Task,
    Update,
)
from gpu_node.shell.worker.messages import Ready
from hypergpu.digest import digest_from_wire, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId, Slot
from hypergpu.statements.contribution import Contribution, shard_digest
from hypergpu.statements.domain import Terms
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.protocol import PROTOCOL, SOFTWARE, refuse_other_protocol
from hypergpu.wire.statements import terms_value

_options = msgspec.json.Decoder(dict[str, str | int | float | bool])


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


def digest_message(digest: Digest) -> tensor_pb2.Digest:
    """A digest on the wire."""
    return tensor_pb2.Digest(value=digest_to_wire(digest))


def lease_message(lease: Lease) -> node_pb2.Lease:
    """A lease on the wire."""
    return node_pb2.Lease(job_id=lease.job_id, round=lease.round, number=lease.number)


def lease_value(message: node_pb2.Lease) -> Lease:
    """A lease off the wire."""
    return Lease(JobId(message.job_id), message.round, message.number)


def blob_value(message: tensor_pb2.BlobRef) -> BlobRef:
    """A blob's name off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, its digest is not 32 bytes.
    """
    return BlobRef(digest_from_wire(message.digest.value), Bytes(message.size_bytes))


def assignment_value(message: node_pb2.Assignment) -> Assignment:
    """Work off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, a digest, the workload's options or the terms are malformed.
    """
    has_accepted = message.HasField("last_accepted")
    return Assignment(
        lease=lease_value(message.lease),
        slot=Slot(message.slot),
        task=_task(message),
        deltas=tuple(_delta(delta) for delta in message.model.deltas),
        initial=_initial(message.model),
        last_accepted=digest_from_wire(message.last_accepted.value) if has_accepted else None,
        deadline_in_ms=Milliseconds(message.deadline_in_ms),
        upload_after_ms=Milliseconds(message.upload_after_ms),
        connections=max(1, message.connections),
        terms=_terms(message),
        epoch=message.terms.epoch,
        ahead=_ahead(message.ahead) if message.HasField("ahead") else None,
        reason=message.reason,
    )


def _task(message: node_pb2.Assignment) -> Task:
    training, shard = message.training, message.shard
    return Task(
        workload=message.workload,
        workload_version=message.workload_version,
        options=_options_value(message.workload_options),
        inner_steps=training.inner_steps,
        batch_size=training.batch_size,
        stated_batch_size=training.stated_batch_size,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        warmup_steps=training.warmup_steps,
        schedule=training.schedule or "constant",
        codec=training.codec,
        seed=training.seed,
        global_samples=Samples(training.global_samples),
        total_samples=Samples(training.total_samples),
        partition=shard.partition,
        partitions=shard.partitions,
        skew_alpha=shard.skew_alpha,
        data_seed=shard.seed,
        ranges=_ranges(shard.ranges),
        model=blob_value(message.model.blob),
        layout=digest_from_wire(message.model.layout.value),
        manifest=blob_value(message.manifest) if message.HasField("manifest") else None,
        begun=_ahead(message.begun) if message.HasField("begun") else None,
    )


def _ahead(message: node_pb2.Ahead) -> Ahead:
    return Ahead(
        round=message.round,
        inner_steps=message.inner_steps,
        ranges=_ranges(message.ranges),
        seed=message.seed,
        global_samples=Samples(message.global_samples),
        total_samples=Samples(message.total_samples),
    )


def _ranges(messages: Iterable[node_pb2.SampleRange]) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(run.start, Samples(run.count)) for run in messages)


def _options_value(text: str) -> dict[str, str | int | float | bool]:
    try:
        return _options.decode(text or "{}")
    except msgspec.MsgspecError as broken:
        raise HyperGPUError(
            Reason.REQUEST_INVALID, f"the workload's options are malformed: {broken}"
        ) from broken


def _delta(message: tensor_pb2.DeltaRef) -> Delta:
    base = digest_from_wire(message.base.value)
    return Delta(base, blob_value(message.blob), message.scheme)


def _initial(model: tensor_pb2.ModelRef) -> InitialModel | None:
    if not model.HasField("initial"):
        return None
    return InitialModel(digest_from_wire(model.initial.digest.value), model.initial.seed)


def _terms(message: node_pb2.Assignment) -> Terms:
    """What the node is to sign under. A key that names another job could be held against it."""
    terms, job_id = terms_value(message.terms), JobId(message.lease.job_id)
    if terms != Terms() and not terms.match(job_id):
        detail = f"the terms of {job_id[:80]!r} name another job"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return terms


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
