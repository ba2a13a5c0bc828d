"""A bundle counts: its row is written, those who gave it are confirmed, and others are doubted."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.farm.bundle_leases import (
    FarmStep,
    cancel_leases,
    put_back,
    take_all,
    with_farm_member,
    without_bundle,
)
from coordinator.core.farm.checks import WRONGS_MOST
from coordinator.core.farm.events import (
    BundleAccepted,
    Confirmation,
    PartConfirmed,
    ResultDoubted,
)
from coordinator.core.farm.part_checks import FORGIVING_AGREEMENTS, late_cost
from coordinator.core.farm.pay import accepted_works
from coordinator.core.farm.state import CheckRule, FarmJob, ReturnedResult
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.units import several


class _Settlement(NamedTuple):
    """A bundle that counts."""

    bundle: int
    group: tuple[ReturnedResult, ...]
    """The accepted result, and those that agree with it."""


def accept(job: FarmJob, bundle: int, group: tuple[ReturnedResult, ...]) -> FarmStep:
    """Count a bundle's result, which is the first of a group that agrees."""
    freed_step = cancel_leases(job, bundle, "another node has done it, and its result counts")
    settlement = _Settlement(bundle, group)
    record = WriteRecord(_accepted_record(freed_step.job, settlement))
    step = FarmStep(freed_step.job, (*freed_step.commands, record))
    step = step.then(_outvote(step.job, settlement))
    job = _with_counts(_with_agreements(step.job, settlement), settlement)
    return FarmStep(without_bundle(job, bundle), step.commands)


def reject(job: FarmJob, bundle: int, group: tuple[ReturnedResult, ...]) -> FarmStep:
    """Give a bundle's items out again, as a group of votes on a part of it outvoted its result."""
    step = cancel_leases(job, bundle, "the part was decided on without it")
    job, open_bundle = step.job, step.job.bundles[bundle]
    units = sum(each.result.units for each in group)
    part = open_bundle.part or open_bundle.run
    record = PartConfirmed(
        at_ms=job.at_ms,
        bundle=bundle,
        start=part.start,
        items=part.items,
        units=units,
        confirmations=_confirmations(group),
        works=accepted_works(group),
    )
    settlement = _Settlement(bundle, group)
    step = FarmStep(job, (*step.commands, WriteRecord(record)))
    step = step.then(_outvote(step.job, settlement))
    job = _with_agreements(step.job, settlement)
    job = replace(job, paid_units=job.paid_units + units)
    if bundle in job.bundles:  # Who was banned has lost it already.
        job = replace(without_bundle(job, bundle), waiting=(open_bundle.run, *job.waiting))
    return FarmStep(job, step.commands)


def _confirmations(group: Sequence[ReturnedResult]) -> tuple[Confirmation, ...]:
    return tuple(Confirmation(each.node, each.lease, each.result.units) for each in group)


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
        confirmations=_confirmations(others),
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
        member = job.members[each.node]
        agreements, wrongs = member.agreements + 1, member.wrongs
        if job.check_rule is CheckRule.PARTS and agreements >= FORGIVING_AGREEMENTS:
            wrongs = 0
        job = with_farm_member(job, each.node, agreements=agreements, wrongs=wrongs)
    return job


def _outvote(job: FarmJob, settlement: _Settlement) -> FarmStep:
    """Take note of results that none of the group agrees with."""
    leases = {each.lease for each in settlement.group}
    step = FarmStep(job)
    open_bundle = job.bundles[settlement.bundle]
    for result in (*open_bundle.results, *(vote.result for vote in open_bundle.votes)):
        if result.lease not in leases and not step.job.members[result.node].ban:
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
    cost_items = late_cost(job, bundle, node)
    job = with_farm_member(job, node, wrongs=wrongs, agreements=0, ban=ban)
    job = replace(job, late_cost_items=job.late_cost_items + cost_items)
    record = ResultDoubted(
        at_ms=job.at_ms, node=node, bundle=bundle, lease=result.lease, reason=reason
    )
    if job.check_rule is CheckRule.PARTS:
        # Its next bundle is small.
        step = FarmStep(job, (WriteRecord(record),)).then(take_all(job, node, reason))
    else:
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
    """Take the bundle of a banned node back, and drop its results that nobody confirmed. Its votes
    stay, and weigh nothing.
    """
    step = take_all(job, node, job.members[node].ban)
    is_by_parts = job.check_rule is CheckRule.PARTS
    for number, open_bundle in tuple(step.job.bundles.items()):
        left_results = tuple(each for each in open_bundle.results if each.node != node)
        if left_results == open_bundle.results or (open_bundle.comparing and not is_by_parts):
            continue
        if is_by_parts:
            freed_step = cancel_leases(step.job, number, "the checked result does not count")
            step = FarmStep(freed_step.job, (*step.commands, *freed_step.commands))
        bundle = replace(step.job.bundles[number], results=left_results, votes=(), comparing=0)
        job = replace(step.job, bundles={**step.job.bundles, number: bundle})
        step = FarmStep(put_back(job, number), step.commands)
    return step
