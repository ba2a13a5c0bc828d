"""The machine of a node: one pure step for each event.

Theory of operation. Three things advance side by side. The *link* joins, connects, breaks and
connects again. The *work* goes ``idle -> fetching -> training -> uploading -> idle``; it needs the
link to fetch and to upload, never to train. The *worker* trains at most one shard; told to drop it,
it counts as busy until it has. Work of the same job replaces the work at hand, since a lease is
void once another one is given; work of other jobs waits in a queue. Each assignment ends in one of:
its update accepted, its lease void by the coordinator's word, or a hand-back with a reason.

The shell persists `NodeSession.memory` before it performs a step's commands. Commands may be
performed twice; events that no longer fit change nothing.
"""

from collections.abc import Callable
from typing import Any

from gpu_node.core.events import (
    Connected,
    DrainRequested,
    FetchBroken,
    FetchRejected,
    InputsFetched,
    JobReleased,
    Joined,
    JoinFailed,
    JoinRejected,
    LinkLost,
    LinkRejected,
    NodeEvent,
    ShardAssigned,
    ShardCancelled,
    Started,
    StopRequested,
    Timer,
    TimerFired,
    TrainingAborted,
    TrainingFailed,
    TrainingFinished,
    TrainingProgressed,
    UploadAccepted,
    UploadBroken,
    UploadLate,
    UploadRejected,
    WorkerDied,
    WorkerReady,
)
from gpu_node.core.leave import drain, give_up_overdue, leave_if_drained, stop
from gpu_node.core.link import advance_link
from gpu_node.core.state import LinkPhase, NodeSession, SessionStep
from gpu_node.core.training import (
    end_stalled_worker,
    hand_back_unfinished,
    keep_update,
    note_progress,
    note_ready_worker,
    restart_worker,
    restart_worker_later,
    train_fetched,
)
from gpu_node.core.work import (
    cancel_work,
    drop_late_update,
    finish_upload,
    hand_back_rejected,
    release_job,
    retry_later,
    retry_transfer,
    take_assignment,
)

_FROM_COORDINATOR = (ShardAssigned, ShardCancelled, JobReleased)
_HANDLERS: dict[type[NodeEvent], Callable[[NodeSession, Any], SessionStep]] = {
    Started: advance_link,
    Joined: advance_link,
    JoinFailed: advance_link,
    JoinRejected: advance_link,
    Connected: advance_link,
    LinkLost: advance_link,
    LinkRejected: advance_link,
    ShardAssigned: take_assignment,
    ShardCancelled: cancel_work,
    JobReleased: release_job,
    InputsFetched: train_fetched,
    FetchBroken: retry_later,
    FetchRejected: hand_back_rejected,
    TrainingFinished: keep_update,
    TrainingFailed: hand_back_unfinished,
    TrainingAborted: hand_back_unfinished,
    TrainingProgressed: note_progress,
    WorkerReady: note_ready_worker,
    WorkerDied: restart_worker_later,
    UploadAccepted: finish_upload,
    UploadLate: drop_late_update,
    UploadRejected: hand_back_rejected,
    UploadBroken: retry_later,
    DrainRequested: drain,
    StopRequested: stop,
}
_TIMER_HANDLERS: dict[Timer, Callable[[NodeSession, TimerFired], SessionStep]] = {
    Timer.RECONNECT: advance_link,
    Timer.RETRY: retry_transfer,
    Timer.WORKER: restart_worker,
    Timer.STALL: end_stalled_worker,
    Timer.DRAIN: give_up_overdue,
}


def transition(session: NodeSession, event: NodeEvent) -> SessionStep:
    """Advance the node by one event."""
    if session.link.phase is LinkPhase.LEFT:
        return SessionStep(session)
    return _advance(session, event).then(lambda reached: leave_if_drained(reached, event.at_ms))


def _advance(session: NodeSession, event: NodeEvent) -> SessionStep:
    if isinstance(event, TimerFired):
        return _TIMER_HANDLERS[event.timer](session, event)
    if isinstance(event, _FROM_COORDINATOR) and not session.is_connected:
        # The stream of this message broke since; the next stream repeats what still holds.
        return SessionStep(session)
    return _HANDLERS[type(event)](session, event)
