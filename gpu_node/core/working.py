"""The work: taking it up, fetching for it, sending its update, giving it back or dropping it."""

from functools import partial

from gpu_node.core.backoff import backoff_ms
from gpu_node.core.commands import (
    AbortTraining,
    Command,
    DeleteJobState,
    FetchInputs,
    HandBack,
    SetTimer,
    StopFetch,
    StopUpload,
    Upload,
)
from gpu_node.core.events import FetchBroken, Timer, TimerFired, UploadBroken
from gpu_node.core.memory import plan_work, with_accepted, without_jobs
from gpu_node.core.state import (
    RESTARTS_MAX,
    Fetching,
    Idle,
    Session,
    Step,
    Training,
    Uploading,
    Worker,
    replace,
)
from hypergpu.ids import JobId
from hypergpu.statements.assignment import Assignment, Lease
from hypergpu.units import Milliseconds


def take_assignment(session: Session, assignment: Assignment) -> Step:
    """Take work up, line it up behind another job's, or hand it back at once.

    What is said again is ignored. Another assignment of the job at hand makes the old lease void.
    """
    current = session.current
    if current is None or current.lease.job_id != assignment.lease.job_id:
        return _consider(session, assignment)
    if current.lease == assignment.lease and current.task == assignment.task:
        return Step(session)
    return drop_work(session).then(lambda free: _consider(free, assignment))


def _consider(session: Session, assignment: Assignment) -> Step:
    lease = assignment.lease
    if reason := session.drain or session.unhealthy:
        return decline(session, lease, reason)
    before = session.declined.get(lease.job_id)
    if before is not None and before.lease == lease:
        return decline(session, lease, before.reason)
    if isinstance(session.work, Idle):
        return _begin(session, assignment)
    others = tuple(held for held in session.queue if held.lease.job_id != lease.job_id)
    return Step(replace(session, queue=(*others, assignment)))


def _begin(session: Session, assignment: Assignment) -> Step:
    lease = assignment.lease
    plan = plan_work(session.memory, assignment)
    stale = plan.memory.stale()
    ready = replace(
        session,
        memory=without_jobs(plan.memory, stale),
        queue=tuple(held for held in session.queue if held.lease.job_id != lease.job_id),
        worker=_worker_for(session, lease),
        releasing=session.releasing - {lease.job_id} | stale,
    )
    command: Command
    if plan.finished is not None:
        uploading = Uploading(assignment, plan.finished.update)
        ready = replace(ready, work=uploading)
        command = upload(uploading)
    else:
        ready = replace(ready, work=Fetching(assignment, plan.start))
        command = FetchInputs(assignment)
    return delete_released(ready).then(
        lambda begun: Step(begun, (command,) if session.is_connected else ())
    )


def _worker_for(session: Session, lease: Lease) -> Worker:
    """A round that was handed back and is given again gets one try, not all the restarts."""
    worker, before = session.worker.renewed(), session.declined.get(lease.job_id)
    if before is not None and before.lease.round == lease.round:
        return replace(worker, deaths=RESTARTS_MAX)
    return worker


def next_begun(session: Session) -> Step:
    """Take up what waits in line, if the node is free."""
    if isinstance(session.work, Idle) and session.queue:
        return _begin(session, session.queue[0])
    return Step(session)


def decline(session: Session, lease: Lease, reason: str) -> Step:
    """Hand a lease back. It is not taken up again should the coordinator repeat it."""
    hand_back = HandBack(lease, reason)
    session = replace(session, declined={**session.declined, lease.job_id: hand_back})
    if session.is_connected:
        return Step(session, (hand_back,))
    return Step(replace(session, owed=(*session.owed, hand_back)))


def drop_work(session: Session) -> Step:
    """Stop the current work without a word to the coordinator."""
    free = replace(session, work=Idle(), worker=session.worker.renewed())
    match session.work:
        case Fetching(assignment=assignment):
            return Step(free, (StopFetch(assignment.lease),))
        case Training(assignment=assignment) if session.worker.busy == assignment.lease:
            return Step(free, (AbortTraining(assignment.lease),))
        case Uploading(assignment=assignment):
            return Step(free, (StopUpload(assignment.lease),))
        case _:
            return Step(free)


def given_up(session: Session, reason: str) -> Step:
    """Stop the current work and hand it back."""
    current = session.current
    if current is None:
        return Step(session)
    return drop_work(session).then(lambda free: decline(free, current.lease, reason))


def queue_declined(session: Session, reason: str) -> Step:
    """Hand back everything that waits in line."""
    step = Step(replace(session, queue=()))
    for held in session.queue:
        step = step.then(partial(decline, lease=held.lease, reason=reason))
    return step


def cancel_work(session: Session, lease: Lease) -> Step:
    """Drop what a void lease asked for."""
    queue = tuple(held for held in session.queue if held.lease != lease)
    session = replace(session, queue=queue)
    if session.current is None or session.current.lease != lease:
        return Step(session)
    return drop_work(session).then(next_begun)


def release_job(session: Session, job_id: JobId) -> Step:
    """Drop a job with everything kept for it, as soon as the worker has let go of it."""
    kept = replace(
        session,
        memory=without_jobs(session.memory, frozenset({job_id})),
        queue=tuple(held for held in session.queue if held.lease.job_id != job_id),
        declined={name: back for name, back in session.declined.items() if name != job_id},
        owed=tuple(back for back in session.owed if back.lease.job_id != job_id),
        releasing=session.releasing | {job_id},
    )
    if kept.current is not None and kept.current.lease.job_id == job_id:
        return drop_work(kept).then(delete_released).then(next_begun)
    return delete_released(kept)


def delete_released(session: Session) -> Step:
    """Delete the state of released jobs that the worker is not writing to."""
    busy = session.worker.busy
    free = frozenset(name for name in session.releasing if busy is None or busy.job_id != name)
    commands = tuple(DeleteJobState(name) for name in sorted(free))
    return Step(replace(session, releasing=session.releasing - free), commands)


def finish_upload(session: Session, lease: Lease) -> Step:
    """The update has arrived for good."""
    if not isinstance(session.work, Uploading) or session.work.assignment.lease != lease:
        return Step(session)
    memory = with_accepted(session.memory, lease)
    return next_begun(replace(session, work=Idle(), memory=memory))


def retry_later(session: Session, event: FetchBroken | UploadBroken) -> Step:
    """Try the transfer again after a while; without a link, once there is one."""
    work = session.work
    is_ours = (isinstance(work, Fetching) and isinstance(event, FetchBroken)) or (
        isinstance(work, Uploading) and isinstance(event, UploadBroken)
    )
    if not is_ours or not isinstance(work, Fetching | Uploading):
        return Step(session)
    if work.assignment.lease != event.lease or not session.is_connected:
        return Step(session)
    attempt = 0 if event.has_progressed else work.attempt
    key = f"{session.node}/{event.lease.job_id}"
    retry_at_ms = Milliseconds(event.at_ms + backoff_ms(key, attempt))
    waiting = replace(work, attempt=attempt + 1, retry_at_ms=retry_at_ms)
    return Step(replace(session, work=waiting), (SetTimer(Timer.RETRY, retry_at_ms),))


def retry_transfer(session: Session, event: TimerFired) -> Step:
    """Go on with a broken transfer."""
    work = session.work
    if not isinstance(work, Fetching | Uploading) or not session.is_connected:
        return Step(session)
    if work.retry_at_ms == 0 or event.at_ms < work.retry_at_ms:
        return Step(session)
    again = replace(session, work=replace(work, retry_at_ms=Milliseconds(0)))
    if isinstance(work, Fetching):
        return Step(again, (FetchInputs(work.assignment),))
    return Step(again, (upload(work),))


def upload(work: Uploading) -> Upload:
    """Send the update."""
    return Upload(work.assignment, work.update)
