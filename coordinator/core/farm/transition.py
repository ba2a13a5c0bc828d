"""The machine: one farm job, advanced one event at a time. Pure, as every core is.

Items wait, are in an open bundle, or are settled. A bundle is leased to a node, and to others where
its result is compared or its end is late. A lease ends with its result, with its time, with its
node, or when another one's result counts; nothing is accepted under it afterwards. The job is
finished once every item is settled: has an accepted result, or was given up.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from coordinator.core.farm import events
from coordinator.core.farm.budget import budget_rejection
from coordinator.core.farm.bundle_leases import (
    FarmStep,
    end_job,
    result_bytes_most,
    take_all,
    take_queued,
    void_leases,
    with_farm_member,
)
from coordinator.core.farm.checks import is_anybody_confirmed
from coordinator.core.farm.failures import end_due_leases, take_back
from coordinator.core.farm.leasing import lease_bundles
from coordinator.core.farm.results import (
    go_on,
    settle_unconfirmed,
    settle_undecided,
    take_comparison,
    take_result,
)
from coordinator.core.farm.state import ENDED, CheckRule, FarmJob, FarmMember, FarmPhase
from coordinator.core.work import work_events
from coordinator.core.work.funding import Funding
from coordinator.core.work.leases import lease_rejection
from coordinator.core.work.members import (
    membership_rejection,
    next_slot,
    present_again,
    release_if_leaving,
    with_leaving,
    with_member,
    without_presence,
)
from hypergpu.farm.bundles import BundleResult

_LIVE = frozenset(FarmPhase) - ENDED
_WORKING = frozenset({FarmPhase.WORKING})
_ANY = frozenset(FarmPhase)
LEGAL: Mapping[type, frozenset[FarmPhase]] = {
    events.MapCreated: frozenset(),
    events.BundleReturned: _WORKING,
    events.BundleHandedBack: _WORKING,
    events.BundlesDue: _WORKING,
    events.ResultsCompared: _LIVE,
    events.BundleAccepted: _ANY,
    events.PartConfirmed: _ANY,
    events.ItemDropped: _ANY,
    events.ResultDoubted: _ANY,
    events.BudgetRaised: _LIVE,
    work_events.NodeJoined: _LIVE,
    work_events.NodeLost: _LIVE,
    work_events.NodeDraining: _LIVE,
    work_events.NodePaused: _LIVE,
    work_events.NodeReadmitted: _LIVE,
    work_events.JobPaused: _WORKING,
    work_events.JobResumed: frozenset({FarmPhase.PAUSED}),
    work_events.JobStopped: _LIVE,
    work_events.FundingChanged: _LIVE,
    work_events.CoordinatorChanged: _LIVE,
    work_events.JobEnded: _ANY,
}


def rejection(job: FarmJob, event: events.FarmEvent) -> str:
    """Why the job does not accept the event now; empty when it does."""
    if job.phase not in LEGAL[type(event)]:
        return f"{job.job_id} is {job.phase.value} and has no place for {type(event).__name__}"
    if isinstance(event, work_events.MembershipEvent):
        return membership_rejection(job, event)
    match event:
        case events.BundleReturned():
            return _lease_rejection(job, event) or _result_rejection(job, event)
        case events.BundleHandedBack():
            return _lease_rejection(job, event)
        case events.ResultsCompared():
            return _comparison_rejection(job, event)
        case events.BudgetRaised():
            return budget_rejection(job, event)
        case events.BundlesDue():
            is_due = any(
                leased_bundle.due_at_ms <= event.at_ms for leased_bundle in job.leases.values()
            )
            return "" if is_due else "no lease is due"
        case _:
            return ""


def _lease_rejection(job: FarmJob, event: events.BundleReturned | events.BundleHandedBack) -> str:
    """The fence: only leases that the node has now."""
    leases = job.leases_of(event.node)
    if not leases:
        return f"{event.node} has no bundle of {job.job_id}"
    leased_bundle = job.lease_numbered(event.node, event.lease) or leases[0]
    if reason := lease_rejection(leased_bundle, event.lease):
        return reason
    if event.bundle != leased_bundle.bundle:
        return f"lease {event.lease} is of bundle {leased_bundle.bundle}, not {event.bundle}"
    return ""


def _result_rejection(job: FarmJob, event: events.BundleReturned) -> str:
    """Why a result cannot be that of the bundle, whatever its values are."""
    leased_bundle = job.lease_numbered(event.node, event.lease)
    if leased_bundle is None:
        return _lease_rejection(job, event)
    result, items = event.result, job.leased_run(leased_bundle).items
    if min(result.items, result.failures, result.units) < 0:
        return "a result has no negative counts"
    if result.items + result.failures != items:
        return f"the bundle has {items} items, the result {result.items} and {result.failures}"
    most_bytes = result_bytes_most(job, items)
    if not 0 < result.blob.size_bytes <= most_bytes:
        return f"the result has {result.blob.size_bytes} bytes, 1 to {most_bytes} are allowed"
    return _units_rejection(job, result)


def _units_rejection(job: FarmJob, result: BundleResult) -> str:
    request = job.request
    if request.unit.is_count_of_items:
        is_right = result.units == result.items
        return "" if is_right else f"{result.items} items are so many units, not {result.units}"
    least, most = min(1, result.items), result.items * request.units_per_item_most
    if not least <= result.units <= most:
        return f"{result.units} {request.unit.value}: {least} to {most} are possible"
    return ""


def _comparison_rejection(job: FarmJob, event: events.ResultsCompared) -> str:
    open_bundle = job.bundles.get(event.bundle)
    if open_bundle is None or not open_bundle.comparing or open_bundle.comparing != event.lease:
        return f"the result under lease {event.lease} is not being compared"
    return ""


def transition(job: FarmJob | None, event: events.FarmEvent) -> FarmStep:
    """Advance the job by one event."""
    if job is None:
        if not isinstance(event, events.MapCreated):
            raise ValueError(f"a journal begins with MapCreated, not {type(event).__name__}")
        return FarmStep(_new_job(event))
    if rejection(job, event):
        return FarmStep(job)
    now = replace(job, at_ms=max(job.at_ms, event.at_ms))
    advance = _STEPS.get(type(event))
    return advance(now, event) if advance else FarmStep(now)


def _new_job(event: events.MapCreated) -> FarmJob:
    return FarmJob(
        job_id=event.job_id,
        owner=event.owner,
        reason="waits for nodes",
        at_ms=event.at_ms,
        request=event.request,
        bundle_items_most=event.bundle_items_most,
        draw_seed=event.draw_seed,
        check_rule=event.check_rule,
        terms=event.terms,
        funding=event.funding,
        spec=event.spec,
    )


def _add_node(job: FarmJob, event: work_events.NodeJoined) -> FarmStep:
    member = job.members.get(event.node)
    if member is None:
        is_late = job.check_rule is CheckRule.PARTS and is_anybody_confirmed(job)
        member = FarmMember(slot=next_slot(job), is_late=is_late)
    member = replace(
        present_again(member, event),
        refusal="",
        failures_in_a_row=0,
        queues_work=event.queues_work,
    )
    return lease_bundles(with_member(job, event.node, member))


def _lose_node(job: FarmJob, event: work_events.NodeLost | work_events.NodePaused) -> FarmStep:
    return _settle_and_go_on(take_all(without_presence(job, event.node), event.node, event.reason))


def _settle_and_go_on(step: FarmStep) -> FarmStep:
    """Go on after a node is not there any more for others to compare with."""
    settled_step = step.then(settle_unconfirmed(step.job))
    return settled_step.then(go_on(settled_step.job))


def _drain_node(job: FarmJob, event: work_events.NodeDraining) -> FarmStep:
    job = with_leaving(job, event.node)
    if event.node in job.leases:
        return _settle_and_go_on(take_queued(job, event.node, event.reason))
    return _settle_and_go_on(FarmStep(*release_if_leaving(job, event.node)))


def _readmit_node(job: FarmJob, event: work_events.NodeReadmitted) -> FarmStep:
    job = with_farm_member(job, event.node, ban="", wrongs=0)
    return (
        _settle_and_go_on(FarmStep(job))
        if job.check_rule is CheckRule.PARTS
        else lease_bundles(job)
    )


def _pause_job(job: FarmJob, event: work_events.JobPaused) -> FarmStep:
    step = void_leases(job, "the job was paused")
    reason = event.reason or "paused by its user"
    return FarmStep(replace(step.job, phase=FarmPhase.PAUSED, reason=reason), step.commands)


def _resume_job(job: FarmJob, _: work_events.JobResumed) -> FarmStep:
    for node, member in job.members.items():
        if member.refusal or member.failures_in_a_row:
            job = with_farm_member(job, node, refusal="", failures_in_a_row=0)
    reason = "resumed by its user"
    job = replace(_going_on(job, reason), refusals=())
    step = settle_undecided(job)
    return step.then(go_on(step.job))


def _stop_job(job: FarmJob, _: work_events.JobStopped) -> FarmStep:
    return end_job(job, FarmPhase.STOPPED, "stopped by its user")


def _fund_job(job: FarmJob, event: work_events.FundingChanged) -> FarmStep:
    return lease_bundles(replace(job, funding=Funding(event.funded_units, event.reason)))


def _going_on(job: FarmJob, reason: str) -> FarmJob:
    return replace(job, phase=FarmPhase.WORKING, reason=reason, is_paused_for_budget=False)


def _raise_budget(job: FarmJob, event: events.BudgetRaised) -> FarmStep:
    """Go on with more money, also where the job paused because it was spent."""
    job = replace(job, request=replace(job.request, budget=event.budget))
    if event.spec is not None:
        job = replace(job, spec=event.spec)
    if job.is_paused_for_budget:
        job = _going_on(job, "its budget was raised")
    return lease_bundles(job)


_STEPS: Mapping[type, Callable[..., FarmStep]] = {
    work_events.NodeJoined: _add_node,
    work_events.NodeLost: _lose_node,
    work_events.NodePaused: _lose_node,
    work_events.NodeDraining: _drain_node,
    work_events.NodeReadmitted: _readmit_node,
    work_events.FundingChanged: _fund_job,
    events.BundleReturned: take_result,
    events.BundleHandedBack: take_back,
    events.BundlesDue: end_due_leases,
    events.ResultsCompared: take_comparison,
    events.BudgetRaised: _raise_budget,
    work_events.JobPaused: _pause_job,
    work_events.JobResumed: _resume_job,
    work_events.JobStopped: _stop_job,
}
