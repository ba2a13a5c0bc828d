"""Training as an entry of the table of kinds."""

from coordinator.core.training.assignment import assignment
from coordinator.core.training.job.events import (
    AggregateReady,
    Event,
    JobCreated,
    PaymentEvent,
    ShardHandedBack,
    UpdateReceived,
    UpdateRejected,
)
from coordinator.core.training.job.state import ENDED, Job, Phase
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work.kind import PendingWork, WorkKind
from hypergpu.assignment import FailureCause, Lease
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

SNAPSHOT_ROUNDS_MAX = 50
"""A job that evaluates less often is snapshot anyway."""
_WITHIN_A_ROUND = UpdateReceived | UpdateRejected
"""Events once a node and round: an allocation after each would cost too much."""


def _is_snapshot_due(job: Job, event: Event) -> bool:
    if not isinstance(event, AggregateReady):
        return False
    return event.model.round % min(job.spec.evaluation.every, SNAPSHOT_ROUNDS_MAX) == 0


def _moves_nodes(before: Job | None, event: Event, after: Job) -> bool:
    is_phase_new = before is None or after.phase is not before.phase
    return is_phase_new or not isinstance(event, _WITHIN_A_ROUND)


def _pending(job: Job, node: NodeId) -> tuple[PendingWork, ...]:
    participant = job.participant(node)
    if participant is None or not participant.is_open or job.lost_model:
        return ()
    if job.phase is not Phase.TRAINING and participant.base is None:
        return ()
    return (PendingWork(participant.lease, assignment(job, node)),)


def _hand_back_event(
    node: NodeId, lease: Lease, reason: str, cause: FailureCause
) -> ShardHandedBack:
    return ShardHandedBack(
        at_ms=Milliseconds(0),
        node=node,
        round=lease.round,
        lease=lease.number,
        reason=reason,
        lacks_memory=cause is FailureCause.OUT_OF_MEMORY,
    )


TRAINING = WorkKind(
    name="training",
    created=JobCreated,
    events=Event,
    state=Job,
    transition=transition,
    rejection=rejection,
    outstanding=outstanding,
    pending=_pending,
    hand_back_event=_hand_back_event,
    phase_name=lambda job: job.phase.value,
    is_paused=lambda job: job.phase is Phase.PAUSED,
    has_ended=lambda job: job.phase in ENDED,
    is_complete=lambda job: job.is_over and not job.evaluating,
    paid_by=PaymentEvent,
    is_snapshot_due=_is_snapshot_due,
    moves_nodes=_moves_nodes,
)
"""Rounds of shards whose updates are folded into one model."""
