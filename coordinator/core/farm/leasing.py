"""Gives bundles to nodes.

A free node gets, in this order: a copy of a bundle that is checked; items that came back and that
it did not give back itself; untouched items; items that it gave back before; and where nothing else
is left a copy of the bundle whose end is expected last, of which the first result counts. Once
every free node has a bundle, those that are known get the next one, but not near the end.
"""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.farm.budget import affordable_items, is_underfunded, spent_reason
from coordinator.core.farm.bundle_leases import (
    FarmStep,
    assign_work,
    report_when_due,
    with_lease,
    with_part_lease,
)
from coordinator.core.farm.bundle_sizes import bundle_items, is_far_from_end
from coordinator.core.farm.checks import (
    is_checked,
    is_on_trial,
    is_undecided,
    may_queue,
    may_take_copy,
    missing_copies,
)
from coordinator.core.farm.part_checks import (
    WantedVotes,
    bundle_with_part_items,
    bundles_to_check,
    drawn_part,
    is_part_undecided,
    must_wait,
)
from coordinator.core.farm.state import CheckRule, FarmJob, FarmPhase, ItemRun, OpenBundle
from coordinator.core.work.hand_back import hand_back_reasons
from coordinator.core.work.members import free_nodes
from hypergpu.ids import NodeId
from hypergpu.units import several


def lease_bundles(job: FarmJob, nodes: Iterable[NodeId] | None = None) -> FarmStep:
    """Give bundles to free nodes.

    Args:
        job: The job.
        nodes: The only ones that may have become free; None: any.
    """
    if job.phase is not FarmPhase.WORKING:
        return FarmStep(job, report_when_due(job))
    first_lease = job.next_lease
    gain = _copy_gain(job)
    free = _by_punctuality(job, free_nodes(job, job.leases) if nodes is None else nodes)
    queuing_nodes = _nodes_that_queue(job, job.members if nodes is None else nodes)
    votes = WantedVotes(bundles_to_check(job) if free or queuing_nodes else ())
    for node in free:
        job = _lease_one(job, node, gain, votes)
    for node in queuing_nodes:
        if _may_queue(job, node):
            job = _lease_wanted(job, node, votes)
    new_leases = [
        (node, each)
        for node in dict.fromkeys((*free, *queuing_nodes))
        for each in job.leases_of(node)
        if each.lease >= first_lease
    ]
    new_leases.sort(key=lambda pair: pair[1].lease)
    assignments = tuple(assign_work(job, *pair) for pair in new_leases)
    step = FarmStep(job, (*assignments, *report_when_due(job)))
    return step.then(_pause_if_stuck(job))


def _by_punctuality(job: FarmJob, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Nodes that may work and have no bundle; who kept its last one too long comes last."""
    free = [node for node in nodes if node not in job.leases and job.members[node].can_work]
    return sorted(free, key=lambda node: job.members[node].standing.missed_in_a_row)


def _nodes_that_queue(job: FarmJob, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Nodes that take a second bundle and have none, in slot order."""
    queuing_nodes = [
        node for node in nodes if job.members[node].queues_work and node not in job.queued_leases
    ]
    return sorted(queuing_nodes, key=lambda node: job.members[node].slot)


def _may_queue(job: FarmJob, node: NodeId) -> bool:
    """Whether a node that has a bundle gets its next one now: near the end what waits at one node
    is missing to another.
    """
    return (
        node in job.leases
        and job.members[node].can_work
        and may_queue(job, node)
        and is_far_from_end(job, node)
    )


def _lease_one(job: FarmJob, node: NodeId, gain: "_CopyGain | None", votes: WantedVotes) -> FarmJob:
    """The job in which a node has a bundle; the same job: there is none for it.

    Args:
        job: The job.
        node: A free node.
        gain: What bounds the gain of one more copy.
        votes: That bundles want.
    """
    after = _lease_wanted(job, node, votes)
    if after is not job or job.has_work_left or spent_reason(job) or must_wait(job, node):
        return after
    if gain is None or job.at_ms + job.members[node].pace.span_for(gain.least_items) >= gain.end_ms:
        return job
    if (copy := _slowest_bundle(job, node, gain)) is not None:
        return with_lease(job, node, copy)
    return job


def _lease_wanted(job: FarmJob, node: NodeId, votes: WantedVotes) -> FarmJob:
    """The job in which a node has something that some node must do; the same job: nothing is left
    for it.
    """
    number = votes.first_for(job, node)
    if number is not None and _is_affordable(job, number):
        votes.review(number)
        return with_part_lease(job, node, number)
    if (copy := _checked_copy(job, node)) is not None:
        return with_lease(job, node, copy)
    if not job.has_work_left or spent_reason(job) or must_wait(job, node):
        return job
    return _lease_items(job, node)


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
    holder = job.bundles[number].holders[0]
    leased_bundle = job.lease_of_bundle(holder, number)
    first_lease = job.leases[holder]
    if leased_bundle.lease != first_lease.lease:
        items = job.bundles[number].run.items
        first_items = job.leased_run(first_lease).items
        span_ms = job.members[holder].pace.span_for(first_items + items)
        return first_lease.assigned_at_ms + span_ms
    pace = job.members[holder].pace
    expected_ms = pace.span_for(job.bundles[number].run.items)
    if not expected_ms:
        return leased_bundle.due_at_ms
    # What is over its time may take as long again.
    late_ms = max(0, job.at_ms - leased_bundle.assigned_at_ms - expected_ms)
    return leased_bundle.assigned_at_ms + expected_ms + 2 * late_ms


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
