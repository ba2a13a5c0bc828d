"""What nodes have of a farm job: leases that begin, go on to the next one, and end.

A node that can has two: what it does, and what it does next, so that its line is busy while it
computes. The time of the second begins once it is the first. A node that drains, is late or is
refused gives the second back with nothing noted against its items.
"""

from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.farm.bundle_sizes import lease_limit_ms
from coordinator.core.farm.events import BundlesDue
from coordinator.core.farm.state import (
    FarmJob,
    FarmMember,
    FarmPhase,
    LeasedBundle,
    OpenBundle,
)
from coordinator.core.work.members import release_all, release_if_leaving, with_member
from coordinator.core.work.work_commands import AssignWork, CancelWork, ReportAt, WriteRecord
from coordinator.core.work.work_events import JobEnded
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.work_spec import RESULT_BASE_BYTES
from hypergpu.ids import NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.packed_work import pack_work
from hypergpu.units import Bytes, Milliseconds


class FarmStep(NamedTuple):
    """The effect of one event."""

    job: FarmJob
    commands: tuple[Any, ...] = ()

    def then(self, after: "FarmStep") -> "FarmStep":
        """This step's commands before those of the next one, which began from its job."""
        return FarmStep(after.job, (*self.commands, *after.commands))


def with_farm_member(job: FarmJob, node: NodeId, **changes: Any) -> FarmJob:
    """The job in which these fields of a member have other values."""
    member: FarmMember = replace(job.members[node], **changes)
    return with_member(job, node, member)


def assign_work(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle) -> AssignWork:
    """The command that gives a node a bundle that it has. The shell adds the chunks."""
    request, run = job.request, job.leased_run(leased_bundle)
    bundle = Bundle(
        start=run.start,
        items=run.items,
        manifest=None if job.spec is None else request.manifest,
        files=request.files,
        parameters=request.parameters,
        seed=request.seed,
        unit=request.unit,
        result=request.result,
        result_bytes_most=result_bytes_most(job, run.items),
        limit_ms=Milliseconds(leased_bundle.due_at_ms - leased_bundle.assigned_at_ms),
    )
    last = run.start + run.items
    first_lease = job.leases[node].lease
    assignment = PackedAssignment(
        lease=_lease(job, leased_bundle),
        slot=leased_bundle.slot,
        work=pack_work(request.work_kind, bundle),
        terms=None if job.terms == Terms() else job.terms,
        spec=job.spec,
        after_lease=0 if first_lease == leased_bundle.lease else first_lease,
        reason=f"items {run.start + 1} to {last} of {request.items}",
    )
    return AssignWork(node, assignment)


def assign_all(job: FarmJob) -> tuple[AssignWork, ...]:
    """The commands that give nodes all that they have, what they do next last."""
    return tuple(assign_work(job, node, each) for node, each in job.all_leases())


def _lease(job: FarmJob, leased_bundle: LeasedBundle) -> Lease:
    return Lease(job.job_id, leased_bundle.bundle, leased_bundle.lease)


def result_bytes_most(job: FarmJob, items: int) -> Bytes:
    """Size of the result of so many items at most, with the head of its file."""
    return Bytes(RESULT_BASE_BYTES + items * job.request.result_bytes_per_item_most)


def report_when_due(job: FarmJob) -> tuple[ReportAt, ...]:
    """The command that reports the end of the earliest lease."""
    if not job.leases:
        return ()
    first_ms = min(leased_bundle.due_at_ms for leased_bundle in job.leases.values())
    return (ReportAt(first_ms, BundlesDue(at_ms=Milliseconds(0))),)


def with_lease(job: FarmJob, node: NodeId, number: int) -> FarmJob:
    """The job in which a node has a bundle: its next one, where it has one already."""
    open_bundle = job.bundles[number]
    run = replace(open_bundle.run, tries=open_bundle.run.tries + 1)
    leased_bundle = _new_lease(job, node, number, run.items)
    open_bundle = replace(open_bundle, run=run, holders=(*open_bundle.holders, node))
    return _with_leased(job, node, leased_bundle, open_bundle)


def with_part_lease(job: FarmJob, node: NodeId, number: int) -> FarmJob:
    """The job in which a node does the part of a bundle that is checked."""
    open_bundle = job.bundles[number]
    part = open_bundle.part or open_bundle.run
    leased_bundle = replace(_new_lease(job, node, number, part.items), is_part=True)
    open_bundle = replace(open_bundle, checkers=(*open_bundle.checkers, node))
    return _with_leased(job, node, leased_bundle, open_bundle)


def _new_lease(job: FarmJob, node: NodeId, number: int, items: int) -> LeasedBundle:
    limit_ms = lease_limit_ms(job, node, items)
    return LeasedBundle(
        slot=job.members[node].slot,
        lease=job.next_lease,
        assigned_at_ms=job.at_ms,
        bundle=number,
        due_at_ms=Milliseconds(job.at_ms + limit_ms),
    )


def _with_leased(
    job: FarmJob, node: NodeId, leased_bundle: LeasedBundle, open_bundle: OpenBundle
) -> FarmJob:
    bundles = {**job.bundles, leased_bundle.bundle: open_bundle}
    job = replace(job, bundles=bundles, next_lease=job.next_lease + 1)
    if node in job.leases:
        return replace(job, queued_leases={**job.queued_leases, node: leased_bundle})
    return replace(job, leases={**job.leases, node: leased_bundle})


def without_lease(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle) -> FarmJob:
    """The job in which a node does not have a bundle; what it had stays open. What it was to do
    next it does now.
    """
    open_bundle = job.bundles[leased_bundle.bundle]
    holders = tuple(who for who in open_bundle.holders if who != node)
    checkers = tuple(who for who in open_bundle.checkers if who != node)
    open_bundle = replace(open_bundle, holders=holders, checkers=checkers)
    queued_lease = job.queued_leases.get(node)
    leases = job.leases
    if queued_lease is None or leases[node].lease == leased_bundle.lease:
        leases = {who: each for who, each in leases.items() if who != node}
        if queued_lease is not None:
            leases[node] = _begun_now(queued_lease, job.at_ms)
    queued_leases = job.queued_leases
    if queued_lease is not None:
        queued_leases = {who: each for who, each in queued_leases.items() if who != node}
    return replace(
        job,
        leases=leases,
        queued_leases=queued_leases,
        bundles={**job.bundles, leased_bundle.bundle: open_bundle},
    )


def _begun_now(leased_bundle: LeasedBundle, at_ms: Milliseconds) -> LeasedBundle:
    """A lease that a node begins with at this time, with as much time as before."""
    limit_ms = leased_bundle.due_at_ms - leased_bundle.assigned_at_ms
    return replace(leased_bundle, assigned_at_ms=at_ms, due_at_ms=Milliseconds(at_ms + limit_ms))


def end_lease(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle) -> FarmStep:
    """Take a lease from its node, and let the node go if it was to leave after it."""
    job = without_lease(job, node, leased_bundle)
    return FarmStep(job) if node in job.leases else FarmStep(*release_if_leaving(job, node))


def without_bundle(job: FarmJob, number: int) -> FarmJob:
    """The job without a bundle that nobody has."""
    bundles = {each: open_bundle for each, open_bundle in job.bundles.items() if each != number}
    return replace(job, bundles=bundles)


def put_back(job: FarmJob, number: int) -> FarmJob:
    """The job in which the items of a bundle wait again, unless a node or a result has them."""
    open_bundle = job.bundles[number]
    if open_bundle.holders or open_bundle.results:
        return job
    return replace(without_bundle(job, number), waiting=(open_bundle.run, *job.waiting))


def cancel(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle, reason: str) -> CancelWork:
    """The command that tells a node that a lease of it is void."""
    return CancelWork(node, _lease(job, leased_bundle), reason)


def cancel_leases(job: FarmJob, bundle: int, reason: str) -> FarmStep:
    """Take a bundle, or its part, from all nodes that have it."""
    open_bundle = job.bundles[bundle]
    step = FarmStep(job)
    for node in (*open_bundle.holders, *open_bundle.checkers):
        step = step.then(cancel_lease(step.job, node, job.lease_of_bundle(node, bundle), reason))
    return step


def cancel_lease(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle, reason: str) -> FarmStep:
    """Take a lease from its node, and tell the node."""
    command = cancel(job, node, leased_bundle, reason)
    return FarmStep(job, (command,)).then(end_lease(job, node, leased_bundle))


def take_queued(job: FarmJob, node: NodeId, reason: str) -> FarmStep:
    """Take what a node was to do next back, with nothing noted against it."""
    queued_lease = job.queued_leases.get(node)
    return FarmStep(job) if queued_lease is None else _take(job, node, queued_lease, reason)


def take_all(job: FarmJob, node: NodeId, reason: str) -> FarmStep:
    """Take all that a node has back, what it was to do next first."""
    step = FarmStep(job)
    for leased_bundle in reversed(job.leases_of(node)):
        step = step.then(_take(step.job, node, leased_bundle, reason))
    return step


def _take(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle, reason: str) -> FarmStep:
    step = cancel_lease(job, node, leased_bundle, reason)
    return FarmStep(put_back(step.job, leased_bundle.bundle), step.commands)


def void_leases(job: FarmJob, reason: str) -> FarmStep:
    """Take every bundle back."""
    step = FarmStep(job)
    for node in tuple(job.leases):
        step = step.then(take_all(step.job, node, reason))
    return step


def end_job(job: FarmJob, phase: FarmPhase, reason: str) -> FarmStep:
    """Let every node go; the journal says that the job has ended."""
    step = void_leases(job, reason)
    job, releases = release_all(replace(step.job, phase=phase, reason=reason), reason)
    end = JobEnded(at_ms=job.at_ms, phase=phase.value, reason=reason)
    return FarmStep(job, (*step.commands, *releases, WriteRecord(end)))
