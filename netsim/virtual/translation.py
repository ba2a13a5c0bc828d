"""Translates the coordinator's assignments into the node's, without the wire between them."""

from coordinator.core import job
from coordinator.core.commands import AssignShard
from coordinator.core.deltas import initial_of
from gpu_node.core.assignment import (
    Ahead,
    Assignment,
    BlobRef,
    Delta,
    InitialModel,
    Lease,
    SampleRange,
    Task,
)
from hypergpu.ids import Digest, JobId
from hypergpu.units import Milliseconds

_LAYOUT = Digest("0" * 64)


def assignment_of(job_id: JobId, command: AssignShard, now_ms: Milliseconds) -> Assignment:
    """The assignment that the command becomes on its way to the node."""
    spec = command.spec
    task = Task(
        workload=spec.workload,
        workload_version=1,
        inner_steps=command.plan.inner_steps,
        batch_size=command.plan.batch(spec.training.batch_size),
        stated_batch_size=spec.training.batch_size,
        learning_rate=spec.inner.learning_rate,
        codec=command.plan.codec,
        seed=command.seed,
        global_samples=command.global_samples,
        total_samples=command.total_samples,
        partition=command.shard.partition,
        partitions=command.partitions,
        data_seed=spec.training.seed,
        ranges=_ranges(command.shard),
        begun=_ahead(command.begun),
        model=BlobRef(command.model.blob.digest, command.model.blob.size_bytes),
        layout=_LAYOUT,
    )
    deltas = tuple(
        Delta(delta.base, BlobRef(delta.blob.digest, delta.blob.size_bytes), delta.scheme)
        for delta in command.model.deltas
    )
    initial = initial_of(command.model)
    return Assignment(
        lease=Lease(job_id, command.round, command.lease),
        slot=command.slot,
        task=task,
        deltas=deltas,
        initial=None if initial is None else InitialModel(initial, spec.training.seed),
        last_accepted=command.last_accepted,
        upload_after_ms=command.plan.upload_after_ms,
        connections=command.plan.connections,
        terms=command.terms,
        epoch=command.epoch,
        ahead=_ahead(command.ahead),
        deadline_in_ms=Milliseconds(max(0, command.deadline_at_ms - now_ms)),
        reason=command.reason,
    )


def _ahead(ahead: job.Ahead | None) -> Ahead | None:
    if ahead is None:
        return None
    return Ahead(
        round=ahead.round,
        inner_steps=ahead.inner_steps,
        ranges=_ranges(ahead.shard),
        seed=ahead.seed,
        global_samples=ahead.global_samples,
        total_samples=ahead.total_samples,
    )


def _ranges(shard: job.Shard) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(run.start, run.count) for run in shard.ranges)
