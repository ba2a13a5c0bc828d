"""Gives replicas to nodes, takes them back, and ends the job."""

from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.serving.state import LeasedReplica, ServeJob, ServeMember, ServePhase
from coordinator.core.work.hand_back import hand_back_reasons
from coordinator.core.work.members import free_nodes, release_all, with_member
from coordinator.core.work.work_commands import AssignWork, CancelWork, WriteRecord
from coordinator.core.work.work_events import JobEnded
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.ids import NodeId
from hypergpu.packed_work import pack_work
from hypergpu.units import several


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


def assign_work(job: ServeJob, node: NodeId) -> AssignWork:
    """The command that gives a node its replica."""
    replica = job.request.replica
    assignment = PackedAssignment(
        lease=lease_of(job, node),
        slot=job.leases[node].slot,
        work=pack_work(job.request.engine, replica),
        inputs=replica.inputs,
        reason=f"answers as {replica.model}",
    )
    return AssignWork(node, assignment)


def lease_replicas(job: ServeJob) -> ServeStep:
    """Give replicas to free nodes until there are as many as asked for."""
    if job.phase is not ServePhase.SERVING:
        return ServeStep(job)
    more_replicas = max(0, job.request.replicas - len(job.leases))
    nodes = free_nodes(job, job.leases)[:more_replicas]
    for node in nodes:
        replica = LeasedReplica(
            slot=job.members[node].slot, lease=job.next_lease, assigned_at_ms=job.at_ms
        )
        leases = {**job.leases, node: replica}
        job = replace(job, leases=leases, next_lease=job.next_lease + 1)
    job = replace(job, reason=_serving_reason(job))
    assignments = tuple(assign_work(job, node) for node in nodes)
    return ServeStep(_paused_if_stuck(job), assignments)


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
    """Let every node go; the journal says that the job has ended."""
    step = void_leases(job, reason)
    phase = ServePhase.STOPPED
    job, releases = release_all(replace(step.job, phase=phase, reason=reason), reason)
    end = JobEnded(at_ms=job.at_ms, phase=phase.value, reason=reason)
    return ServeStep(job, (*step.commands, *releases, WriteRecord(end)))
