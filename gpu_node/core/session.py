"""The machine of a node: one pure step for each event; with the training, and with leaving.

Theory of operation. Three things advance side by side. The *link* joins, connects, breaks and
connects again. The *work* goes ``idle -> fetching -> training -> uploading -> idle``; it needs the
link to fetch and to upload, never to train. The *worker* trains at most one shard; told to drop it,
it counts as busy until it has. Work of the same job replaces the work at hand, since a lease is
void once another one is given; work of other jobs waits in a queue. Each assignment ends in one of:
its update accepted, its lease void by the coordinator's word, or a hand-back with a reason.

The shell persists `NodeSession.memory` before it performs a step's commands. Commands may be
performed twice; events that no longer fit change nothing.

A worker that dies under a shard says little about the machine: after some restarts that shard alone
is handed back. One that does not even get ready shows that nothing can be trained here: the node
then takes no work, announces it, and goes on trying until a start succeeds.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from gpu_node.core import commands, events
from gpu_node.core.backoff import backoff_ms
from gpu_node.core.link import advance_link, dial_again
from gpu_node.core.memory import with_finished
from gpu_node.core.session_state import (
    RESTARTS_MAX,
    CoordinatorLink,
    Fetching,
    Idle,
    LinkPhase,
    NodeSession,
    ProgressRecord,
    SessionStep,
    Training,
    Uploading,
    WorkerState,
)
from gpu_node.core.work import (
    begin_next,
    cancel_work,
    decline_queue,
    delete_released,
    drop_late_update,
    finish_upload,
    give_up,
    hand_back_rejected,
    release_job,
    resume_transfer,
    retry_later,
    retry_transfer,
    take_assignment,
)
from hypergpu.statements import OUT_OF_MEMORY, Lease
from hypergpu.units import Milliseconds

STEPS_WITHOUT_PROGRESS = 20
"""A worker that is silent for so many of its slowest inner steps hangs."""


def train_fetched(session: NodeSession, event: events.InputsFetched) -> SessionStep:
    """Train once the worker is free."""
    work = session.work
    if not isinstance(work, Fetching):
        return SessionStep(session)
    training = replace(session, work=Training(work.assignment, work.start))
    return _begin_training(training, event.at_ms)


def _begin_training(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Have the worker train the work at hand, once it is free and no restart is waited for."""
    work, worker = session.work, session.worker
    if not isinstance(work, Training) or worker.busy is not None or worker.retry_at_ms:
        return SessionStep(session)
    lease = work.assignment.lease
    kept = tuple(finished.lease.round for finished in session.memory.rounds(lease.job_id))
    worker = replace(worker, busy=lease, progress=ProgressRecord(at_ms))
    session = replace(session, worker=worker)
    timer = commands.SetTimer(events.Timer.STALL, _stall_at_ms(session))
    return SessionStep(session, (commands.StartTraining(work.assignment, work.start, kept), timer))


def _free_worker(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Note that the worker trains nothing, and do what waited for that."""
    free = replace(session, worker=replace(session.worker, busy=None))
    return delete_released(free).then(lambda reached: _begin_training(reached, at_ms))


def _is_in_training(session: NodeSession, lease: Lease) -> bool:
    """Whether the worker trains this lease, and it is still wanted."""
    work = session.work
    return (
        isinstance(work, Training)
        and work.assignment.lease == lease
        and session.worker.busy == lease
    )


def keep_update(session: NodeSession, event: events.TrainingFinished) -> SessionStep:
    """Remember the end state, then send the update. A shard dropped meanwhile is forgotten."""
    work = session.work
    if session.worker.busy != event.lease:
        return SessionStep(session)
    if not isinstance(work, Training) or work.assignment.lease != event.lease:
        return _free_worker(session, event.at_ms)
    memory = with_finished(session.memory, work.assignment, work.start, event.update)
    session = replace(session, memory=memory, worker=WorkerState())
    step = _begin_upload(session, Uploading(work.assignment, event.update), event.at_ms)
    return step.then(delete_released)


def _begin_upload(session: NodeSession, work: Uploading, at_ms: Milliseconds) -> SessionStep:
    """Send the update now, or after its planned wait."""
    session = replace(session, work=work)
    if not session.is_connected:
        return SessionStep(session)
    if not (wait_ms := work.assignment.upload_after_ms):
        return resume_transfer(session)
    due_at_ms = Milliseconds(at_ms + wait_ms)
    waiting = replace(session, work=replace(work, retry_at_ms=due_at_ms))
    return SessionStep(waiting, (commands.SetTimer(events.Timer.RETRY, due_at_ms),))


def hand_back_unfinished(
    session: NodeSession, event: events.TrainingFailed | events.TrainingAborted
) -> SessionStep:
    """Hand back a shard that the worker dropped without being told to."""
    if session.worker.busy != event.lease:
        return SessionStep(session)
    if not _is_in_training(session, event.lease):
        return _free_worker(session, event.at_ms)
    reason = "the worker dropped the shard unasked"
    if isinstance(event, events.TrainingFailed):
        reason = event.reason
    session = replace(session, worker=replace(session.worker, busy=None))
    return give_up(session, reason).then(delete_released).then(begin_next)


def restart_worker_later(session: NodeSession, event: events.WorkerDied) -> SessionStep:
    """Start the worker again after a while; after too many deaths under one shard, hand it back."""
    if not event.was_ready:
        starts = session.worker.false_starts + 1
        session = replace(session, worker=replace(session.worker, false_starts=starts))
    busy = session.worker.busy
    if busy is None:
        if session.unhealthy:
            return _wait_to_restart(session, event.at_ms)
        return SessionStep(session)
    if not _is_in_training(session, busy):
        return _free_worker(session, event.at_ms)
    if not event.was_ready:
        return _note_false_start(session, event)
    return _note_death(session, event, busy)


def _note_death(session: NodeSession, event: events.WorkerDied, busy: Lease) -> SessionStep:
    # A shard that did not fit into memory, or the owner's limits, would not fit again.
    is_hopeless = event.reason.startswith((OUT_OF_MEMORY, "OWNER_"))
    deaths = session.worker.deaths + 1
    if deaths <= RESTARTS_MAX and not is_hopeless:
        worker = replace(session.worker, deaths=deaths)
        return _wait_to_restart(replace(session, worker=worker), event.at_ms)
    before = session.declined.get(busy.job_id)
    is_again = before is not None and before.lease.round == busy.round
    times = "again" if is_again else f"{deaths} times"
    free = replace(session, worker=replace(session.worker, busy=None))
    reason = event.reason if is_hopeless else f"the worker died {times}: {event.reason}"
    return give_up(free, reason).then(delete_released).then(begin_next)


def _note_false_start(session: NodeSession, event: events.WorkerDied) -> SessionStep:
    starts = session.worker.false_starts
    if starts <= RESTARTS_MAX:
        return _wait_to_restart(session, event.at_ms)
    reason = f"no worker got ready in {starts} starts: {event.reason}"
    free = replace(session, worker=WorkerState(false_starts=starts), unhealthy=reason)
    # Announced before the hand-back, which would otherwise read as that of a node that stays.
    announced = (commands.AnnounceDraining(reason),) if session.is_connected else ()
    return (
        SessionStep(free, announced)
        .then(lambda reached: give_up(reached, reason))
        .then(lambda reached: decline_queue(reached, reason))
        .then(lambda reached: _wait_to_restart(reached, event.at_ms))
    )


def _wait_to_restart(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Free the worker and start it again after a wait that grows with each failure."""
    worker = session.worker
    wait_ms = backoff_ms(f"{session.node}/worker", max(worker.deaths, worker.false_starts))
    retry_at_ms = Milliseconds(at_ms + wait_ms)
    waiting = replace(session, worker=replace(worker, busy=None, retry_at_ms=retry_at_ms))
    return SessionStep(waiting, (commands.SetTimer(events.Timer.WORKER, retry_at_ms),)).then(
        delete_released
    )


def restart_worker(session: NodeSession, event: events.TimerFired) -> SessionStep:
    """Start the worker once its wait is over, or train on it."""
    retry_at_ms = session.worker.retry_at_ms
    if retry_at_ms == 0 or event.at_ms < retry_at_ms:
        return SessionStep(session)
    worker = replace(session.worker, retry_at_ms=Milliseconds(0))
    if not session.unhealthy:
        return _begin_training(replace(session, worker=worker), event.at_ms)
    worker = replace(worker, progress=ProgressRecord(event.at_ms))
    session = replace(session, worker=worker)
    return SessionStep(
        session,
        (commands.StartWorker(), commands.SetTimer(events.Timer.STALL, _stall_at_ms(session))),
    )


def note_ready_worker(session: NodeSession, event: events.WorkerReady) -> SessionStep:
    """Note that a worker is up; a node that took no work for lack of one takes work again."""
    was_unhealthy = bool(session.unhealthy)
    worker = replace(session.worker, false_starts=0)
    session = replace(session, worker=worker, unhealthy="")
    if was_unhealthy and not session.drain:
        return dial_again(session, event.at_ms)
    return SessionStep(session)


def note_progress(session: NodeSession, event: events.TrainingProgressed) -> SessionStep:
    """Wait for the next progress as long as the slowest inner step so far suggests."""
    if not _is_in_training(session, event.lease):
        return SessionStep(session)
    progress = session.worker.progress
    steps = event.steps_done - progress.steps_done
    if steps <= 0:
        return SessionStep(session)
    step_ms = (event.at_ms - progress.at_ms) // steps
    slowest_ms = Milliseconds(max(progress.slowest_step_ms, step_ms))
    progress = ProgressRecord(event.at_ms, event.steps_done, slowest_ms)
    session = replace(session, worker=replace(session.worker, progress=progress))
    return SessionStep(session, (commands.SetTimer(events.Timer.STALL, _stall_at_ms(session)),))


def end_stalled_worker(session: NodeSession, event: events.TimerFired) -> SessionStep:
    """End a worker that has shown no progress for too long: it counts as died."""
    busy = session.worker.busy
    is_training = busy is not None and _is_in_training(session, busy)
    is_starting = bool(session.unhealthy) and not session.worker.retry_at_ms
    if not (is_training or is_starting) or event.at_ms < _stall_at_ms(session):
        return SessionStep(session)
    silent_s = (event.at_ms - session.worker.progress.at_ms) // 1000
    return SessionStep(session, (commands.EndWorker(f"it made no progress for {silent_s} s"),))


def _stall_at_ms(session: NodeSession) -> Milliseconds:
    progress, timeouts = session.worker.progress, session.stall_timeouts
    limit_ms = timeouts.first_ms
    if progress.steps_done:
        by_steps_ms = STEPS_WITHOUT_PROGRESS * progress.slowest_step_ms
        limit_ms = Milliseconds(max(timeouts.later_ms, by_steps_ms))
    return Milliseconds(progress.at_ms + limit_ms)


def drain(session: NodeSession, event: events.DrainRequested) -> SessionStep:
    """Take nothing more. A training or an upload may finish within the limit."""
    if session.drain:
        return SessionStep(session)
    reason = event.reason or "draining"
    limit_at_ms = Milliseconds(event.at_ms + session.drain_limit_ms)
    announced = (commands.AnnounceDraining(reason),) if session.is_connected else ()
    timer = commands.SetTimer(events.Timer.DRAIN, limit_at_ms)
    step = SessionStep(replace(session, drain=reason), (*announced, timer))
    step = step.then(lambda reached: decline_queue(reached, reason))
    if isinstance(session.work, Fetching):
        step = step.then(lambda reached: give_up(reached, reason))
    return step


def change_availability(session: NodeSession, event: events.AvailabilityChanged) -> SessionStep:
    """Work no more for a while, or again. A finished update is still sent.

    The worker ends, so that the machine's memory is its owner's.
    """
    before, session = session.withheld, replace(session, withheld=event.reason)
    if event.reason == before or session.drain:
        return SessionStep(session)
    if not event.reason:
        return SessionStep(session) if session.unhealthy else dial_again(session, event.at_ms)
    announced = (commands.AnnounceDraining(event.reason),) if session.is_connected else ()
    step = SessionStep(session, announced)
    step = step.then(lambda reached: decline_queue(reached, event.reason))
    if not isinstance(session.work, Uploading):
        step = step.then(lambda reached: give_up(reached, event.reason))
    return SessionStep(step.session, (*step.commands, commands.EndWorker(event.reason)))


def give_up_overdue(session: NodeSession, _: events.TimerFired) -> SessionStep:
    """Hand back the rest of a drain that took too long."""
    if not session.drain:
        return SessionStep(session)
    return give_up(session, f"{session.drain}; out of time")


def leave_if_drained(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Leave once a drain has nothing left to wait for."""
    has_left = session.link.phase is LinkPhase.LEFT
    if has_left or not session.drain or not isinstance(session.work, Idle):
        return SessionStep(session)
    return _leave(session, at_ms, commands.Leave(commands.Departure.DRAINED, session.drain))


def stop(session: NodeSession, event: events.StopRequested) -> SessionStep:
    """Leave at once. Unfinished work is lost to this node, not to the job."""
    return _leave(session, event.at_ms, commands.Leave(commands.Departure.STOPPED, event.reason))


def _leave(session: NodeSession, at_ms: Milliseconds, leave: commands.Leave) -> SessionStep:
    link = CoordinatorLink(LinkPhase.LEFT, at_ms, reason=leave.reason)
    return SessionStep(replace(session, link=link, work=Idle(), queue=()), (leave,))


_FROM_COORDINATOR = (events.ShardAssigned, events.ShardCancelled, events.JobReleased)
_HANDLERS: dict[type[events.NodeEvent], Callable[[NodeSession, Any], SessionStep]] = {
    events.Started: advance_link,
    events.Joined: advance_link,
    events.JoinFailed: advance_link,
    events.JoinRejected: advance_link,
    events.Connected: advance_link,
    events.LinkLost: advance_link,
    events.LinkRejected: advance_link,
    events.ShardAssigned: take_assignment,
    events.ShardCancelled: cancel_work,
    events.JobReleased: release_job,
    events.InputsFetched: train_fetched,
    events.FetchBroken: retry_later,
    events.FetchRejected: hand_back_rejected,
    events.TrainingFinished: keep_update,
    events.TrainingFailed: hand_back_unfinished,
    events.TrainingAborted: hand_back_unfinished,
    events.TrainingProgressed: note_progress,
    events.WorkerReady: note_ready_worker,
    events.WorkerDied: restart_worker_later,
    events.UploadAccepted: finish_upload,
    events.UploadLate: drop_late_update,
    events.UploadRejected: hand_back_rejected,
    events.UploadBroken: retry_later,
    events.AvailabilityChanged: change_availability,
    events.DrainRequested: drain,
    events.StopRequested: stop,
}
_WORK: dict[type[events.NodeEvent], type[Fetching | Uploading]] = {
    events.InputsFetched: Fetching,
    events.FetchBroken: Fetching,
    events.FetchRejected: Fetching,
    events.UploadAccepted: Uploading,
    events.UploadLate: Uploading,
    events.UploadRejected: Uploading,
    events.UploadBroken: Uploading,
}
"""The work that the end of a transfer belongs to; for other work, or another lease, it is late."""
_TIMER_HANDLERS: dict[events.Timer, Callable[[NodeSession, events.TimerFired], SessionStep]] = {
    events.Timer.RECONNECT: advance_link,
    events.Timer.RETRY: retry_transfer,
    events.Timer.WORKER: restart_worker,
    events.Timer.STALL: end_stalled_worker,
    events.Timer.DRAIN: give_up_overdue,
}


def transition(session: NodeSession, event: events.NodeEvent) -> SessionStep:
    """Advance the node by one event."""
    if session.link.phase is LinkPhase.LEFT:
        return SessionStep(session)
    return _advance(session, event).then(lambda reached: leave_if_drained(reached, event.at_ms))


def _advance(session: NodeSession, event: events.NodeEvent) -> SessionStep:
    if isinstance(event, events.TimerFired):
        return _TIMER_HANDLERS[event.timer](session, event)
    if isinstance(event, _FROM_COORDINATOR) and not session.is_connected:
        # The stream of this message broke since; the next stream repeats what still holds.
        return SessionStep(session)
    if (work := _WORK.get(type(event))) is not None and not _is_at(session, work, event):
        return SessionStep(session)
    return _HANDLERS[type(event)](session, event)


def _is_at(session: NodeSession, work: type[Fetching | Uploading], event: Any) -> bool:
    return isinstance(session.work, work) and session.work.assignment.lease == event.lease
