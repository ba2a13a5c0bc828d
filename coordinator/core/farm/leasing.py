"""Gives bundles to nodes, takes them back, and ends the job.

A free node gets, in this order: a copy of a bundle that is checked; items that came back and that
it did not give back itself; untouched items; items that it gave back before; and where nothing else
is left a copy of the bundle whose end is expected last, of which the first result counts.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.farm.budget import affordable_items, is_underfunded, spent_reason
from coordinator.core.farm.bundle_sizes import bundle_items, lease_limit_ms
from coordinator.core.farm.checks import (
    is_checked,
    is_on_trial,
    is_undecided,
    may_take_copy,
    missing_copies,
)
from coordinator.core.farm.events import BundlesDue
from coordinator.core.farm.part_checks import (
    WantedVotes,
    bundle_with_part_items,
    bundles_to_check,
    drawn_part,
    is_part_undecided,
    must_wait,
)
from coordinator.core.farm.state import (
    CheckRule,
    FarmJob,
    FarmMember,
    FarmPhase,
    ItemRun,
    LeasedBundle,
    OpenBundle,
)
from coordinator.core.work.hand_back import hand_back_reasons
from coordinator.core.work.members import (
    free_nodes,
    release_all,
    release_if_leaving,
    with_member,
)
from coordinator.core.work.work_commands import AssignWork, CancelWork, ReportAt, WriteRecord
from coordinator.core.work.work_events import JobEnded
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.work_spec import RESULT_BASE_BYTES
from hypergpu.ids import NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.packed_work import pack_work
from hypergpu.units import Bytes, Milliseconds, several


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


def assign_work(job: FarmJob, node: NodeId) -> AssignWork:
    """The command that gives a node the bundle that it has. The shell adds the chunks."""
    leased_bundle, request = job.leases[node], job.request
    run = job.leased_run(node)
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
    assignment = PackedAssignment(
        lease=Lease(job.job_id, leased_bundle.bundle, leased_bundle.lease),
        slot=leased_bundle.slot,
        work=pack_work(request.work_kind, bundle),
        terms=None if job.terms == Terms() else job.terms,
        spec=job.spec,
        reason=f"items {run.start + 1} to {last} of {request.items}",
    )
    return AssignWork(node, assignment)


def result_bytes_most(job: FarmJob, items: int) -> Bytes:
    """Size of the result of so many items at most, with the head of its file."""
    return Bytes(RESULT_BASE_BYTES + items * job.request.result_bytes_per_item_most)


def report_when_due(job: FarmJob) -> tuple[ReportAt, ...]:
    """The command that reports the end of the earliest lease."""
    if not job.leases:
        return ()
    first_ms = min(leased_bundle.due_at_ms for leased_bundle in job.leases.values())
    return (ReportAt(first_ms, BundlesDue(at_ms=Milliseconds(0))),)


def lease_bundles(job: FarmJob, nodes: Iterable[NodeId] | None = None) -> FarmStep:
    """Give bundles to free nodes.

    Args:
        job: The job.
        nodes: The only ones that may have become free; None: any.
    """
    if job.phase is not FarmPhase.WORKING:
        return FarmStep(job, report_when_due(job))
    nodes_at_work: list[NodeId] = []
    gain = _copy_gain(job)
    free = _by_punctuality(job, free_nodes(job, job.leases) if nodes is None else nodes)
    votes = WantedVotes(bundles_to_check(job) if free else ())
    for node in free:
        after = _lease_one(job, node, gain, votes)
        if after is not job:
            job = after
            nodes_at_work.append(node)
    assignments = tuple(assign_work(job, node) for node in nodes_at_work)
    step = FarmStep(job, (*assignments, *report_when_due(job)))
    return step.then(_pause_if_stuck(job))


def _by_punctuality(job: FarmJob, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Nodes that may work and have no bundle; who kept its last one too long comes last."""
    free = [node for node in nodes if node not in job.leases and job.members[node].can_work]
    return sorted(free, key=lambda node: job.members[node].standing.missed_in_a_row)


def _lease_one(job: FarmJob, node: NodeId, gain: "_CopyGain | None", votes: WantedVotes) -> FarmJob:
    """The job in which a node has a bundle; the same job: there is none for it.

    Args:
        job: The job.
        node: A free node.
        gain: What bounds the gain of one more copy.
        votes: That bundles want.
    """
    number = votes.first_for(job, node)
    if number is not None and _is_affordable(job, number):
        votes.review(number)
        return _with_part_lease(job, node, number)
    if (copy := _checked_copy(job, node)) is not None:
        return with_lease(job, node, copy)
    if spent_reason(job) or must_wait(job, node):
        return job
    if job.has_work_left:
        return _lease_items(job, node)
    if gain is None or job.at_ms + job.members[node].pace.span_for(gain.least_items) >= gain.end_ms:
        return job
    if (copy := _slowest_bundle(job, node, gain)) is not None:
        return with_lease(job, node, copy)
    return job


def _is_affordable(job: FarmJob, number: int) -> bool:
    """Whether one more vote on a bundle may be paid for. One is set aside with the bundle."""
    open_bundle = job.bundles[number]
    if open_bundle.part is None or not open_bundle.votes:
        return True
    affordable = affordable_items(job)
    return affordable is None or affordable >= open_bundle.part.items


def _checked_copy(job: FarmJob, node: NodeId) -> int | None:
    """A bundle that wants one more result, which the node may give."""
    return next(
        (
            number
            for number, open_bundle in job.bundles.items()
            if open_bundle.copies > 1
            and not open_bundle.comparing
            and missing_copies(open_bundle) > 0
            and (not open_bundle.results or open_bundle.copies > len(open_bundle.results))
            and may_take_copy(job, number, node)
        ),
        None,
    )


def _lease_items(job: FarmJob, node: NodeId) -> FarmJob:
    number = job.next_bundle
    is_copied = job.check_rule is CheckRule.COPIES and is_checked(job, node, number)
    copies = 2 if is_copied else 1
    affordable = affordable_items(job)
    most_items = job.request.items
    if affordable is not None:
        limit_items = affordable // copies if job.check_rule is CheckRule.COPIES else affordable
        most_items = max(1, bundle_with_part_items(job, limit_items))
    job, run = _cut_run(job, node, most_items)
    part = drawn_part(job, node, number, run)
    if part is not None and affordable is not None and run.items + part.items > affordable:
        part = None  # The last item that the budget covers.
    open_bundle = OpenBundle(run=run, copies=copies, part=part)
    job = replace(job, next_bundle=number + 1, bundles={**job.bundles, number: open_bundle})
    return with_lease(job, node, number)


def _cut_run(job: FarmJob, node: NodeId, most_items: int) -> tuple[FarmJob, ItemRun]:
    """The items of a node's next bundle, and the job without them."""
    place = _waiting_place(job, node)
    if place is None:
        run = ItemRun(start=job.next_item, items=job.untouched_items)
        items = bundle_items(job, node, min(run.items, most_items))
        return replace(job, next_item=job.next_item + items), run.first(items)
    run = job.waiting[place]
    # What failed goes out as it is: it was halved when it came back.
    items = min(run.items, most_items)
    if not run.failed_nodes:
        items = bundle_items(job, node, items)
    left_runs = (run.rest(items),) if items < run.items else ()
    waiting_runs = (*job.waiting[:place], *left_runs, *job.waiting[place + 1 :])
    return replace(job, waiting=waiting_runs), run.first(items)


def _waiting_place(job: FarmJob, node: NodeId) -> int | None:
    """Place of the waiting run that a node gets; None: it gets untouched items."""
    runs = job.waiting
    fresh = next((place for place, run in enumerate(runs) if not run.failed_nodes), None)
    if fresh is not None:
        return fresh
    if not runs or (job.untouched_items and not job.members[node].has_returned):
        return None
    others = [place for place, run in enumerate(runs) if node not in run.failed_nodes]
    if others:
        return min(others, key=lambda place: len(runs[place].failed_nodes))
    if job.untouched_items:
        return None
    return min(range(len(runs)), key=lambda place: len(runs[place].failed_nodes))


class _CopyGain(NamedTuple):
    """What one more copy may gain: an idle node that is slower looks at no bundle."""

    ends: tuple[tuple[int, int], ...]
    """Expected ends and numbers of the bundles that one node has, the latest first."""
    least_items: int
    """Items of the smallest of these bundles."""

    @property
    def end_ms(self) -> int:
        """The latest expected end."""
        return self.ends[0][0]


def _copy_gain(job: FarmJob) -> _CopyGain | None:
    """The gain at the end of a job; None: items wait, or no bundle is one node's."""
    if job.has_work_left:
        return None
    singles = [number for number, each in job.bundles.items() if len(each.holders) == 1]
    if not singles:
        return None
    ends = sorted(((_expected_end_ms(job, number), number) for number in singles), reverse=True)
    return _CopyGain(tuple(ends), min(job.bundles[number].run.items for number in singles))


def _slowest_bundle(job: FarmJob, node: NodeId, gain: _CopyGain) -> int | None:
    """The bundle whose end is expected last, if the node would have it earlier."""
    member = job.members[node]
    pace = member.pace
    if not pace.items or (job.check_rule is CheckRule.PARTS and is_on_trial(job, node)):
        return None
    slowest = next((end for end in gain.ends if _may_copy(job, node, end[1])), None)
    if slowest is None:
        return None
    end_ms, number = slowest
    items = job.bundles[number].run.items
    is_small_enough = not member.items_most or items <= member.items_most
    return number if is_small_enough and job.at_ms + pace.span_for(items) < end_ms else None


def _may_copy(job: FarmJob, node: NodeId, number: int) -> bool:
    """Whether a node may do a bundle that another one has now."""
    open_bundle = job.bundles[number]
    return (
        len(open_bundle.holders) == 1
        and node not in open_bundle.holders
        and all(result.node != node for result in open_bundle.results)
        and node not in open_bundle.run.failed_nodes
        and (open_bundle.copies == 1 or may_take_copy(job, number, node))
    )


def _expected_end_ms(job: FarmJob, number: int) -> int:
    open_bundle = job.bundles[number]
    holder = open_bundle.holders[0]
    leased_bundle, pace = job.leases[holder], job.members[holder].pace
    expected_ms = pace.span_for(open_bundle.run.items)
    if not expected_ms:
        return leased_bundle.due_at_ms
    # What is over its time may take as long again.
    late_ms = max(0, job.at_ms - leased_bundle.assigned_at_ms - expected_ms)
    return leased_bundle.assigned_at_ms + expected_ms + 2 * late_ms


def with_lease(job: FarmJob, node: NodeId, number: int) -> FarmJob:
    """The job in which a node has a bundle."""
    open_bundle = job.bundles[number]
    run = replace(open_bundle.run, tries=open_bundle.run.tries + 1)
    leased_bundle = _new_lease(job, node, number, run.items)
    open_bundle = replace(open_bundle, run=run, holders=(*open_bundle.holders, node))
    return _with_leased(job, node, leased_bundle, open_bundle)


def _with_part_lease(job: FarmJob, node: NodeId, number: int) -> FarmJob:
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
    number = leased_bundle.bundle
    return replace(
        job,
        leases={**job.leases, node: leased_bundle},
        bundles={**job.bundles, number: open_bundle},
        next_lease=job.next_lease + 1,
    )


def without_lease(job: FarmJob, node: NodeId) -> FarmJob:
    """The job in which a node has no bundle; what it had stays open."""
    leased_bundle = job.leases.get(node)
    if leased_bundle is None:
        return job
    open_bundle = job.bundles[leased_bundle.bundle]
    holders = tuple(who for who in open_bundle.holders if who != node)
    checkers = tuple(who for who in open_bundle.checkers if who != node)
    open_bundle = replace(open_bundle, holders=holders, checkers=checkers)
    return replace(
        job,
        leases={who: each for who, each in job.leases.items() if who != node},
        bundles={**job.bundles, leased_bundle.bundle: open_bundle},
    )


def end_lease(job: FarmJob, node: NodeId) -> FarmStep:
    """Take a node's lease from it, and let the node go if it was to leave after it."""
    return FarmStep(*release_if_leaving(without_lease(job, node), node))


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


def cancel(job: FarmJob, node: NodeId, reason: str) -> CancelWork:
    """The command that tells a node that its lease is void."""
    leased_bundle = job.leases[node]
    return CancelWork(node, Lease(job.job_id, leased_bundle.bundle, leased_bundle.lease), reason)


def cancel_leases(job: FarmJob, bundle: int, reason: str) -> FarmStep:
    """Take a bundle, or its part, from all nodes that have it."""
    open_bundle = job.bundles[bundle]
    nodes = (*open_bundle.holders, *open_bundle.checkers)
    step = FarmStep(job, tuple(cancel(job, node, reason) for node in nodes))
    for node in nodes:
        step = step.then(end_lease(step.job, node))
    return step


def void_leases(job: FarmJob, reason: str) -> FarmStep:
    """Take every bundle back."""
    step = FarmStep(job, tuple(cancel(job, node, reason) for node in job.leases))
    for node, leased_bundle in job.leases.items():
        freed_step = step.then(end_lease(step.job, node))
        step = FarmStep(put_back(freed_step.job, leased_bundle.bundle), freed_step.commands)
    return step


def end_job(job: FarmJob, phase: FarmPhase, reason: str) -> FarmStep:
    """Let every node go; the journal says that the job has ended."""
    step = void_leases(job, reason)
    job, releases = release_all(replace(step.job, phase=phase, reason=reason), reason)
    end = JobEnded(at_ms=job.at_ms, phase=phase.value, reason=reason)
    return FarmStep(job, (*step.commands, *releases, WriteRecord(end)))


def _pause_if_stuck(job: FarmJob) -> FarmStep:
    """Pause where no node will ever take what waits: trying again would only repeat it."""
    if job.leases or not (job.has_work_left or job.bundles):
        return FarmStep(job)
    if (reason := spent_reason(job)) and not any(each.comparing for each in job.bundles.values()):
        if is_underfunded(job):
            # More may be set aside any time, and is told.
            return FarmStep(replace(job, reason=f"waits for money: {reason}"))
        return FarmStep(
            replace(job, phase=FarmPhase.PAUSED, reason=reason, is_paused_for_budget=True)
        )
    present = [member for member in job.members.values() if member.is_present]
    if present and not job.has_work_left and all(_is_undecided(job, each) for each in job.bundles):
        return FarmStep(replace(job, phase=FarmPhase.PAUSED, reason=_undecided_text(job)))
    if not present or any(not member.exclusion for member in present):
        return FarmStep(job)
    reasons = hand_back_reasons(job.refusals) or present[0].exclusion
    nodes = several(len(present), "node")
    reason = f"{nodes} that are there get no more bundles: handed back: {reasons}"
    return FarmStep(replace(job, phase=FarmPhase.PAUSED, reason=reason))


def _is_undecided(job: FarmJob, number: int) -> bool:
    if job.bundles[number].part is not None:
        return is_part_undecided(job, number)
    return is_undecided(job, number)


def _undecided_text(job: FarmJob) -> str:
    run = next(iter(job.bundles.values())).run
    bundles = several(len(job.bundles), "bundle")
    return (
        f"results of {bundles} differ, the first of items {run.start + 1} to"
        f" {run.start + run.items}, and no node by a further join token is there to decide:"
        " connect one and resume, or resume to count the result of the node that others confirmed"
        " most"
    )
