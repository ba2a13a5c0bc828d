"""The command that folds a closed round into the next model, and how much each update counts."""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.training.job.commands import (
    Aggregate,
    DuplicatedShards,
    FoldedUpdate,
    OwnShard,
)
from coordinator.core.training.job.state import (
    AcceptedUpdate,
    Job,
    Model,
    Round,
)
from coordinator.core.training.long_leases import (
    with_staleness,
)
from coordinator.core.training.outer_step import outer_step
from coordinator.core.training.own_data import own_weighing
from coordinator.core.training.sample_weights import Weights, update_weights
from coordinator.core.training.trust.duplicates import (
    incomparable_nodes,
    shared_weights,
    timed_nodes,
)
from coordinator.core.training.trust.token_share import cap_tokens
from hypergpu.ids import NodeId, Slot


def aggregate(job: Job, round_: Round, base: Model) -> Aggregate:
    """The command that makes the next model of ``base``: the same round gives the same one."""
    weights, scale = _weights(job, round_)
    is_newest = job.model is not None and base.blob.digest == job.model.blob.digest
    makers = _makers(job) if is_newest else None
    outer = outer_step(
        round_.spec,
        round_number=round_.number,
        # Where data stay on nodes, who takes a lost node's place brings another shard.
        participants=round_.dealt or len({each.shard for each in round_.participants.values()}),
        is_sparse=round_.is_sparse,
    )
    return Aggregate(
        round=round_.number,
        base=base,
        updates=_folded_updates(round_, weights, own_shards(round_, base)),
        trust=job.trust,
        weighing=round_.weighing,
        manifest=job.manifest,
        mixture=job.mixture,
        fallback=job.previous if makers is not None else None,
        makers=_folded_updates(makers, {}, {}) if makers is not None else (),
        spec=round_.spec,
        down=round_.down,
        outer=outer.step,
        outer_reason=outer.reason,
        scale=scale,
        duplicates=_duplicated_shards(round_),
    )


def _duplicated_shards(round_: Round) -> DuplicatedShards:
    return DuplicatedShards(
        pairs=round_.duplicates,
        incomparable=incomparable_nodes(round_),
        slow=round_.slow,
        timed=timed_nodes(round_),
        earlier={
            node: replace(
                _folded_update(each.node, each.slot, each.update, 0), experts=part.experts
            )
            for node, part, _ in round_.accepted_updates
            if (each := part.duplicate) is not None
        },
    )


def _makers(job: Job) -> Round | None:
    """The round whose updates made the newest model; None: the job went back to that model."""
    weighing = job.closed.weighing if job.closed is not None else None
    return None if weighing is not None and weighing.rollback else job.closed


def own_shards(round_: Round, base: Model) -> dict[NodeId, OwnShard]:
    """Shards of a round's participants; none where the samples stay on the nodes.

    Args:
        round_: Open or closing.
        base: The model that it was opened with.
    """
    if round_.spec.data.stays_on_nodes:
        return {}
    return {
        node: OwnShard(
            lease=part.lease,
            partition=part.shard.partition,
            ranges=part.shard.ranges,
            base=(part.base.model if part.base is not None else base).blob,
        )
        for node, part in round_.participants.items()
    }


def _folded_updates(
    round_: Round, weights: Mapping[NodeId, int], shards: Mapping[NodeId, OwnShard]
) -> tuple[FoldedUpdate, ...]:
    return tuple(
        replace(
            _folded_update(node, participant.slot, update, weights.get(node, 0)),
            experts=participant.experts,
            own=shards.get(node),
        )
        for node, participant, update in round_.accepted_updates
    )


def _folded_update(node: NodeId, slot: Slot, update: AcceptedUpdate, weight: int) -> FoldedUpdate:
    return FoldedUpdate(
        node=node,
        slot=slot,
        blob=update.blob,
        weight=weight,
        codec=update.codec,
        inner_steps=update.inner_steps,
    )


def _weights(job: Job, round_: Round) -> Weights:
    """Samples, unless inner steps differ on purpose: then the weights of the plan's rule."""
    updates = {node: own_weighing(job, update) for node, _, update in round_.accepted_updates}
    own_weights = update_weights(
        updates, round_.spec.data.sharding if round_.spec.strategy == "aware" else "iid"
    )
    shared_by_node = shared_weights(own_weights.weights, round_)
    tokens = {node: job.members[node].token for node in shared_by_node}
    trust = round_.spec.trust
    share = trust.token_share if trust.rule == "robust" else 1.0
    return own_weights._replace(
        weights=cap_tokens(with_staleness(shared_by_node, round_), tokens, share)
    )
