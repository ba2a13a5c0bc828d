"""What a node does and how its work fared: a fold of the session's steps, shown to its owner.

Nothing is decided by it, and it starts anew with the daemon.
"""

import msgspec

from gpu_node.core import commands, events
from gpu_node.core.session_state import (
    Computing,
    Contributing,
    Executing,
    Fetching,
    Idle,
    NodeSession,
    SessionStep,
    Training,
    Uploading,
)
from hypergpu.assignment import (
    AnyAssignment,
    Assignment,
    Lease,
    PackedAssignment,
    is_same_work,
)
from hypergpu.node_report import JudgementReport, SetbackReport, WorkReport, WorkTotals
from hypergpu.phases import WorkPhase
from hypergpu.units import Bytes, Milliseconds, round_text

SETBACKS_KEPT = 5
JUDGEMENTS_KEPT = 5


class NodeActivity(msgspec.Struct, frozen=True):
    """The fold's state. Its times are those of the events, setbacks' too."""

    phase: WorkPhase | None = None
    """None: there is no work. The time between two tries of a transfer is spent waiting."""
    since_ms: Milliseconds = Milliseconds(0)
    """Begin of the phase."""
    loss: float | None = None
    """The newest loss of the training at hand."""
    trouble: str = ""
    """Why the last try of the work at hand broke."""
    totals: WorkTotals = WorkTotals()
    setbacks: tuple[SetbackReport, ...] = ()
    """The newest, in order of time."""
    judgements: tuple[JudgementReport, ...] = ()
    """The same of updates that do not count in full."""


def work_phase(session: NodeSession) -> WorkPhase | None:
    """Where the work at hand is now; None: there is none."""
    work, worker = session.work, session.worker
    match work:
        case Idle():
            return None
        case Training(assignment=assignment):
            if worker.busy != assignment.lease:
                return WorkPhase.WAIT
            is_trained = worker.progress.steps_done >= assignment.task.inner_steps
            return WorkPhase.ENCODE if is_trained else WorkPhase.TRAIN
        case Executing(assignment=assignment):
            return WorkPhase.TRAIN if worker.busy == assignment.lease else WorkPhase.WAIT
        case _ if work.retry_at_ms or not session.is_connected:
            return WorkPhase.WAIT
        case Fetching():
            return WorkPhase.DOWNLOAD
        case _:
            return WorkPhase.UPLOAD


def advance_activity(
    activity: NodeActivity, before: NodeSession, event: events.NodeEvent, step: SessionStep
) -> NodeActivity:
    """Advance by one event.

    Args:
        activity: The fold so far.
        before: The session before the event.
        event: The event.
        step: What the event led to.
    """
    after = step.session
    activity = _with_outcomes(activity, before, event, step)
    if isinstance(event, events.ShardAssigned):
        activity = _with_judgement(activity, event.assignment, event.at_ms)
    if _lease(after) != _lease(before):
        activity = msgspec.structs.replace(activity, loss=None, trouble="")
    match event:
        case events.TrainingProgressed(lease=lease) if lease == after.worker.busy == _lease(after):
            activity = msgspec.structs.replace(activity, loss=event.loss, trouble="")
        case events.FetchBroken() | events.UploadBroken() if event.lease == _lease(after):
            activity = msgspec.structs.replace(activity, trouble=event.reason)
        case events.WorkerDied() if isinstance(after.work, Computing):
            activity = msgspec.structs.replace(activity, trouble=f"the worker died: {event.reason}")
        case events.InputsFetched() | events.TrainingFinished() | events.WorkFinished():
            activity = msgspec.structs.replace(activity, trouble="")
        case _:
            pass
    phase = work_phase(after)
    if phase is not activity.phase or _lease(after) != _lease(before):
        activity = msgspec.structs.replace(activity, phase=phase, since_ms=event.at_ms)
    return activity


def _lease(session: NodeSession) -> Lease | None:
    return None if session.current is None else session.current.lease


def _with_judgement(
    activity: NodeActivity, assignment: Assignment, at_ms: Milliseconds
) -> NodeActivity:
    """Keep what an assignment says of an earlier update, once however often it is sent."""
    job, text = assignment.lease.job_id, assignment.judgement
    if not text or any((job, text) == (each.job, each.reason) for each in activity.judgements):
        return activity
    judgement = JudgementReport(at_ms=at_ms, job=job, reason=text)
    judgements = (*activity.judgements, judgement)[-JUDGEMENTS_KEPT:]
    return msgspec.structs.replace(activity, judgements=judgements)


def _with_outcomes(
    activity: NodeActivity, before: NodeSession, event: events.NodeEvent, step: SessionStep
) -> NodeActivity:
    """Count what became of work."""
    current = before.current
    is_current = current is not None and getattr(event, "lease", None) == current.lease
    is_sent = is_current and isinstance(before.work, Uploading | Contributing)
    at_ms = event.at_ms
    match event:
        case events.UploadAccepted() if is_sent and current is not None:
            return _with_accepted(activity, current)
        case events.UploadRejected(lease=lease, reason=reason) if is_sent:
            return _with_setback(activity, _setback(at_ms, lease, "rejected", reason))
        case events.UploadLate(lease=lease, reason=reason) if is_sent:
            return _with_setback(activity, _setback(at_ms, lease, "late", reason))
        case events.ShardCancelled(lease=lease, reason=reason) if is_current:
            return _with_setback(activity, _setback(at_ms, lease, "cancelled", reason))
        case events.ShardAssigned() | events.WorkAssigned() if _is_replaced(before, step.session):
            return _with_replacement(activity, before, event.assignment, at_ms)
        case _:
            for command in step.commands:
                if isinstance(command, commands.HandBack):
                    back = _setback(at_ms, command.lease, "handed back", command.reason)
                    activity = _with_setback(activity, back)
            return activity


def _is_replaced(before: NodeSession, after: NodeSession) -> bool:
    """Whether newer work of the same job took the place of the work at hand."""
    old, new = before.current, after.current
    if old is None or new is None or old.lease == new.lease:
        return False
    return old.lease.job_id == new.lease.job_id


def _with_replacement(
    activity: NodeActivity, before: NodeSession, newer: AnyAssignment, at_ms: Milliseconds
) -> NodeActivity:
    """Count the work that newer work replaced: the assignment tells whether its update counts.

    It may overtake the answer to the upload. A node gets other work than its own only once that is
    accepted or void, and what is void is not sent.
    """
    old, work = before.current, before.work
    if old is None:
        return activity
    if isinstance(work, Contributing) and not is_same_work(old, newer):
        return _with_accepted(activity, old)
    if (
        isinstance(work, Uploading)
        and isinstance(newer, Assignment)
        and newer.last_accepted == work.update.digest
    ):
        return _with_accepted(activity, old)
    if isinstance(newer, PackedAssignment):
        reason = "the coordinator assigned other work"
    elif newer.lease.round == old.lease.round:
        reason = "the coordinator assigned the round again"
    else:
        reason = f"the coordinator went on to {round_text(newer.lease.round)}"
    return _with_setback(activity, _setback(at_ms, old.lease, "cancelled", reason))


def _with_accepted(activity: NodeActivity, assignment: AnyAssignment) -> NodeActivity:
    totals = activity.totals
    samples = assignment.task.samples if isinstance(assignment, Assignment) else 0
    totals = msgspec.structs.replace(
        totals, accepted=totals.accepted + 1, samples=totals.samples + samples
    )
    return msgspec.structs.replace(activity, totals=totals)


def _setback(at_ms: Milliseconds, lease: Lease, kind: str, reason: str) -> SetbackReport:
    return SetbackReport(at_ms=at_ms, job=lease.job_id, round=lease.round, kind=kind, reason=reason)


def _with_setback(activity: NodeActivity, setback: SetbackReport) -> NodeActivity:
    field = setback.kind.replace(" ", "_")
    count = getattr(activity.totals, field) + 1
    return msgspec.structs.replace(
        activity,
        totals=msgspec.structs.replace(activity.totals, **{field: count}),
        setbacks=(*activity.setbacks, setback)[-SETBACKS_KEPT:],
    )


def work_report(
    session: NodeSession, activity: NodeActivity, offset_ms: int, *, moved_bytes: Bytes
) -> WorkReport | None:
    """The work at hand for its owner; None: there is none.

    Args:
        session: The newest.
        activity: The fold up to the same event.
        offset_ms: Added to times of events it gives times of day.
        moved_bytes: Bytes of the transfer at hand so far.
    """
    current = session.current
    if current is None or activity.phase is None:
        return None
    work = session.work
    if not isinstance(current, Assignment):
        return WorkReport(
            job=current.lease.job_id,
            round=current.lease.round,
            workload=current.work.kind,
            phase=activity.phase.value,
            since_ms=activity.since_ms + offset_ms,
            reason=_waiting_reason(session, activity),
            plan=current.reason,
            steps_done=0,
            steps_total=0,
            batch_size=0,
            waiting_jobs=len(session.queue),
        )
    task = current.task
    is_trained = isinstance(work, Uploading)
    steps_done = task.inner_steps if is_trained else session.worker.progress.steps_done
    return WorkReport(
        job=current.lease.job_id,
        round=current.lease.round,
        workload=task.workload,
        phase=activity.phase.value,
        since_ms=activity.since_ms + offset_ms,
        reason=_waiting_reason(session, activity),
        plan=current.reason,
        steps_done=0 if isinstance(work, Fetching) else steps_done,
        steps_total=task.inner_steps,
        batch_size=task.batch_size,
        loss=activity.loss,
        update_bytes=work.update.size_bytes if isinstance(work, Uploading) else None,
        moved_bytes=moved_bytes,
        waiting_jobs=len(session.queue),
    )


def _waiting_reason(session: NodeSession, activity: NodeActivity) -> str:
    if activity.phase is not WorkPhase.WAIT:
        return ""
    work = session.work
    if isinstance(work, Computing):
        return activity.trouble or "the worker ends its earlier work"
    if not session.is_connected:
        return "there is no connection"
    if isinstance(work, Uploading) and not work.attempt:
        return "the plan lets uploads begin one after another"
    return activity.trouble


def setback_reports(activity: NodeActivity, offset_ms: int) -> tuple[SetbackReport, ...]:
    """The newest setbacks with times of day."""
    return tuple(
        msgspec.structs.replace(each, at_ms=each.at_ms + offset_ms) for each in activity.setbacks
    )


def judgement_reports(activity: NodeActivity, offset_ms: int) -> tuple[JudgementReport, ...]:
    """The newest judgements with times of day."""
    return tuple(
        msgspec.structs.replace(each, at_ms=each.at_ms + offset_ms) for each in activity.judgements
    )
