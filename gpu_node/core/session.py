"""The node's machine: one pure step for each event.

Theory of operation. Three things move side by side. The *link* joins, connects, breaks and
connects again. The *work* goes ``idle -> fetching -> training -> uploading -> idle``; it needs the
link to fetch and to upload, never to train. The *worker* holds at most one shard; told to drop it,
it counts as busy until it has. Work of the same job replaces what is at hand, since a lease is void
once another one is given; work of other jobs waits in line. Each assignment ends in exactly one of:
its update accepted, the coordinator's word that it is void, or a hand-back with a reason.

The shell persists `Session.memory` before it performs a step's commands. Commands may be performed
twice; events that no longer fit change nothing.
"""

from gpu_node.core.backoff import CAP_MS
from gpu_node.core.events import (
    DrainRequested,
    Event,
    FetchBroken,
    FetchRefused,
    InputsFetched,
    JobReleased,
    ShardAssigned,
    ShardCancelled,
    StopRequested,
    Timer,
    TimerFired,
    TrainingAborted,
    TrainingFailed,
    TrainingFinished,
    TrainingProgressed,
    UpdateAccepted,
    UpdateLate,
    UpdateRefused,
    UploadBroken,
    WorkerDied,
    WorkerReady,
)
from gpu_node.core.leaving import drain, leave_if_drained, overdue, stop
from gpu_node.core.linking import advance_link
from gpu_node.core.memory import Memory
from gpu_node.core.state import (
    DRAIN_LIMIT_MS,
    PATIENCE,
    Connection,
    Fetching,
    Patience,
    Session,
    Step,
    Uploading,
)
from gpu_node.core.training import hand_back_unfinished, keep_update, train_fetched
from gpu_node.core.worker import end_stalled, got_ready, note_progress, restart, restart_later
from gpu_node.core.working import (
    cancel_work,
    drop_work,
    finish_upload,
    given_up,
    next_begun,
    release_job,
    retry_later,
    retry_transfer,
    take_assignment,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


def fresh_session(
    node: NodeId,
    memory: Memory | None = None,
    *,
    drain_limit_ms: Milliseconds = DRAIN_LIMIT_MS,
    reconnect_cap_ms: Milliseconds = CAP_MS,
    patience: Patience = PATIENCE,
) -> Session:
    """A session before `Started`, with what the node remembers of its earlier life."""
    return Session(
        node=node,
        memory=memory or Memory(),
        drain_limit_ms=drain_limit_ms,
        reconnect_cap_ms=reconnect_cap_ms,
        patience=patience,
    )


def transition(session: Session, event: Event) -> Step:
    """Advance the node by one event."""
    if session.link.connection is Connection.LEFT:
        return Step(session)
    return _advance(session, event).then(lambda reached: leave_if_drained(reached, event.at_ms))


def _advance(session: Session, event: Event) -> Step:
    match event:
        case ShardAssigned() | ShardCancelled() | JobReleased():
            return _on_coordinator_event(session, event)
        case InputsFetched() | FetchBroken() | FetchRefused():
            return _on_transfer_event(session, event)
        case TrainingFinished() | TrainingFailed() | TrainingAborted():
            return _on_training_event(session, event)
        case UpdateAccepted() | UpdateLate() | UpdateRefused() | UploadBroken():
            return _on_upload_event(session, event)
        case TimerFired():
            return _on_timer(session, event)
        case DrainRequested() | StopRequested():
            return _on_leave_event(session, event)
        case TrainingProgressed() | WorkerReady() | WorkerDied():
            return _on_worker_event(session, event)
        case _:
            return advance_link(session, event)


def _on_coordinator_event(
    session: Session, event: ShardAssigned | ShardCancelled | JobReleased
) -> Step:
    if not session.is_connected:
        # A word from a stream that broke since; the next stream repeats what still holds.
        return Step(session)
    match event:
        case ShardAssigned(assignment=assignment):
            return take_assignment(session, assignment)
        case ShardCancelled(lease=lease):
            return cancel_work(session, lease)
        case JobReleased(job_id=job_id):
            return release_job(session, job_id)


def _on_transfer_event(session: Session, event: InputsFetched | FetchBroken | FetchRefused) -> Step:
    match event:
        case InputsFetched():
            return train_fetched(session, event)
        case FetchBroken():
            return retry_later(session, event)
        case FetchRefused(lease=lease, reason=reason):
            work = session.work
            if not isinstance(work, Fetching) or work.assignment.lease != lease:
                return Step(session)
            return given_up(session, reason).then(next_begun)


def _on_training_event(
    session: Session, event: TrainingFinished | TrainingFailed | TrainingAborted
) -> Step:
    match event:
        case TrainingFinished():
            return keep_update(session, event)
        case TrainingFailed(reason=reason):
            return hand_back_unfinished(session, event, reason)
        case TrainingAborted():
            return hand_back_unfinished(session, event, "the worker dropped the shard unasked")


def _on_worker_event(
    session: Session, event: TrainingProgressed | WorkerReady | WorkerDied
) -> Step:
    match event:
        case TrainingProgressed():
            return note_progress(session, event)
        case WorkerReady(at_ms=at_ms):
            return got_ready(session, at_ms)
        case WorkerDied():
            return restart_later(session, event)


def _on_upload_event(
    session: Session, event: UpdateAccepted | UpdateLate | UpdateRefused | UploadBroken
) -> Step:
    work = session.work
    if not isinstance(work, Uploading) or work.assignment.lease != event.lease:
        return Step(session)
    match event:
        case UpdateAccepted(lease=lease):
            return finish_upload(session, lease)
        case UpdateLate():
            return drop_work(session).then(next_begun)
        case UpdateRefused(reason=reason):
            return given_up(session, reason).then(next_begun)
        case UploadBroken():
            return retry_later(session, event)


def _on_leave_event(session: Session, event: DrainRequested | StopRequested) -> Step:
    match event:
        case DrainRequested():
            return drain(session, event)
        case StopRequested():
            return stop(session, event)


def _on_timer(session: Session, event: TimerFired) -> Step:
    match event.timer:
        case Timer.RECONNECT:
            return advance_link(session, event)
        case Timer.RETRY:
            return retry_transfer(session, event)
        case Timer.WORKER:
            return restart(session, event)
        case Timer.STALL:
            return end_stalled(session, event)
        case Timer.DRAIN:
            return overdue(session)
