"""The machine of a node: one pure step for each event.

Theory of operation. Three things advance side by side. The *link* joins, connects, breaks and
connects again. The *work* goes ``idle -> fetching -> training -> uploading -> idle``; it needs the
link to fetch and to upload, never to train. Work of a kind other than training goes the same way,
as *executing* and *contributing*. The *worker* does one thing at a time; told to drop it, it
counts as busy until it has. Work of the same job replaces the work at hand, since a lease is void
once another one is given, unless it is said to come after it (`next_work`); work of other jobs
waits in a queue. Each assignment ends in one of: its
update or result accepted, its lease void by the coordinator's word, or a hand-back with a reason.

The shell persists `NodeSession.memory` before it performs a step's commands. Commands may be
performed twice; events that no longer fit change nothing.

A worker that dies under a shard says little about the machine: after some restarts that shard alone
is handed back. One that does not even get ready shows that nothing can be trained here: the node
then takes no work, announces it, and goes on trying until a start succeeds.
"""

from collections.abc import Callable
from typing import Any

from gpu_node.core import events
from gpu_node.core.leaving import (
    change_availability,
    drain,
    give_up_overdue,
    leave_if_drained,
    stop,
)
from gpu_node.core.link import advance_link
from gpu_node.core.next_work import retry_fetching
from gpu_node.core.session_state import (
    Contributing,
    Fetching,
    LinkPhase,
    NodeSession,
    SessionStep,
    Transferring,
    Uploading,
)
from gpu_node.core.training import (
    compute_fetched,
    end_stalled_worker,
    hand_back_unfinished,
    keep_result,
    keep_update,
    note_progress,
    note_ready_worker,
    restart_worker,
    restart_worker_later,
    start_next,
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

_FROM_COORDINATOR = (
    events.ShardAssigned,
    events.WorkAssigned,
    events.ShardCancelled,
    events.JobReleased,
)
_HANDLERS: dict[type[events.NodeEvent], Callable[[NodeSession, Any], SessionStep]] = {
    events.Started: advance_link,
    events.Joined: advance_link,
    events.JoinFailed: advance_link,
    events.JoinRejected: advance_link,
    events.Connected: advance_link,
    events.LinkLost: advance_link,
    events.LinkRejected: advance_link,
    events.ShardAssigned: take_assignment,
    events.WorkAssigned: take_assignment,
    events.ShardCancelled: cancel_work,
    events.JobReleased: release_job,
    events.InputsFetched: compute_fetched,
    events.FetchBroken: retry_later,
    events.FetchRejected: hand_back_rejected,
    events.TrainingFinished: keep_update,
    events.WorkFinished: keep_result,
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
_SENDING = (Uploading, Contributing)
_WORK: dict[type[events.NodeEvent], tuple[type[Transferring], ...]] = {
    events.InputsFetched: (Fetching,),
    events.FetchBroken: (Fetching,),
    events.FetchRejected: (Fetching,),
    events.UploadAccepted: _SENDING,
    events.UploadLate: _SENDING,
    events.UploadRejected: _SENDING,
    events.UploadBroken: _SENDING,
}
"""The work that the end of a transfer belongs to; for other work, or another lease, it is late."""
_TIMER_HANDLERS: dict[events.Timer, Callable[[NodeSession, events.TimerFired], SessionStep]] = {
    events.Timer.RECONNECT: advance_link,
    events.Timer.RETRY: retry_transfer,
    events.Timer.RETRY_NEXT: retry_fetching,
    events.Timer.WORKER: restart_worker,
    events.Timer.STALL: end_stalled_worker,
    events.Timer.DRAIN: give_up_overdue,
}


def transition(session: NodeSession, event: events.NodeEvent) -> SessionStep:
    """Advance the node by one event."""
    if session.link.phase is LinkPhase.LEFT:
        return SessionStep(session)
    step = _advance(session, event).then(lambda reached: start_next(reached, event.at_ms))
    return step.then(lambda reached: leave_if_drained(reached, event.at_ms))


def _advance(session: NodeSession, event: events.NodeEvent) -> SessionStep:
    if isinstance(event, events.TimerFired):
        return _TIMER_HANDLERS[event.timer](session, event)
    if isinstance(event, _FROM_COORDINATOR) and not session.is_connected:
        # The stream of this message broke since; the next stream repeats what still holds.
        return SessionStep(session)
    if (work := _WORK.get(type(event))) is not None and not _is_at(session, work, event):
        return SessionStep(session)
    return _HANDLERS[type(event)](session, event)


def _is_at(session: NodeSession, work: tuple[type[Transferring], ...], event: Any) -> bool:
    return any(
        isinstance(each, work) and each.assignment.lease == event.lease
        for each in (session.work, session.next_work)
    )
