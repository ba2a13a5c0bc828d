"""The machine: one job of items, advanced one event at a time. Pure, as every core is.

An item is waiting, leased to one node, or returned. A lease ends when its item comes back, when its
time is over, or with its node; the item then goes out again under a fresh lease, and nothing is
accepted under the old one. The job is finished once every item is back.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from coordinator.core.work import work_events
from coordinator.core.work.leases import elapsed_ms, lease_rejection
from coordinator.core.work.members import (
    JobMember,
    membership_rejection,
    next_slot,
    present_again,
    release_if_leaving,
    with_leaving,
    with_member,
    without_presence,
)
from hypergpu.ids import NodeId
from tests.kinds.echo.core import events
from tests.kinds.echo.core.leasing import (
    EchoStep,
    cancel,
    end_job,
    lease_items,
    refusal_of,
    void_leases,
    without_lease,
)
from tests.kinds.echo.core.state import ENDED, EchoJob, EchoPhase, ReturnedItem

_LIVE = frozenset(EchoPhase) - ENDED
_WORKING = frozenset({EchoPhase.WORKING})
LEGAL: Mapping[type, frozenset[EchoPhase]] = {
    events.EchoCreated: frozenset(),
    events.ItemReturned: _WORKING,
    events.ItemHandedBack: _WORKING,
    events.LeasesDue: _WORKING,
    work_events.NodeJoined: _LIVE,
    work_events.NodeLost: _LIVE,
    work_events.NodeDraining: _LIVE,
    work_events.NodePaused: _LIVE,
    work_events.NodeReadmitted: _LIVE,
    work_events.JobPaused: _WORKING,
    work_events.JobResumed: frozenset({EchoPhase.PAUSED}),
    work_events.JobStopped: _LIVE,
    work_events.FundingChanged: _LIVE,
    work_events.CoordinatorChanged: _LIVE,
    work_events.JobEnded: frozenset(EchoPhase),
}


def rejection(job: EchoJob, event: events.EchoEvent) -> str:
    """Why the job does not accept the event now; empty when it does."""
    if job.phase not in LEGAL[type(event)]:
        return f"{job.job_id} is {job.phase.value} and has no place for {type(event).__name__}"
    if isinstance(event, work_events.MembershipEvent):
        return membership_rejection(job, event)
    if isinstance(event, events.ItemReturned | events.ItemHandedBack):
        return _item_rejection(job, event)
    if isinstance(event, events.LeasesDue):
        is_due = any(item.due_at_ms <= event.at_ms for item in job.leases.values())
        return "" if is_due else "no lease is due"
    return ""


def _item_rejection(job: EchoJob, event: events.ItemReturned | events.ItemHandedBack) -> str:
    """The fence: only the lease that the node has now."""
    item = job.leases.get(event.node)
    if item is None:
        return f"{event.node} has no item of {job.job_id}"
    if reason := lease_rejection(item, event.lease):
        return reason
    if event.number != item.number:
        return f"lease {event.lease} is of item {item.number}, not {event.number}"
    if isinstance(event, events.ItemReturned) and event.text != job.items[event.number]:
        return f"item {event.number} came back as another"
    return ""


def transition(job: EchoJob | None, event: events.EchoEvent) -> EchoStep:
    """Advance the job by one event."""
    if job is None:
        if not isinstance(event, events.EchoCreated):
            raise ValueError(f"a journal begins with EchoCreated, not {type(event).__name__}")
        return EchoStep(_new_job(event))
    if rejection(job, event):
        return EchoStep(job)
    now = replace(job, at_ms=max(job.at_ms, event.at_ms))
    advance = _STEPS.get(type(event))
    return advance(now, event) if advance else EchoStep(now)


def _new_job(event: events.EchoCreated) -> EchoJob:
    return EchoJob(
        job_id=event.job_id,
        owner=event.owner,
        reason="waits for nodes",
        at_ms=event.at_ms,
        items=event.items,
        limit_ms=event.limit_ms,
        keep_ms=event.keep_ms,
        waiting=tuple(range(len(event.items))),
    )


def _add_node(job: EchoJob, event: work_events.NodeJoined) -> EchoStep:
    member = job.members.get(event.node) or JobMember(slot=next_slot(job))
    job = with_member(job, event.node, present_again(member, event))
    return lease_items(replace(job, reason="items are out"))


def _lose_node(job: EchoJob, event: work_events.NodeLost | work_events.NodePaused) -> EchoStep:
    cancels = (cancel(job, event.node, event.reason),) if event.node in job.leases else ()
    job = without_presence(without_lease(job, event.node), event.node)
    step = lease_items(job)
    return EchoStep(step.job, (*cancels, *step.commands))


def _drain_node(job: EchoJob, event: work_events.NodeDraining) -> EchoStep:
    job = with_leaving(job, event.node)
    return EchoStep(job) if event.node in job.leases else _release_if_leaving(job, event.node)


def _release_if_leaving(job: EchoJob, node: NodeId) -> EchoStep:
    return EchoStep(*release_if_leaving(job, node))


def _readmit_node(job: EchoJob, event: work_events.NodeReadmitted) -> EchoStep:
    return lease_items(with_member(job, event.node, replace(job.members[event.node], ban="")))


def _take_item(job: EchoJob, event: events.ItemReturned) -> EchoStep:
    item, member = job.leases[event.node], job.members[event.node]
    standing = member.standing.after_work(elapsed_ms(item, job.at_ms), 1)
    job = with_member(job, event.node, replace(member, standing=standing))
    leases = {who: each for who, each in job.leases.items() if who != event.node}
    returned_items = {**job.returned, event.number: ReturnedItem(event.node, event.lease)}
    job = replace(job, leases=leases, returned=returned_items)
    if len(job.returned) == len(job.items):
        return end_job(job, EchoPhase.FINISHED, "every item is back")
    return _go_on(_release_if_leaving(job, event.node))


def _take_back_item(job: EchoJob, event: events.ItemHandedBack) -> EchoStep:
    refusal = event.node, refusal_of(job.leases[event.node], event.reason)
    job = replace(without_lease(job, event.node), refusals=(*job.refusals, refusal))
    return _go_on(_release_if_leaving(job, event.node))


def _end_due_leases(job: EchoJob, _: events.LeasesDue) -> EchoStep:
    late = [node for node, item in job.leases.items() if item.due_at_ms <= job.at_ms]
    commands = tuple(cancel(job, node, "its time is over") for node in late)
    for node in late:
        member = job.members[node]
        member = replace(member, standing=member.standing.after_miss())
        job = with_member(without_lease(job, node), node, member)
    return _go_on(EchoStep(job, commands))


def _pause_job(job: EchoJob, event: work_events.JobPaused) -> EchoStep:
    step = void_leases(job, "the job was paused")
    reason = event.reason or "paused by its user"
    return EchoStep(replace(step.job, phase=EchoPhase.PAUSED, reason=reason), step.commands)


def _resume_job(job: EchoJob, _: work_events.JobResumed) -> EchoStep:
    reason = "resumed by its user"
    return lease_items(replace(job, phase=EchoPhase.WORKING, reason=reason, refusals=()))


def _stop_job(job: EchoJob, _: work_events.JobStopped) -> EchoStep:
    return end_job(job, EchoPhase.STOPPED, "stopped by its user")


def _go_on(step: EchoStep) -> EchoStep:
    lease_step = lease_items(step.job)
    return EchoStep(lease_step.job, (*step.commands, *lease_step.commands))


_STEPS: Mapping[type, Callable[..., EchoStep]] = {
    work_events.NodeJoined: _add_node,
    work_events.NodeLost: _lose_node,
    work_events.NodePaused: _lose_node,
    work_events.NodeDraining: _drain_node,
    work_events.NodeReadmitted: _readmit_node,
    events.ItemReturned: _take_item,
    events.ItemHandedBack: _take_back_item,
    events.LeasesDue: _end_due_leases,
    work_events.JobPaused: _pause_job,
    work_events.JobResumed: _resume_job,
    work_events.JobStopped: _stop_job,
}
