"""What a closed round becomes: the fold that makes the next model."""

from coordinator.core.job.commands import Aggregate, FoldedUpdate
from coordinator.core.job.state import AcceptedUpdate, Job, Model, Participant, Round, WorkState
from coordinator.core.plan.weights import UpdateWork, Weights, update_weights
from hypergpu.ids import NodeId


def aggregate(job: Job) -> Aggregate:
    """The command that folds the closed round's updates, in slot order."""
    if job.round is None or job.model is None:
        raise AssertionError("nothing to aggregate")
    return fold_command(job.round, job.model)


def fold_command(round_: Round, base: Model) -> Aggregate:
    """The command that makes the next model of ``base``: the same round gives the same one."""
    received = {
        node: (participant, participant.update)
        for node, participant in round_.participants.items()
        if participant.work is WorkState.RECEIVED and participant.update is not None
    }
    weights, scale = _weights(round_, {node: update for node, (_, update) in received.items()})
    updates = [
        _term(node, participant, update, weight=weights[node])
        for node, (participant, update) in received.items()
    ]
    return Aggregate(
        round=round_.number,
        base=base,
        updates=tuple(sorted(updates, key=lambda update: update.slot)),
        spec=round_.spec,
        down=round_.down,
        is_sparse=round_.is_sparse,
        scale=scale,
    )


def _term(
    node: NodeId, participant: Participant, update: AcceptedUpdate, *, weight: int
) -> FoldedUpdate:
    return FoldedUpdate(node, participant.slot, update.blob, weight, update.codec)


def _weights(round_: Round, updates: dict[NodeId, AcceptedUpdate]) -> Weights:
    """By samples, unless inner steps differ on purpose: then as the plan's rule has it."""
    if round_.spec.strategy != "aware":
        return Weights({node: update.samples for node, update in updates.items()}, 1.0)
    made = {
        node: UpdateWork(update.samples, update.inner_steps) for node, update in updates.items()
    }
    return update_weights(made, round_.spec.data.sharding)
