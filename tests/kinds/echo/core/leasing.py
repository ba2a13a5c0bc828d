"""Gives items to nodes, takes them back and ends the job."""

from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.work.hand_back import hand_back_reasons
from coordinator.core.work.leases import WorkState
from coordinator.core.work.members import free_nodes, release_all
from coordinator.core.work.work_commands import AssignWork, CancelWork, ReportAt, WriteRecord
from coordinator.core.work.work_events import JobEnded
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.ids import NodeId
from hypergpu.packed_work import pack_work
from hypergpu.units import Milliseconds
from tests.kinds.echo.core.events import LeasesDue
from tests.kinds.echo.core.state import KIND, EchoItem, EchoJob, EchoPhase, LeasedItem


class EchoStep(NamedTuple):
    """The effect of one event."""

    job: EchoJob
    commands: tuple[Any, ...] = ()


def assign_work(job: EchoJob, node: NodeId) -> AssignWork:
    """The command that gives a node the item that it has."""
    item = job.leases[node]
    echo_item = EchoItem(item.number, job.items[item.number], job.keep_ms)
    assignment = PackedAssignment(
        lease=Lease(job.job_id, item.number, item.lease),
        slot=item.slot,
        work=pack_work(KIND, echo_item),
        reason=f"item {item.number + 1} of {len(job.items)}",
    )
    return AssignWork(node, assignment)


def report_when_due(job: EchoJob) -> tuple[ReportAt, ...]:
    """The command that reports the end of the earliest lease."""
    if not job.leases:
        return ()
    first_ms = min(item.due_at_ms for item in job.leases.values())
    return (ReportAt(first_ms, LeasesDue(at_ms=Milliseconds(0))),)


def lease_items(job: EchoJob) -> EchoStep:
    """Give waiting items to nodes without one; whoever kept its last one too long comes last."""
    nodes_at_work: list[NodeId] = []
    nodes = free_nodes(job, job.leases) if job.phase is EchoPhase.WORKING else []
    for node in sorted(nodes, key=lambda each: job.members[each].standing.missed_in_a_row):
        number = next((each for each in job.waiting if not has_refused(job, node, each)), None)
        if number is not None:
            job = _with_lease(job, node, number)
            nodes_at_work.append(node)
    step = _pause_if_refused(job)
    assignments = tuple(assign_work(job, node) for node in nodes_at_work)
    return EchoStep(step.job, (*assignments, *report_when_due(job), *step.commands))


def _with_lease(job: EchoJob, node: NodeId, number: int) -> EchoJob:
    item = LeasedItem(
        slot=job.members[node].slot,
        lease=job.next_lease,
        assigned_at_ms=job.at_ms,
        number=number,
        due_at_ms=Milliseconds(job.at_ms + job.limit_ms),
    )
    return replace(
        job,
        leases={**job.leases, node: item},
        waiting=tuple(each for each in job.waiting if each != number),
        next_lease=job.next_lease + 1,
    )


def has_refused(job: EchoJob, node: NodeId, number: int) -> bool:
    """Whether a node gave an item back undone."""
    return any(who == node and item.number == number for who, item in job.refusals)


def _pause_if_refused(job: EchoJob) -> EchoStep:
    """Pause where every node that is there gave every item back: trying again would repeat it."""
    nodes = free_nodes(job, ())
    is_stuck = job.phase is EchoPhase.WORKING and job.waiting and not job.leases
    if not is_stuck or not nodes:
        return EchoStep(job)
    reasons = hand_back_reasons(item for _, item in job.refusals)
    return EchoStep(replace(job, phase=EchoPhase.PAUSED, reason=f"handed back: {reasons}"))


def without_lease(job: EchoJob, node: NodeId) -> EchoJob:
    """The job in which a node has no item; the one that it had goes out next."""
    item = job.leases.get(node)
    if item is None:
        return job
    leases = {who: each for who, each in job.leases.items() if who != node}
    return replace(job, leases=leases, waiting=(item.number, *job.waiting))


def cancel(job: EchoJob, node: NodeId, reason: str) -> CancelWork:
    """The command that tells a node that its lease is void."""
    item = job.leases[node]
    return CancelWork(node, Lease(job.job_id, item.number, item.lease), reason)


def void_leases(job: EchoJob, reason: str) -> EchoStep:
    """Take every item back."""
    commands = tuple(cancel(job, node, reason) for node in job.leases)
    for node in tuple(job.leases):
        job = without_lease(job, node)
    return EchoStep(job, commands)


def end_job(job: EchoJob, phase: EchoPhase, reason: str) -> EchoStep:
    """Let every node go; the journal says that the job has ended."""
    step = void_leases(job, reason)
    job, releases = release_all(replace(step.job, phase=phase, reason=reason), reason)
    end = JobEnded(at_ms=job.at_ms, phase=phase.value, reason=reason)
    return EchoStep(job, (*step.commands, *releases, WriteRecord(end)))


def refusal_of(leased: LeasedItem, reason: str) -> LeasedItem:
    """A lease under which the item came back undone."""
    return replace(leased, work=WorkState.HANDED_BACK, reason=reason)
