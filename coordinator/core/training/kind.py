"""Training as an entry of the table of kinds."""

from coordinator.core.training.job.events import (
    AggregateReady,
    Event,
    JobCreated,
    PaymentEvent,
    UpdateReceived,
    UpdateRejected,
)
from coordinator.core.training.job.state import ENDED, Job, Phase
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work.kind import WorkKind

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


TRAINING = WorkKind(
    name="training",
    created=JobCreated,
    events=Event,
    state=Job,
    transition=transition,
    rejection=rejection,
    outstanding=outstanding,
    phase_name=lambda job: job.phase.value,
    is_paused=lambda job: job.phase is Phase.PAUSED,
    has_ended=lambda job: job.phase in ENDED,
    paid_by=PaymentEvent,
    is_snapshot_due=_is_snapshot_due,
    moves_nodes=_moves_nodes,
)
"""Rounds of shards whose updates are folded into one model."""
