"""The work: taken up, fetched for, sent, handed back or dropped."""

from functools import partial

from msgspec.structs import replace

from gpu_node.core import commands, events
from gpu_node.core.backoff import backoff_ms
from gpu_node.core.memory import plan_work, with_accepted, without_jobs
from gpu_node.core.next_work import (
    begin_fetching,
    drop_next,
    go_on_with_next,
    next_lease,
    retry_fetching_later,
)
from gpu_node.core.session_state import (
    RESTARTS_MAX,
    Contributing,
    Executing,
    Fetching,
    Idle,
    NodeSession,
    SessionStep,
    Training,
    Transferring,
    Uploading,
    WorkerState,
)
from hypergpu.assignment import (
    AnyAssignment,
    Assignment,
    FailureCause,
    Lease,
    PackedAssignment,
    is_same_work,
)
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds


def take_assignment(
    session: NodeSession, event: events.ShardAssigned | events.WorkAssigned
) -> SessionStep:
    """Take work up, queue it behind another job's, or hand it back at once.

    A repeated assignment is ignored. Another one of the job at hand makes the old lease void,
    unless it is to come after it.
    """
    assignment: AnyAssignment = event.assignment
    current = session.current
    if current is None or current.lease.job_id != assignment.lease.job_id:
        return _begin_or_queue(session, assignment)
    if current.lease == assignment.lease and is_same_work(current, assignment):
        return SessionStep(session)
    if isinstance(assignment, PackedAssignment):
        if assignment.lease == next_lease(session):
            if assignment.after_lease:
                return SessionStep(session)
            # The lease before is over, and the word of it was lost.
            return drop_work(session).then(go_on_with_next)
        if assignment.after_lease:
            return _take_next(session, assignment)
        before = session.declined.get(assignment.lease.job_id)
        if before is not None and before.lease == assignment.lease:
            # The hand-back was lost, and what comes after it is under way.
            return decline(session, before.lease, before.reason, before.cause)
    step = drop_work(session).then(drop_next)
    return step.then(lambda free: _begin_or_queue(free, assignment))


def _take_next(session: NodeSession, assignment: PackedAssignment) -> SessionStep:
    """Take up work that comes after other work of the job."""
    if (refusal := _refusal(session, assignment.lease)) is not None:
        return decline(session, assignment.lease, *refusal)
    step, after = SessionStep(session), next_lease(session)
    if after is not None and after.number == assignment.after_lease:
        # It overtook the word that the work at hand is over.
        step = drop_work(session).then(go_on_with_next)
    current = step.session.current
    if current is None or current.lease.number != assignment.after_lease:
        step = step.then(drop_work).then(drop_next)
        return step.then(lambda free: _begin_or_queue(free, assignment))
    return step.then(lambda free: begin_fetching(free, assignment))


def _refusal(session: NodeSession, lease: Lease) -> tuple[str, FailureCause] | None:
    """Why work under a lease is handed back at once; None: it is not."""
    if reason := session.drain or session.unhealthy:
        return reason, FailureCause.OTHER
    if session.withheld:
        return session.withheld, FailureCause.OWNER
    before = session.declined.get(lease.job_id)
    if before is not None and before.lease == lease:
        return before.reason, before.cause
    return None


def _begin_or_queue(session: NodeSession, assignment: AnyAssignment) -> SessionStep:
    lease = assignment.lease
    if (refusal := _refusal(session, lease)) is not None:
        return decline(session, lease, *refusal)
    if isinstance(session.work, Idle):
        return _begin(session, assignment)
    others = tuple(each for each in session.queue if not _is_replaced(each, assignment))
    return SessionStep(replace(session, queue=(*others, assignment)))


def _is_replaced(queued: AnyAssignment, newer: AnyAssignment) -> bool:
    """Whether newer work takes the place of work in the queue, of the same job."""
    if queued.lease.job_id != newer.lease.job_id:
        return False
    after_lease = newer.after_lease if isinstance(newer, PackedAssignment) else 0
    return queued.lease.number != after_lease


def _queue_without(session: NodeSession, job_id: JobId) -> tuple[AnyAssignment, ...]:
    return tuple(assignment for assignment in session.queue if assignment.lease.job_id != job_id)


def _begin(session: NodeSession, assignment: AnyAssignment) -> SessionStep:
    lease = assignment.lease
    follower = next((each for each in session.queue if _follows(each, lease)), None)
    session = replace(
        session,
        queue=tuple(each for each in session.queue if each.lease.job_id != lease.job_id),
        worker=_worker_for(session, lease),
        releasing=session.releasing - {lease.job_id},
    )
    if isinstance(assignment, PackedAssignment):
        session = replace(session, work=Fetching(assignment))
    else:
        session = _with_training(session, assignment)
    step = delete_released(session)
    if session.is_connected:
        step = step.then(resume_transfer)
    if isinstance(follower, PackedAssignment):
        return step.then(partial(begin_fetching, assignment=follower))
    return step


def _follows(queued: AnyAssignment, lease: Lease) -> bool:
    """Whether work in the queue comes after that under a lease."""
    return (
        isinstance(queued, PackedAssignment)
        and queued.lease.job_id == lease.job_id
        and queued.after_lease == lease.number
    )


def _with_training(session: NodeSession, assignment: Assignment) -> NodeSession:
    """The session at a training that may be done already, without jobs too many."""
    plan = plan_work(session.memory, assignment)
    stale = plan.memory.stale()
    work: Fetching | Uploading = Fetching(assignment, plan.start)
    if plan.finished is not None:
        work = Uploading(assignment, plan.finished.update)
    return replace(
        session,
        memory=without_jobs(plan.memory, stale),
        work=work,
        releasing=session.releasing | stale,
    )


def _worker_for(session: NodeSession, lease: Lease) -> WorkerState:
    """A round that was handed back and is assigned again gets one try, not all the restarts."""
    worker, before = session.worker.for_other_work(), session.declined.get(lease.job_id)
    if before is not None and before.lease.round == lease.round:
        return replace(worker, deaths=RESTARTS_MAX)
    return worker


def begin_next(session: NodeSession) -> SessionStep:
    """Take up the next work, of the same job or else of the queue, if the node is free."""
    if not isinstance(session.work, Idle):
        return SessionStep(session)
    if not isinstance(session.next_work, Idle):
        return go_on_with_next(session)
    if session.queue:
        return _begin(session, session.queue[0])
    return SessionStep(session)


def decline(
    session: NodeSession, lease: Lease, reason: str, cause: FailureCause = FailureCause.OTHER
) -> SessionStep:
    """Hand a lease back. It is not taken up again should the coordinator repeat it."""
    hand_back = commands.HandBack(lease, reason, cause)
    session = replace(session, declined={**session.declined, lease.job_id: hand_back})
    if session.is_connected:
        return SessionStep(session, (hand_back,))
    return SessionStep(replace(session, owed=(*session.owed, hand_back)))


def drop_work(session: NodeSession) -> SessionStep:
    """Stop the current work without a word to the coordinator."""
    worker, after = session.worker, next_lease(session)
    if after is None or worker.busy != after:
        worker = worker.for_other_work()
    free = replace(session, work=Idle(), worker=worker)
    match session.work:
        case Fetching() | Uploading() | Contributing() as work:
            return SessionStep(free, (commands.StopTransfer(work.assignment.lease),))
        case Training() | Executing() as work if session.worker.busy == work.assignment.lease:
            return SessionStep(free, (commands.AbortTraining(work.assignment.lease),))
        case _:
            return SessionStep(free)


def give_up(
    session: NodeSession, reason: str, cause: FailureCause = FailureCause.OTHER
) -> SessionStep:
    """Stop the current work and hand it back."""
    current = session.current
    if current is None:
        return SessionStep(session)
    return drop_work(session).then(lambda free: decline(free, current.lease, reason, cause))


def give_up_next(
    session: NodeSession, reason: str, cause: FailureCause = FailureCause.OTHER
) -> SessionStep:
    """Stop the next work and hand it back."""
    lease = next_lease(session)
    if lease is None:
        return SessionStep(session)
    return drop_next(session).then(lambda free: decline(free, lease, reason, cause))


def decline_queue(
    session: NodeSession, reason: str, cause: FailureCause = FailureCause.OTHER
) -> SessionStep:
    """Hand back everything that the node has not come to: the next work, then the queue."""
    lease = next_lease(session)
    step = drop_next(replace(session, queue=()))
    if lease is not None:
        step = step.then(partial(decline, lease=lease, reason=reason, cause=cause))
    for assignment in session.queue:
        step = step.then(partial(decline, lease=assignment.lease, reason=reason, cause=cause))
    return step


def cancel_work(session: NodeSession, event: events.ShardCancelled) -> SessionStep:
    """Drop the work of a void lease."""
    if event.lease == next_lease(session):
        return drop_next(session)
    queue = tuple(assignment for assignment in session.queue if assignment.lease != event.lease)
    session = replace(session, queue=queue)
    if session.current is None or session.current.lease != event.lease:
        return SessionStep(session)
    return drop_work(session).then(begin_next)


def release_job(session: NodeSession, event: events.JobReleased) -> SessionStep:
    """Drop a job and all that is kept for it, as soon as the worker no longer trains it."""
    job_id = event.job_id
    remaining_session = replace(
        session,
        memory=without_jobs(session.memory, frozenset({job_id})),
        queue=_queue_without(session, job_id),
        declined={name: back for name, back in session.declined.items() if name != job_id},
        owed=tuple(back for back in session.owed if back.lease.job_id != job_id),
        releasing=session.releasing | {job_id},
    )
    if remaining_session.current is not None and remaining_session.current.lease.job_id == job_id:
        step = drop_work(remaining_session).then(drop_next)
        return step.then(delete_released).then(begin_next)
    return delete_released(remaining_session)


def delete_released(session: NodeSession) -> SessionStep:
    """Delete the state of released jobs that the worker is not writing to."""
    busy = session.worker.busy
    free = frozenset(name for name in session.releasing if busy is None or busy.job_id != name)
    deletions = tuple(commands.DeleteJobState(name) for name in sorted(free))
    return SessionStep(replace(session, releasing=session.releasing - free), deletions)


def finish_upload(session: NodeSession, event: events.UploadAccepted) -> SessionStep:
    """Note that the coordinator holds the update or result, and take up the next work."""
    is_training = isinstance(session.work, Uploading)
    memory = with_accepted(session.memory, event.lease) if is_training else session.memory
    return begin_next(replace(session, work=Idle(), memory=memory))


def drop_late_update(session: NodeSession, _: events.UploadLate) -> SessionStep:
    """Drop an update or a result that nobody waits for any more."""
    return drop_work(session).then(begin_next)


def hand_back_rejected(
    session: NodeSession, event: events.FetchRejected | events.UploadRejected
) -> SessionStep:
    """Hand back work whose inputs are not to be had or whose update is rejected."""
    cause = event.cause if isinstance(event, events.FetchRejected) else FailureCause.OTHER
    if event.lease == next_lease(session):
        return give_up_next(session, event.reason, cause)
    return give_up(session, event.reason, cause).then(begin_next)


def retry_later(
    session: NodeSession, event: events.FetchBroken | events.UploadBroken
) -> SessionStep:
    """Try the transfer again after a while; without a link, once there is one."""
    if isinstance(event, events.FetchBroken) and event.lease == next_lease(session):
        return retry_fetching_later(session, event)
    work = session.work
    if not isinstance(work, Transferring) or not session.is_connected:
        return SessionStep(session)
    attempt = 0 if event.has_progressed else work.attempt
    key = f"{session.node}/{event.lease.job_id}"
    retry_at_ms = Milliseconds(event.at_ms + backoff_ms(key, attempt))
    waiting_work = replace(work, attempt=attempt + 1, retry_at_ms=retry_at_ms)
    return SessionStep(
        replace(session, work=waiting_work), (commands.SetTimer(events.Timer.RETRY, retry_at_ms),)
    )


def retry_transfer(session: NodeSession, event: events.TimerFired) -> SessionStep:
    """Go on with a broken transfer."""
    work = session.work
    if not isinstance(work, Transferring) or not session.is_connected:
        return SessionStep(session)
    if work.retry_at_ms == 0 or event.at_ms < work.retry_at_ms:
        return SessionStep(session)
    return resume_transfer(session)


def resume_transfer(session: NodeSession) -> SessionStep:
    """Go on with the download or the upload at hand, if there is one."""
    work = session.work
    command: commands.NodeCommand
    match work:
        case Fetching():
            command = commands.FetchInputs(work.assignment)
        case Uploading():
            command = commands.SendUpdate(work.assignment, work.update)
        case Contributing():
            command = commands.SendResult(work.assignment, work.result, work.blob)
        case _:
            return SessionStep(session)
    resumed_work = replace(work, retry_at_ms=Milliseconds(0))
    return SessionStep(replace(session, work=resumed_work), (command,))
