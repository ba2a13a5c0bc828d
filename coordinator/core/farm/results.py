"""What becomes of a result: accepted at once, held until another one agrees, or outvoted.

A result of a bundle that is not checked counts when it comes. Of one that is checked the first two
that agree count: the earlier one is the bundle's, the other confirms it, and both are paid. Whoever
gave another result is outvoted: it is not paid, and all that the node has at that time is checked.
That is the rule of jobs of earlier versions; newer ones hold each bundle until a part of it has
been compared (`part_results`).
"""

from msgspec.structs import replace

from coordinator.core.farm.acceptance import accept
from coordinator.core.farm.budget import affordable_items
from coordinator.core.farm.bundle_leases import (
    FarmStep,
    cancel_lease,
    end_job,
    end_lease,
    put_back,
    with_farm_member,
)
from coordinator.core.farm.checks import (
    COPIES_MOST,
    agreeing_leases,
    has_confirmer,
    is_undecided,
)
from coordinator.core.farm.events import BundleReturned, ResultDoubted, ResultsCompared
from coordinator.core.farm.leasing import lease_bundles
from coordinator.core.farm.part_results import (
    CompareResults,
    settle_part,
    settle_undecided_part,
    take_part_comparison,
    take_vote,
)
from coordinator.core.farm.state import (
    BundlePace,
    CheckRule,
    FarmJob,
    FarmPhase,
    LeasedBundle,
    ReturnedResult,
)
from coordinator.core.work.leases import elapsed_ms
from coordinator.core.work.members import available_count
from hypergpu.ids import NodeId
from hypergpu.units import several


def take_result(job: FarmJob, event: BundleReturned) -> FarmStep:
    """Take a result in, and give its node the next bundle."""
    leased_bundle = job.lease_numbered(event.node, event.lease)
    if leased_bundle is None:
        return FarmStep(job)
    job = _with_pace(job, event, leased_bundle)
    member = job.members[event.node]
    result = ReturnedResult(
        node=event.node,
        lease=event.lease,
        token=member.token,
        address=member.address,
        result=event.result,
        claim=event.claim,
    )
    step = end_lease(job, event.node, leased_bundle)
    if leased_bundle.is_part:
        step = step.then(take_vote(step.job, leased_bundle.bundle, result))
    else:
        step = step.then(_take_whole(step.job, leased_bundle.bundle, result))
    return step.then(_go_on_with(step.job, event.node))


def _take_whole(job: FarmJob, number: int, result: ReturnedResult) -> FarmStep:
    open_bundle = job.bundles[number]
    job = _with_results(job, number, (*open_bundle.results, result))
    if open_bundle.part is None:
        return settle_bundle(job, number)
    step = FarmStep(job)
    for node in open_bundle.holders:
        leased_bundle = step.job.lease_of_bundle(node, number)
        reason = "another node has done it"
        step = step.then(cancel_lease(step.job, node, leased_bundle, reason))
    return step.then(settle_bundle(step.job, number))


def _go_on_with(job: FarmJob, node: NodeId) -> FarmStep:
    """Go on after a result. While untouched items are left for whoever can work, nobody else is
    free, but for names that came late and wait, and no other member is looked at.
    """
    busy = len(job.leases) + (node not in job.leases)
    is_alone = job.check_rule is CheckRule.COPIES or available_count(job) <= busy
    if job.untouched_items and is_alone and affordable_items(job) is None:
        return lease_bundles(job, (node,))
    return go_on(job)


def _with_pace(job: FarmJob, event: BundleReturned, leased_bundle: LeasedBundle) -> FarmJob:
    member = job.members[event.node]
    took_ms = elapsed_ms(leased_bundle, job.at_ms)
    items = job.leased_run(leased_bundle).items
    # A part is so small that its transfers say nothing of the node's pace.
    pace = member.pace if leased_bundle.is_part else BundlePace(took_ms, items)
    return with_farm_member(
        job,
        event.node,
        standing=member.standing.after_work(took_ms, items),
        pace=pace,
        failures_in_a_row=0,
        accepted_lease=event.lease,
    )


def _with_results(
    job: FarmJob, bundle: int, results: tuple[ReturnedResult, ...], comparing: int = 0
) -> FarmJob:
    open_bundle = replace(job.bundles[bundle], results=results, comparing=comparing)
    return replace(job, bundles={**job.bundles, bundle: open_bundle})


def settle_bundle(job: FarmJob, bundle: int) -> FarmStep:
    """Accept a bundle's results, have them compared, or wait for another one."""
    open_bundle = job.bundles[bundle]
    if open_bundle.part is not None:
        return settle_part(job, bundle)
    if open_bundle.copies == 1 or (
        len(open_bundle.results) == 1 and not has_confirmer(job, bundle)
    ):
        return accept(job, bundle, open_bundle.results[:1])
    if len(open_bundle.results) == 1:
        return FarmStep(job)
    equal_leases = agreeing_leases(open_bundle, job.request.comparison.rule)
    if equal_leases is None:
        newest = open_bundle.results[-1].lease
        job = _with_results(job, bundle, open_bundle.results, comparing=newest)
        return FarmStep(job, (CompareResults(bundle, newest),))
    return _decide(job, bundle, equal_leases)


def take_comparison(job: FarmJob, event: ResultsCompared) -> FarmStep:
    """Go on once the results of a bundle have been compared."""
    if job.bundles[event.bundle].part is not None:
        step = take_part_comparison(job, event)
        if any(isinstance(getattr(each, "record", None), ResultDoubted) for each in step.commands):
            # A vote of who was doubted weighs less, and it is no voter for others any more.
            step = step.then(settle_unconfirmed(step.job))
        step = step.then(_settle_voted(step.job))
        return step.then(go_on(step.job))
    job = _with_results(job, event.bundle, job.bundles[event.bundle].results)
    step = _decide(job, event.bundle, event.agreeing)
    return step.then(go_on(step.job))


def _settle_voted(job: FarmJob) -> FarmStep:
    """Settle all bundles whose votes decide by now: a vote weighs more once its node is confirmed,
    which a bundle that is settled may do to others.
    """
    step, is_changed = FarmStep(job), True
    while is_changed:
        before = step.job
        for number, open_bundle in before.bundles.items():
            if number in step.job.bundles and open_bundle.results and open_bundle.votes:
                step = step.then(settle_bundle(step.job, number))
        is_changed = len(step.job.bundles) < len(before.bundles)
    return step


def _decide(job: FarmJob, bundle: int, agreeing: tuple[int, ...]) -> FarmStep:
    """Accept what agrees with the newest result, or ask for one result more."""
    open_bundle = job.bundles[bundle]
    *earlier, newest = open_bundle.results
    group = tuple(each for each in earlier if each.lease in agreeing)
    if group:
        return accept(job, bundle, (*group, newest))
    if len(open_bundle.results) < COPIES_MOST:
        copies = max(open_bundle.copies, len(open_bundle.results) + 1)
        open_bundle = replace(open_bundle, copies=copies)
        job = replace(job, bundles={**job.bundles, bundle: open_bundle})
        return FarmStep(job)
    return _pause_for_comparison(job, bundle)


def _pause_for_comparison(job: FarmJob, bundle: int) -> FarmStep:
    """Pause a job of which no two nodes give the same: its comparison is at fault, or its seed."""
    count = several(len(job.bundles[bundle].results), "node")
    job = put_back(_with_results(job, bundle, ()), bundle)
    reason = (
        f"no two of {count} agree on one bundle: state a comparison by tolerance, or make the "
        "work depend on the item and the seed alone"
    )
    return FarmStep(replace(job, phase=FarmPhase.PAUSED, reason=reason))


def settle_undecided(job: FarmJob) -> FarmStep:
    """Count one result of each bundle whose results differ and which nobody can decide: the user
    asked to go on. The node that others confirmed most is believed, and no other one is doubted.
    """
    step = FarmStep(job)
    for number, open_bundle in job.bundles.items():
        if open_bundle.part is not None and open_bundle.results:
            step = step.then(settle_undecided_part(step.job, number))
        elif open_bundle.results and is_undecided(step.job, number):
            best = max(open_bundle.results, key=lambda each: job.members[each.node].agreements)
            believed_job = _with_results(step.job, number, (best,))
            step = FarmStep(believed_job, step.commands).then(accept(believed_job, number, (best,)))
    return step


def settle_unconfirmed(job: FarmJob) -> FarmStep:
    """Accept results for which no other node is there any more to confirm them."""
    step = FarmStep(job)
    for number in job.bundles:
        # What was settled before may have ended others.
        open_bundle = step.job.bundles.get(number)
        if open_bundle is None or not open_bundle.results or open_bundle.holders:
            continue
        if open_bundle.part is not None or len(open_bundle.results) == 1:
            step = step.then(settle_bundle(step.job, number))
    return step


def go_on(job: FarmJob) -> FarmStep:
    """End the job where all is settled; else give out more."""
    if job.settled_items == job.request.items:
        return end_job(job, FarmPhase.FINISHED, "every item is settled")
    return lease_bundles(job)
