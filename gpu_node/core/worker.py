"""The worker process: restarted when it dies, ended when it hangs, waited for when none starts.

A worker that dies under a shard says little about the machine: after some restarts that shard alone
is handed back. One that does not even get ready says that nothing can be trained here: the node
then takes nothing, says so, and goes on trying until a start succeeds.
"""

from gpu_node.core.backoff import backoff_ms
from gpu_node.core.commands import AnnounceDraining, EndWorker, SetTimer, StartWorker
from gpu_node.core.events import Timer, TimerFired, TrainingProgressed, WorkerDied
from gpu_node.core.linking import dial_again
from gpu_node.core.state import (
    RESTARTS_MAX,
    Pulse,
    Session,
    Step,
    Worker,
    replace,
)
from gpu_node.core.training import begin_training, is_in_training, let_go
from gpu_node.core.working import delete_released, given_up, next_begun, queue_declined
from hypergpu.statements.assignment import Lease
from hypergpu.units import Milliseconds

STEPS_WITHOUT_PROGRESS = 20
"""A worker that is silent for so many of its slowest inner steps hangs."""


def restart_later(session: Session, event: WorkerDied) -> Step:
    """Start the worker again after a while; after too many deaths under one shard, hand it back."""
    if not event.was_ready:
        starts = session.worker.false_starts + 1
        session = replace(session, worker=replace(session.worker, false_starts=starts))
    busy = session.worker.busy
    if busy is None:
        return _resting(session, event.at_ms) if session.unhealthy else Step(session)
    if not is_in_training(session, busy):
        return let_go(session, event.at_ms)
    if not event.was_ready:
        return _not_ready(session, event)
    return _died_training(session, event, busy)


def _died_training(session: Session, event: WorkerDied, busy: Lease) -> Step:
    deaths = session.worker.deaths + 1
    if deaths <= RESTARTS_MAX:
        worker = replace(session.worker, deaths=deaths)
        return _resting(replace(session, worker=worker), event.at_ms)
    before = session.declined.get(busy.job_id)
    is_again = before is not None and before.lease.round == busy.round
    times = "again" if is_again else f"{deaths} times"
    free = replace(session, worker=replace(session.worker, busy=None))
    return (
        given_up(free, f"the worker died {times}: {event.reason}")
        .then(delete_released)
        .then(next_begun)
    )


def _not_ready(session: Session, event: WorkerDied) -> Step:
    starts = session.worker.false_starts
    if starts <= RESTARTS_MAX:
        return _resting(session, event.at_ms)
    reason = f"no worker got ready in {starts} starts: {event.reason}"
    free = replace(session, worker=Worker(false_starts=starts), unhealthy=reason)
    # Said before the hand-back: a job must not take it for the word of a node that stays.
    announced = (AnnounceDraining(reason),) if session.is_connected else ()
    return (
        Step(free, announced)
        .then(lambda reached: given_up(reached, reason))
        .then(lambda reached: queue_declined(reached, reason))
        .then(lambda reached: _resting(reached, event.at_ms))
    )


def _resting(session: Session, at_ms: Milliseconds) -> Step:
    """The worker is free and starts again after a wait that grows with each failure."""
    worker = session.worker
    wait_ms = backoff_ms(f"{session.node}/worker", max(worker.deaths, worker.false_starts))
    retry_at_ms = Milliseconds(at_ms + wait_ms)
    resting = replace(session, worker=replace(worker, busy=None, retry_at_ms=retry_at_ms))
    return Step(resting, (SetTimer(Timer.WORKER, retry_at_ms),)).then(delete_released)


def restart(session: Session, event: TimerFired) -> Step:
    """The worker has rested."""
    retry_at_ms = session.worker.retry_at_ms
    if retry_at_ms == 0 or event.at_ms < retry_at_ms:
        return Step(session)
    session = replace(session, worker=replace(session.worker, retry_at_ms=Milliseconds(0)))
    if session.unhealthy:
        session = replace(session, worker=replace(session.worker, pulse=Pulse(event.at_ms)))
        return Step(session, (StartWorker(), SetTimer(Timer.STALL, _limit_at_ms(session))))
    return begin_training(session, event.at_ms)


def got_ready(session: Session, at_ms: Milliseconds) -> Step:
    """A worker is up: what kept the node from taking work is over."""
    was_unhealthy = bool(session.unhealthy)
    session = replace(session, worker=replace(session.worker, false_starts=0), unhealthy="")
    return dial_again(session, at_ms) if was_unhealthy and not session.drain else Step(session)


def note_progress(session: Session, event: TrainingProgressed) -> Step:
    """Wait for the next sign of progress as long as the slowest inner step so far suggests."""
    if not is_in_training(session, event.lease):
        return Step(session)
    pulse = session.worker.pulse
    steps = event.steps_done - pulse.steps_done
    if steps <= 0:
        return Step(session)
    step_ms = (event.at_ms - pulse.at_ms) // steps
    slowest_ms = Milliseconds(max(pulse.slowest_step_ms, step_ms))
    pulse = Pulse(event.at_ms, event.steps_done, slowest_ms)
    session = replace(session, worker=replace(session.worker, pulse=pulse))
    return Step(session, (SetTimer(Timer.STALL, _limit_at_ms(session)),))


def end_stalled(session: Session, event: TimerFired) -> Step:
    """End a worker that has shown no progress for too long: it counts as died."""
    busy = session.worker.busy
    is_training = busy is not None and is_in_training(session, busy)
    is_starting = bool(session.unhealthy) and not session.worker.retry_at_ms
    if not (is_training or is_starting) or event.at_ms < _limit_at_ms(session):
        return Step(session)
    silent_s = (event.at_ms - session.worker.pulse.at_ms) // 1000
    return Step(session, (EndWorker(f"it made no progress for {silent_s} s"),))


def _limit_at_ms(session: Session) -> Milliseconds:
    pulse, patience = session.worker.pulse, session.patience
    limit_ms = patience.first_ms
    if pulse.steps_done:
        by_steps_ms = STEPS_WITHOUT_PROGRESS * pulse.slowest_step_ms
        limit_ms = Milliseconds(max(patience.later_ms, by_steps_ms))
    return Milliseconds(pulse.at_ms + limit_ms)
