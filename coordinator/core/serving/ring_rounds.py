"""Rounds of a training through rings, as the journal has them.

One ring is the only participant of its rounds, so that the fold of a round is the identity: what
its stages offer is the next model, layer by layer, once all of them have offered theirs. Several
rings are the participants of a DiLoCo round: what those gave that counts was folded before.
"""

from collections.abc import Collection
from math import isfinite

from msgspec.structs import replace

from coordinator.core.serving.events import RingRoundStored
from coordinator.core.serving.leasing import ServeStep, cancel, lease_replicas, without_lease
from coordinator.core.serving.state import ServeJob, StoredRound
from hypergpu.rings.ring_training import RingTraining
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
    layer_names = frozenset(map(layer_blob, range(cut.layers)))
    adapters = (event.adapter, *event.ring_adapters.values())
    if any(adapter.keys() != layer_names for adapter in adapters):
        return "the adapter lacks layers, or has too many"
    if reason := _shares_rejection(training, event, layer_names):
        return reason
    losses = (event.loss, event.held_out_loss or 0.0, *(each.loss for each in event.shares))
    return "" if all(map(isfinite, losses)) else "the loss is not finite"


def _shares_rejection(
    training: RingTraining, event: RingRoundStored, layer_names: Collection[str]
) -> str:
    rings = [each.ring for each in event.shares]
    if training.rings == 1:
        has_any = rings or event.ring_adapters or event.momentum
        return "the training has one ring" if has_any else ""
    if not rings or len(set(rings)) != len(rings) or not set(rings) <= set(range(training.rings)):
        return f"it names no rings of {training.rings}, or one twice"
    if not set(event.ring_adapters) <= set(rings[1:]):
        return "it has adapters of a ring that has no part in it"
    has_others = event.momentum.keys() - set(layer_names)
    return "the momentum has layers that the model has not" if has_others else ""


def take_stored_round(job: ServeJob, event: RingRoundStored) -> ServeStep:
    """Go on from this round, whatever happens. After the last one the first ring stays alone."""
    rings_before = job.rings
    stored_round = StoredRound(
        rounds=event.rounds,
        step=event.step,
        loss=event.loss,
        adapter=event.adapter,
        held_out_loss=event.held_out_loss,
        rings=max(1, len(event.shares)),
        ring_adapters=event.ring_adapters,
        momentum=event.momentum,
    )
    step = ServeStep(replace(job, stored_round=stored_round))
    if step.job.rings < rings_before:
        step = _with_first_ring_alone(step)
    return step.then(lease_replicas(step.job))


def _with_first_ring_alone(step: ServeStep) -> ServeStep:
    """End the leases of all further rings, and of a node that stands by for them."""
    spans = {each.span for each in step.job.stages_of(0).values()}
    for node, replica in step.job.leases.items():
        if replica.ring or (replica.is_standby and replica.span not in spans):
            command = cancel(step.job, node, "the training is over: the first ring answers")
            step = ServeStep(without_lease(step.job, node), (*step.commands, command))
    return step
