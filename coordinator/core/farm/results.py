"""What becomes of a result: accepted at once, held until another one agrees, or outvoted.

A result of a bundle that is not checked counts when it comes. Of one that is checked the first two
that agree count: the earlier one is the bundle's, the other confirms it, and both are paid. Whoever
gave another result is outvoted: it is not paid, and all that the node has at that time is checked.
"""

from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from coordinator.core.farm.budget import affordable_items
from coordinator.core.farm.checks import (
    COPIES_MOST,
    WRONGS_MOST,
    agreeing_leases,
    has_confirmer,
    is_undecided,
)
from coordinator.core.farm.events import (
    BundleAccepted,
    BundleReturned,
    Confirmation,
    ResultDoubted,
    ResultsCompared,
)
from coordinator.core.farm.leasing import (
    FarmStep,
    cancel,
    end_job,
    end_lease,
    lease_bundles,
    put_back,
    with_farm_member,
    without_bundle,
)
from coordinator.core.farm.pay import accepted_works
from coordinator.core.farm.state import BundlePace, FarmJob, FarmPhase, ReturnedResult
from coordinator.core.work.leases import elapsed_ms
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.units import several


class CompareResults(msgspec.Struct, frozen=True):
    """Compare the newest result of a bundle with the earlier ones: `ResultsCompared` answers."""

    bundle: int
    lease: int
    """Lease of the newest result."""


def take_result(job: FarmJob, event: BundleReturned) -> FarmStep:
    """Take a result in, and give its node the next bundle."""
    job = _with_pace(job, event)
    leased_bundle = job.leases[event.node]
    member = job.members[event.node]
    result = ReturnedResult(
        node=event.node,
        lease=event.lease,
        token=member.token,
        address=member.address,
        result=event.result,
        claim=event.claim,
    )
    freed_step = end_lease(job, event.node)
    open_bundle = freed_step.job.bundles[leased_bundle.bundle]
    job = _with_results(freed_step.job, leased_bundle.bundle, (*open_bundle.results, result))
    step = FarmStep(job, freed_step.commands).then(settle_bundle(job, leased_bundle.bundle))
    return step.then(_go_on_with(step.job, event.node))


def _go_on_with(job: FarmJob, node: NodeId) -> FarmStep:
    """Go on after a result. While untouched items are left for whoever can work, nobody else is
    free, and no other member is looked at.
    """
    if job.untouched_items and affordable_items(job) is None:
        return lease_bundles(job, (node,))
    return go_on(job)


def _with_pace(job: FarmJob, event: BundleReturned) -> FarmJob:
    leased_bundle, member = job.leases[event.node], job.members[event.node]
    took_ms = elapsed_ms(leased_bundle, job.at_ms)
    items = job.bundles[leased_bundle.bundle].run.items
    return with_farm_member(
        job,
        event.node,
        standing=member.standing.after_work(took_ms, items),
        pace=BundlePace(took_ms, items),
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
    if open_bundle.copies == 1 or (
        len(open_bundle.results) == 1 and not has_confirmer(job, bundle)
    ):
        return _accept(job, bundle, open_bundle.results[:1])
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
    job = _with_results(job, event.bundle, job.bundles[event.bundle].results)
    step = _decide(job, event.bundle, event.agreeing)
    return step.then(go_on(step.job))


def _decide(job: FarmJob, bundle: int, agreeing: tuple[int, ...]) -> FarmStep:
    """Accept what agrees with the newest result, or ask for one result more."""
    open_bundle = job.bundles[bundle]
    *earlier, newest = open_bundle.results
    group = tuple(each for each in earlier if each.lease in agreeing)
    if group:
        return _accept(job, bundle, (*group, newest))
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


class _Settlement(NamedTuple):
    """A bundle that counts."""

    bundle: int
    group: tuple[ReturnedResult, ...]
    """The accepted result, and those that agree with it."""


def _accept(job: FarmJob, bundle: int, group: tuple[ReturnedResult, ...]) -> FarmStep:
    open_bundle = job.bundles[bundle]
    cancels = tuple(
        cancel(job, node, "another node has done it, and its result counts")
        for node in open_bundle.holders
    )
    freed_step = FarmStep(job, cancels)
    for node in open_bundle.holders:
        freed_step = freed_step.then(end_lease(freed_step.job, node))
    settlement = _Settlement(bundle, group)
    record = WriteRecord(_accepted_record(freed_step.job, settlement))
    step = FarmStep(freed_step.job, (*freed_step.commands, record))
    step = step.then(_outvote(step.job, settlement))
    job = _with_counts(_with_agreements(step.job, settlement), settlement)
    return FarmStep(without_bundle(job, bundle), step.commands)


def _accepted_record(job: FarmJob, settlement: _Settlement) -> BundleAccepted:
    first, *others = settlement.group
    run = job.bundles[settlement.bundle].run
    return BundleAccepted(
        at_ms=job.at_ms,
        node=first.node,
        bundle=settlement.bundle,
        lease=first.lease,
        start=run.start,
        items=run.items,
        failures=first.result.failures,
        units=first.result.units,
        blob=first.result.blob,
        tries=run.tries,
        confirmations=tuple(
            Confirmation(each.node, each.lease, each.result.units) for each in others
        ),
        works=accepted_works(settlement.group),
    )


def _with_counts(job: FarmJob, settlement: _Settlement) -> FarmJob:
    first, run = settlement.group[0], job.bundles[settlement.bundle].run
    return replace(
        job,
        settled_items=job.settled_items + run.items,
        failed_items=job.failed_items + first.result.failures,
        units=job.units + first.result.units,
        paid_units=job.paid_units + sum(each.result.units for each in settlement.group),
        reason="bundles are out",
    )


def _with_agreements(job: FarmJob, settlement: _Settlement) -> FarmJob:
    """Each node of a group has one more result that another one confirmed."""
    if len(settlement.group) == 1:
        return job
    for each in settlement.group:
        agreements = job.members[each.node].agreements + 1
        job = with_farm_member(job, each.node, agreements=agreements)
    return job


def _outvote(job: FarmJob, settlement: _Settlement) -> FarmStep:
    """Take note of results that none of the group agrees with."""
    leases = {each.lease for each in settlement.group}
    step = FarmStep(job)
    for result in job.bundles[settlement.bundle].results:
        if result.lease not in leases:
            step = step.then(_doubt(step.job, settlement, result))
    return step


def _doubt(job: FarmJob, settlement: _Settlement, result: ReturnedResult) -> FarmStep:
    node, bundle = result.node, settlement.bundle
    member = job.members[node]
    wrongs = member.wrongs + 1
    count = several(len(settlement.group), "other node")
    reason = f"{count} agree on another result of the same items"
    # A name that nobody has confirmed costs nothing to make: it gets no second try.
    wrongs_most = WRONGS_MOST if member.agreements else 1
    verb = "was" if wrongs == 1 else "were"
    ban = f"{several(wrongs, 'result')} of it {verb} outvoted" if wrongs >= wrongs_most else ""
    job = with_farm_member(job, node, wrongs=wrongs, agreements=0, ban=ban)
    record = ResultDoubted(
        at_ms=job.at_ms, node=node, bundle=bundle, lease=result.lease, reason=reason
    )
    step = FarmStep(_with_checks(job, node), (WriteRecord(record),))
    return step.then(_void_banned(step.job, node)) if ban else step


def _with_checks(job: FarmJob, node: NodeId) -> FarmJob:
    """The job in which all that a doubted node has now is checked."""
    bundles = {
        number: replace(open_bundle, copies=max(2, open_bundle.copies))
        if node in open_bundle.holders
        else open_bundle
        for number, open_bundle in job.bundles.items()
    }
    return replace(job, bundles=bundles)


def _void_banned(job: FarmJob, node: NodeId) -> FarmStep:
    """Take the bundle of a banned node back, and drop its results that nobody confirmed."""
    commands: tuple[Any, ...] = ()
    if node in job.leases:
        bundle = job.leases[node].bundle
        freed_step = end_lease(job, node)
        commands = (cancel(job, node, job.members[node].ban), *freed_step.commands)
        job = put_back(freed_step.job, bundle)
    for number, open_bundle in tuple(job.bundles.items()):
        left_results = tuple(each for each in open_bundle.results if each.node != node)
        if left_results != open_bundle.results and not open_bundle.comparing:
            job = put_back(_with_results(job, number, left_results), number)
    return FarmStep(job, commands)


def settle_undecided(job: FarmJob) -> FarmStep:
    """Count one result of each bundle whose results differ and which nobody can decide: the user
    asked to go on. The node that others confirmed most is believed, and no other one is doubted.
    """
    step = FarmStep(job)
    for number, open_bundle in job.bundles.items():
        if open_bundle.results and is_undecided(step.job, number):
            best = max(open_bundle.results, key=lambda each: job.members[each.node].agreements)
            believed_job = _with_results(step.job, number, (best,))
            step = FarmStep(believed_job, step.commands).then(
                _accept(believed_job, number, (best,))
            )
    return step


def settle_unconfirmed(job: FarmJob) -> FarmStep:
    """Accept single results for which no other node is there any more to confirm them."""
    step = FarmStep(job)
    for number, open_bundle in job.bundles.items():
        if len(open_bundle.results) == 1 and not open_bundle.holders and number in step.job.bundles:
            step = step.then(settle_bundle(step.job, number))
    return step


def go_on(job: FarmJob) -> FarmStep:
    """End the job where all is settled; else give out more."""
    if job.settled_items == job.request.items:
        return end_job(job, FarmPhase.FINISHED, "every item is settled")
    return lease_bundles(job)
