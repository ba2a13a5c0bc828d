"""Gives replicas to nodes, takes them back, and ends the job."""

from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.serving.budget import spent_reason
from coordinator.core.serving.events import SettlementDue
from coordinator.core.serving.state import LeasedReplica, ServeJob, ServeMember, ServePhase
from coordinator.core.work.hand_back import hand_back_reasons
from coordinator.core.work.members import free_nodes, release_all, with_member
from coordinator.core.work.work_commands import (
    AssignWork,
    CancelWork,
    ReportAt,
    WriteRecord,
)
from coordinator.core.work.work_events import JobEnded
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.ids import NodeId
from hypergpu.packed_work import pack_work
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import StageWork
from hypergpu.serving.serve_request import Replica
from hypergpu.units import Milliseconds, several

SETTLE_MS = Milliseconds(600_000)
"""Time in which nodes may sign the last counts of a model that was stopped."""


class ServeStep(NamedTuple):
    """The effect of one event."""

    job: ServeJob
    commands: tuple[Any, ...] = ()

    def then(self, after: "ServeStep") -> "ServeStep":
        """This step's commands before those of the next one, which began from its job."""
        return ServeStep(after.job, (*self.commands, *after.commands))


def with_serve_member(job: ServeJob, node: NodeId, **changes: Any) -> ServeJob:
    """The job in which these fields of a member have other values."""
    member: ServeMember = replace(job.members[node], **changes)
    return with_member(job, node, member)


def lease_of(job: ServeJob, node: NodeId) -> Lease:
    """The lease under which a node has its replica."""
    return Lease(job.job_id, 0, job.leases[node].lease)


def node_work(job: ServeJob, node: NodeId) -> Replica | StageWork:
    """What a node has to do under its lease."""
    replica = job.leases[node]
    if replica.span is None:
        return job.replica(node)
    if replica.is_standby:
        return job.request.standby_stage(replica.span, replica.files_of)
    return job.request.stage(replica.span)


def assign_work(job: ServeJob, node: NodeId) -> AssignWork:
    """The command that gives a node its replica."""
    replica, work = job.leases[node], node_work(job, node)
    if replica.span is None:
        reason = "answers as"
    else:
        reason = f"{'stands by for' if replica.is_standby else 'holds'} {replica.span} of"
    assignment = PackedAssignment(
        lease=lease_of(job, node),
        slot=job.leases[node].slot,
        work=pack_work(job.request.engine, work),
        inputs=work.inputs,
        terms=job.terms if job.has_receipts else None,
        reason=f"{reason} {job.request.model}",
    )
    return AssignWork(node, assignment)


def lease_replicas(job: ServeJob) -> ServeStep:
    """Give replicas to free nodes until there are as many as asked for."""
    if job.phase is not ServePhase.SERVING or job.is_unloaded:
        return ServeStep(job)
    if reason := spent_reason(job, needed_units=1):
        return ServeStep(replace(job, reason=reason))
    if job.request.cut is not None:  # `RingPlaced` says who holds what.
        return ServeStep(_paused_if_stuck(replace(job, reason=_ring_reason(job))))
    more_replicas = max(0, job.request.replicas - len(job.leases))
    nodes = free_nodes(job, job.leases)[:more_replicas]
    for node in nodes:
        job = with_lease(job, node)
    job = replace(job, reason=_serving_reason(job))
    assignments = tuple(assign_work(job, node) for node in nodes)
    return ServeStep(_paused_if_stuck(job), assignments)


def with_lease(
    job: ServeJob, node: NodeId, span: LayerSpan | None = None, ring: int = 0
) -> ServeJob:
    """The job in which a node holds the model, or some layers of a ring, under a fresh lease."""
    replica = LeasedReplica(
        slot=job.members[node].slot,
        lease=job.next_lease,
        assigned_at_ms=job.at_ms,
        version=None if job.tuning is None else job.tuning.version,
        span=span,
        ring=ring,
    )
    return replace(job, leases={**job.leases, node: replica}, next_lease=job.next_lease + 1)


def _ring_reason(job: ServeJob) -> str:
    if job.rings > 1 and job.whole_rings:
        return _rings_reason(job)
    if not job.free_layers():
        standby = ", and a node stands by" if job.standby is not None else ""
        return f"{several(len(job.stages), 'stage')} on nodes{standby}{training_text(job)}"
    layers = ", ".join(map(str, job.free_layers()))
    return f"no node holds {layers}: waits for nodes"


def _rings_reason(job: ServeJob) -> str:
    text = whole_rings_text(job)
    if not job.open_rings:
        return text
    numbers = ", ".join(str(ring + 1) for ring in job.open_rings)
    ring = "ring" if len(job.open_rings) == 1 else "rings"
    return f"{text}; {ring} {numbers}: waits for nodes"


def whole_rings_text(job: ServeJob) -> str:
    """Tells of the rings of a training that are whole."""
    stages = sum(len(job.stages_of(ring)) for ring in job.whole_rings)
    standby = ", and a node stands by" if job.standby is not None else ""
    rings = f"{len(job.whole_rings)} of {several(job.rings, 'ring')}"
    return f"{rings}: {several(stages, 'stage')} on nodes{standby}{training_text(job)}"


def training_text(job: ServeJob) -> str:
    """How far a training through the ring is; empty: there is none."""
    training, stored_round = job.request.training, job.stored_round
    if training is None:
        return ""
    if stored_round is None:
        return f" train, none of {several(training.rounds, 'round')} is stored yet"
    loss = f"loss {stored_round.loss:.4g}"
    if stored_round.rings > 1:
        loss += f" of {several(stored_round.rings, 'ring')}"
    if stored_round.held_out_loss is not None:
        loss += f", held out {stored_round.held_out_loss:.4g}"
    if not job.is_training:
        return f", fine-tuned in {several(training.rounds, 'round')}, {loss}"
    return (
        f" train, {stored_round.rounds} of {several(training.rounds, 'round')} are stored, {loss}"
    )


def _serving_reason(job: ServeJob) -> str:
    replicas = several(job.request.replicas, "replica")
    if not job.leases:
        return f"waits for nodes: none of {replicas} is there"
    if len(job.leases) < job.request.replicas:
        return f"{len(job.leases)} of {replicas} are on nodes, the rest waits for more nodes"
    return f"{replicas} on nodes"


def _paused_if_stuck(job: ServeJob) -> ServeJob:
    """Pause where every node that is there gave its replica back: trying again would repeat it."""
    present = [member for member in job.members.values() if member.is_present]
    if job.leases or not present or any(not member.exclusion for member in present):
        return job
    reasons = hand_back_reasons(job.refusals) or present[0].exclusion
    reason = f"no node that is there can hold the model: {reasons}"
    return replace(job, phase=ServePhase.PAUSED, reason=reason)


def without_lease(job: ServeJob, node: NodeId) -> ServeJob:
    """The job in which a node has no replica."""
    return replace(job, leases={who: each for who, each in job.leases.items() if who != node})


def cancel(job: ServeJob, node: NodeId, reason: str) -> CancelWork:
    """The command that tells a node that its lease is void."""
    return CancelWork(node, lease_of(job, node), reason)


def void_leases(job: ServeJob, reason: str) -> ServeStep:
    """Take every replica back."""
    cancels = tuple(cancel(job, node, reason) for node in job.leases)
    return ServeStep(replace(job, leases={}), cancels)


def end_job(job: ServeJob, reason: str) -> ServeStep:
    """Let every node go. The job ends once all counts are in and signed, if there are any."""
    step = void_leases(job, reason)
    job, releases = release_all(replace(step.job, reason=reason), reason)
    step = ServeStep(job, (*step.commands, *releases))
    if not job.has_receipts:
        return step.then(finish_job(job))
    settle_by_ms = Milliseconds(job.at_ms + SETTLE_MS)
    job = replace(job, phase=ServePhase.SETTLING, settle_by_ms=settle_by_ms)
    return ServeStep(job, (*step.commands, report_settlement(job)))


def report_settlement(job: ServeJob) -> ReportAt:
    """The command that reports the end of the time to sign."""
    return ReportAt(job.settle_by_ms, SettlementDue(at_ms=Milliseconds(0)))


def finish_job(job: ServeJob) -> ServeStep:
    """End the job: the journal says so, and nothing comes after it."""
    job = replace(job, phase=ServePhase.STOPPED)
    end = JobEnded(at_ms=job.at_ms, phase=job.phase.value, reason=job.reason)
    return ServeStep(job, (WriteRecord(end),))
