"""Steps of a node for its worker, which trains or does work of another kind: it starts, progresses,
stalls and dies.
"""

from msgspec.structs import replace

from gpu_node.core import commands, events
from gpu_node.core.backoff import backoff_ms
from gpu_node.core.link import dial_again
from gpu_node.core.memory import with_finished
from gpu_node.core.next_work import next_lease, note_fetched
from gpu_node.core.session_state import (
    RESTARTS_MAX,
    Computing,
    Contributing,
    Executing,
    Fetching,
    NodeSession,
    ProgressRecord,
    SessionStep,
    Training,
    Uploading,
    WorkerState,
)
from gpu_node.core.work import (
    begin_next,
    decline_queue,
    delete_released,
    give_up,
    give_up_next,
    resume_transfer,
)
from hypergpu.assignment import FailureCause, Lease, PackedAssignment
from hypergpu.units import Milliseconds

STEPS_WITHOUT_PROGRESS = 20
"""A worker that is silent for so many of its slowest inner steps hangs."""


def compute_fetched(session: NodeSession, event: events.InputsFetched) -> SessionStep:
    """Train, or do other work, once the worker is free."""
    if event.lease == next_lease(session):
        return note_fetched(session)
    work = session.work
    if not isinstance(work, Fetching):
        return SessionStep(session)
    assignment = work.assignment
    if isinstance(assignment, PackedAssignment):
        return _begin_computing(replace(session, work=Executing(assignment)), event.at_ms)
    return _begin_computing(replace(session, work=Training(assignment, work.start)), event.at_ms)


def _begin_computing(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Have the worker do the work whose turn it is, once it is free and well."""
    work, worker = session.computing_work, session.worker
    if work is None or worker.busy is not None or worker.retry_at_ms:
        return SessionStep(session)
    worker = replace(worker, busy=work.assignment.lease, progress=ProgressRecord(at_ms))
    session = replace(session, worker=worker)
    timer = commands.SetTimer(events.Timer.STALL, _stall_at_ms(session))
    return SessionStep(session, (_start(session, work), timer))


def _start(session: NodeSession, work: Computing) -> commands.NodeCommand:
    if isinstance(work, Executing):
        return commands.PerformWork(work.assignment)
    rounds = session.memory.rounds(work.assignment.lease.job_id)
    kept_rounds = tuple(finished_round.lease.round for finished_round in rounds)
    return commands.StartTraining(work.assignment, work.start, kept_rounds)


def _free_worker(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Note that the worker does nothing, and do what waited for that."""
    free = replace(session, worker=replace(session.worker, busy=None))
    return delete_released(free).then(lambda reached: _begin_computing(reached, at_ms))


def _is_computing(session: NodeSession, lease: Lease) -> bool:
    """Whether the worker is at this lease's work, and it is still needed."""
    work = session.computing_work
    return work is not None and work.assignment.lease == lease == session.worker.busy


def start_next(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Have the worker go on with packed work whose turn it has become."""
    if isinstance(session.computing_work, Executing):
        return _begin_computing(session, at_ms)
    return SessionStep(session)


def _give_up_computed(session: NodeSession, reason: str, cause: FailureCause) -> SessionStep:
    """Hand back the work that is the worker's, and take up what comes after it."""
    if session.computing_work is session.work:
        return give_up(session, reason, cause).then(delete_released).then(begin_next)
    return give_up_next(session, reason, cause).then(delete_released)


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


def keep_result(session: NodeSession, event: events.WorkFinished) -> SessionStep:
    """Send the result of other work, after that of the work before it. That of work dropped
    meanwhile is forgotten.
    """
    work = session.computing_work
    if session.worker.busy != event.lease:
        return SessionStep(session)
    if not isinstance(work, Executing) or work.assignment.lease != event.lease:
        return _free_worker(session, event.at_ms)
    contribution = Contributing(work.assignment, event.result, event.blob)
    if work is session.next_work:
        session = replace(session, next_work=contribution, worker=WorkerState())
        return delete_released(session)
    session = replace(session, work=contribution, worker=WorkerState())
    step = resume_transfer(session) if session.is_connected else SessionStep(session)
    return step.then(delete_released)


def _begin_upload(session: NodeSession, work: Uploading, at_ms: Milliseconds) -> SessionStep:
    """Send the update now, or after its planned wait."""
    session = replace(session, work=work)
    if not session.is_connected:
        return SessionStep(session)
    if not (wait_ms := work.assignment.upload_after_ms):
        return resume_transfer(session)
    due_at_ms = Milliseconds(at_ms + wait_ms)
    waiting_session = replace(session, work=replace(work, retry_at_ms=due_at_ms))
    return SessionStep(waiting_session, (commands.SetTimer(events.Timer.RETRY, due_at_ms),))


def hand_back_unfinished(
    session: NodeSession, event: events.TrainingFailed | events.TrainingAborted
) -> SessionStep:
    """Hand back work that the worker dropped without being told to."""
    if session.worker.busy != event.lease:
        return SessionStep(session)
    if not _is_computing(session, event.lease):
        return _free_worker(session, event.at_ms)
    reason, cause = "the worker dropped the shard unasked", FailureCause.OTHER
    if isinstance(event, events.TrainingFailed):
        reason, cause = event.reason, event.cause
    session = replace(session, worker=replace(session.worker, busy=None))
    return _give_up_computed(session, reason, cause)


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
    if not _is_computing(session, busy):
        return _free_worker(session, event.at_ms)
    if not event.was_ready:
        return _note_false_start(session, event)
    return _note_death(session, event, busy)


def _note_death(session: NodeSession, event: events.WorkerDied, busy: Lease) -> SessionStep:
    # A shard that did not fit into memory, or the owner's limits, would not fit again.
    is_hopeless = event.cause.is_lasting
    deaths = session.worker.deaths + 1
    if deaths <= RESTARTS_MAX and not is_hopeless:
        worker = replace(session.worker, deaths=deaths)
        return _wait_to_restart(replace(session, worker=worker), event.at_ms)
    before = session.declined.get(busy.job_id)
    is_again = before is not None and before.lease.round == busy.round
    times = "again" if is_again else f"{deaths} times"
    free = replace(session, worker=replace(session.worker, busy=None))
    reason = event.reason if is_hopeless else f"the worker died {times}: {event.reason}"
    return _give_up_computed(free, reason, event.cause)


def _note_false_start(session: NodeSession, event: events.WorkerDied) -> SessionStep:
    starts = session.worker.false_starts
    if starts <= RESTARTS_MAX:
        return _wait_to_restart(session, event.at_ms)
    reason = f"no worker got ready in {starts} starts: {event.reason}"
    free = replace(session, worker=WorkerState(false_starts=starts), unhealthy=reason)
    # Announced before the hand-back, which would otherwise read as that of a node that stays.
    announcement = (commands.AnnounceDraining(reason),) if session.is_connected else ()
    # A result that is being sent needs no worker.
    is_at_hand = session.computing_work is session.work
    step = SessionStep(free, announcement).then(lambda reached: decline_queue(reached, reason))
    return (step.then(lambda reached: give_up(reached, reason)) if is_at_hand else step).then(
        lambda reached: _wait_to_restart(reached, event.at_ms)
    )


def _wait_to_restart(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Free the worker and start it again after a wait that grows with each failure."""
    worker = session.worker
    wait_ms = backoff_ms(f"{session.node}/worker", max(worker.deaths, worker.false_starts))
    retry_at_ms = Milliseconds(at_ms + wait_ms)
    waiting_session = replace(session, worker=replace(worker, busy=None, retry_at_ms=retry_at_ms))
    return SessionStep(
        waiting_session, (commands.SetTimer(events.Timer.WORKER, retry_at_ms),)
    ).then(delete_released)


def restart_worker(session: NodeSession, event: events.TimerFired) -> SessionStep:
    """Start the worker once its wait is over, or train on it."""
    retry_at_ms = session.worker.retry_at_ms
    if retry_at_ms == 0 or event.at_ms < retry_at_ms:
        return SessionStep(session)
    worker = replace(session.worker, retry_at_ms=Milliseconds(0))
    if not session.unhealthy:
        return _begin_computing(replace(session, worker=worker), event.at_ms)
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
    if not _is_computing(session, event.lease):
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
    is_training = busy is not None and _is_computing(session, busy)
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
