"""What becomes of bundles that come back undone: a smaller piece next time, down to one item, which
is given up once it failed at enough nodes that can do others.
"""

from msgspec.structs import replace

from coordinator.core.farm.bundle_leases import (
    FarmStep,
    cancel_lease,
    end_lease,
    put_back,
    take_all,
    take_queued,
    with_farm_member,
    without_bundle,
)
from coordinator.core.farm.events import BundleHandedBack, BundlesDue, ItemDropped
from coordinator.core.farm.part_results import settle_part, with_open_bundle
from coordinator.core.farm.results import go_on
from coordinator.core.farm.state import FarmJob, FarmMember, ItemRun, LeasedBundle
from coordinator.core.work.leases import WorkState
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.units import several

_FAILURES_MOST, _FIRST_FAILURES_MOST = 16, 3
"""Bundles in a row that a node may give back: once it has returned one, and before."""
_REFUSALS_KEPT = 16
_REASON_LENGTH_MOST = 300


def take_back(job: FarmJob, event: BundleHandedBack) -> FarmStep:
    """Take a bundle back that a node does not do."""
    leased_bundle = job.lease_numbered(event.node, event.lease)
    if leased_bundle is None:
        return FarmStep(job)
    run = job.leased_run(leased_bundle)
    step = end_lease(job, event.node, leased_bundle)
    if event.is_refused:
        job = put_back(
            _with_refusal(step.job, event.node, leased_bundle, event.reason), leased_bundle.bundle
        )
        step = FarmStep(job, step.commands).then(take_all(job, event.node, event.reason))
        return step.then(go_on(step.job))
    job = _with_failure(step.job, event.node, leased_bundle, event.reason)
    if event.lacks_memory:
        job = with_farm_member(job, event.node, items_most=max(1, run.items // 2))
    step = step.then(_fail(job, event.node, leased_bundle, event.reason))
    if event.lacks_memory or job.members[event.node].refusal:
        # What it has beside it is as large, or not for it.
        step = step.then(take_all(step.job, event.node, event.reason))
    return step.then(go_on(step.job))


def end_due_leases(job: FarmJob, _: BundlesDue) -> FarmStep:
    """Take back what nodes have kept too long."""
    step = FarmStep(job)
    late = [
        node for node, leased_bundle in job.leases.items() if leased_bundle.due_at_ms <= job.at_ms
    ]
    for node in late:
        step = step.then(_end_lease(step.job, node))
    return step.then(go_on(step.job))


def _end_lease(job: FarmJob, node: NodeId) -> FarmStep:
    member = job.members[node]
    reason = "its time is over"
    step = take_queued(job, node, reason)
    leased_bundle = step.job.leases[node]
    limit_s = (leased_bundle.due_at_ms - leased_bundle.assigned_at_ms) // 1000
    job = with_farm_member(step.job, node, standing=member.standing.after_miss())
    step = step.then(cancel_lease(job, node, leased_bundle, reason))
    reason = f"it was not done within {limit_s} s"
    job = _with_failure(step.job, node, leased_bundle, reason)
    return step.then(_fail(job, node, leased_bundle, reason))


def _with_failure(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle, reason: str) -> FarmJob:
    """The job in which a node has given back one more; after too many in a row it gets no more."""
    member: FarmMember = job.members[node]
    failures = member.failures_in_a_row + 1
    job = with_farm_member(job, node, failures_in_a_row=failures)
    most = _FAILURES_MOST if member.has_returned else _FIRST_FAILURES_MOST
    return job if failures < most else _with_refusal(job, node, leased_bundle, reason)


def _with_refusal(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle, reason: str) -> FarmJob:
    reason = reason[:_REASON_LENGTH_MOST] or "no reason was given"
    refused_bundle = replace(leased_bundle, work=WorkState.HANDED_BACK, reason=reason)
    job = with_farm_member(job, node, refusal=reason)
    return replace(job, refusals=(*job.refusals, refused_bundle)[-_REFUSALS_KEPT:])


def _fail(job: FarmJob, node: NodeId, leased_bundle: LeasedBundle, reason: str) -> FarmStep:
    """Note that a bundle failed at a node: halve it, or give its only item up."""
    number = leased_bundle.bundle
    open_bundle = job.bundles[number]
    if leased_bundle.is_part:
        # Another node has done it: then the items are not at fault.
        failed_nodes = (*open_bundle.failed_checkers, node)
        open_bundle = replace(open_bundle, failed_checkers=failed_nodes)
        return settle_part(with_open_bundle(job, number, open_bundle), number)
    run = replace(
        open_bundle.run,
        failed_nodes=(*open_bundle.run.failed_nodes, node),
        reason=reason[:_REASON_LENGTH_MOST],
    )
    if open_bundle.holders or open_bundle.results:
        # Others are at it, or have done it: then the items are not at fault.
        return FarmStep(job)
    job = without_bundle(job, number)
    if run.items > 1:
        half = run.items // 2
        return FarmStep(replace(job, waiting=(*job.waiting, run.first(half), run.rest(half))))
    if _is_hopeless(job, run):
        return _drop(job, run)
    return FarmStep(replace(job, waiting=(*job.waiting, run)))


def _is_hopeless(job: FarmJob, run: ItemRun) -> bool:
    """Whether an item that failed alone is at fault: it failed often, and where others did not."""
    if len(run.failed_nodes) < job.request.tries_most:
        return False
    nodes = set(run.failed_nodes)
    able = {who for who, member in job.members.items() if member.can_work and member.has_returned}
    is_everybody_asked = len(nodes) >= job.request.tries_most or able <= nodes
    return is_everybody_asked and any(job.members[who].has_returned for who in nodes)


def _drop(job: FarmJob, run: ItemRun) -> FarmStep:
    times = several(len(run.failed_nodes), "time")
    nodes = several(len(set(run.failed_nodes)), "node")
    reason = f"it failed {times} at {nodes}, the last time: {run.reason}"
    record = ItemDropped(at_ms=job.at_ms, item=run.start, reason=reason[:_REASON_LENGTH_MOST])
    job = replace(job, settled_items=job.settled_items + 1, failed_items=job.failed_items + 1)
    return FarmStep(job, (WriteRecord(record),))
