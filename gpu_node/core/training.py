"""Training: one shard at a time, and what its end means to the work."""

from gpu_node.core.commands import SetTimer, Train
from gpu_node.core.events import (
    InputsFetched,
    Timer,
    TrainingAborted,
    TrainingFailed,
    TrainingFinished,
)
from gpu_node.core.memory import with_finished
from gpu_node.core.state import (
    Fetching,
    Pulse,
    Session,
    Step,
    Training,
    Uploading,
    Worker,
    replace,
)
from gpu_node.core.working import delete_released, given_up, next_begun, upload
from hypergpu.statements.assignment import Lease
from hypergpu.units import Milliseconds


def train_fetched(session: Session, event: InputsFetched) -> Step:
    """Train once the worker is free."""
    work = session.work
    if not isinstance(work, Fetching) or work.assignment.lease != event.lease:
        return Step(session)
    training = replace(session, work=Training(work.assignment, work.start))
    return begin_training(training, event.at_ms)


def begin_training(session: Session, at_ms: Milliseconds) -> Step:
    """Have the worker train what waits for it, once it is free and rested."""
    work, worker = session.work, session.worker
    if not isinstance(work, Training) or worker.busy is not None or worker.retry_at_ms:
        return Step(session)
    lease = work.assignment.lease
    keeps = tuple(end.lease.round for end in session.memory.ends(lease.job_id))
    session = replace(session, worker=replace(worker, busy=lease, pulse=Pulse(at_ms)))
    limit_at_ms = Milliseconds(at_ms + session.patience.first_ms)
    return Step(
        session,
        (Train(work.assignment, work.start, keeps), SetTimer(Timer.STALL, limit_at_ms)),
    )


def let_go(session: Session, at_ms: Milliseconds) -> Step:
    """The worker has nothing in hand: what waited for that can happen."""
    free = replace(session, worker=replace(session.worker, busy=None))
    return delete_released(free).then(lambda reached: begin_training(reached, at_ms))


def is_in_training(session: Session, lease: Lease) -> bool:
    """Whether the worker trains this lease, and it is still wanted."""
    work = session.work
    return (
        isinstance(work, Training)
        and work.assignment.lease == lease
        and session.worker.busy == lease
    )


def keep_update(session: Session, event: TrainingFinished) -> Step:
    """Remember the end state, then send the update. A shard dropped meanwhile is forgotten."""
    work = session.work
    if session.worker.busy != event.lease:
        return Step(session)
    if not isinstance(work, Training) or work.assignment.lease != event.lease:
        return let_go(session, event.at_ms)
    memory = with_finished(session.memory, work.assignment, work.start, event.update)
    session = replace(session, memory=memory, worker=Worker())
    return _uploading(session, Uploading(work.assignment, event.update), event).then(
        delete_released
    )


def _uploading(session: Session, work: Uploading, event: TrainingFinished) -> Step:
    """Send the update now, or after the wait that it was planned with."""
    wait_ms = work.assignment.upload_after_ms
    if not session.is_connected:
        return Step(replace(session, work=work))
    if wait_ms:
        due_at_ms = Milliseconds(event.at_ms + wait_ms)
        work = replace(work, retry_at_ms=due_at_ms)
        return Step(replace(session, work=work), (SetTimer(Timer.RETRY, due_at_ms),))
    return Step(replace(session, work=work), (upload(work),))


def hand_back_unfinished(
    session: Session, event: TrainingFailed | TrainingAborted, reason: str
) -> Step:
    """The worker let go of a shard without finishing it: hand it back, unless it was told to."""
    if session.worker.busy != event.lease:
        return Step(session)
    is_ours = is_in_training(session, event.lease)
    session = replace(session, worker=replace(session.worker, busy=None))
    if is_ours:
        return given_up(session, reason).then(delete_released).then(next_begun)
    return let_go(session, event.at_ms)
