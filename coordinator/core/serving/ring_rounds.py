"""Rounds of a training through a ring, as the journal has them.

A ring is the only participant of its rounds, so that the fold of a round is the identity: what its
stages offer is the next model, layer by layer, once all of them have offered theirs.
"""

from math import isfinite

from msgspec.structs import replace

from coordinator.core.serving.events import RingRoundStored
from coordinator.core.serving.leasing import ServeStep, lease_replicas
from coordinator.core.serving.state import ServeJob, StoredRound
from hypergpu.rings.stage_work import layer_blob
from hypergpu.units import several


def stored_round_rejection(job: ServeJob, event: RingRoundStored) -> str:
    """Why a round cannot count; empty: it can."""
    training, cut = job.request.training, job.request.cut
    if training is None or cut is None:
        return f"{job.job_id} trains nothing"
    stored_step = 0 if job.stored_round is None else job.stored_round.step
    if not stored_step < event.step <= training.steps:
        return f"{job.job_id} has the model of step {stored_step} of {training.steps}"
    if event.rounds != -(-event.step // training.inner_steps):
        return f"step {event.step} is not after {several(event.rounds, 'round')}"
    if event.adapter.keys() != set(map(layer_blob, range(cut.layers))):
        return "the adapter lacks layers, or has too many"
    are_finite = isfinite(event.loss) and isfinite(event.held_out_loss or 0.0)
    return "" if are_finite else "the loss is not finite"


def take_stored_round(job: ServeJob, event: RingRoundStored) -> ServeStep:
    """Go on from this round, whatever happens."""
    stored_round = StoredRound(
        rounds=event.rounds,
        step=event.step,
        loss=event.loss,
        adapter=event.adapter,
        held_out_loss=event.held_out_loss,
    )
    return lease_replicas(replace(job, stored_round=stored_round))
