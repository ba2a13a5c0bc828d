"""The contribution that a participant signs for its update."""

from coordinator.core.job.state import AcceptedUpdate, Job, Round
from hypergpu.ids import Digest, NodeId
from hypergpu.statements.contribution import Contribution, shard_digest
from hypergpu.statements.domain import Terms
from hypergpu.units import Samples


def offered_contribution(job: Job, node: NodeId, update: AcceptedUpdate) -> Contribution:
    """Contribution that a participant of the open round signs for an update that it offers."""
    if job.round is None or job.model is None:
        raise AssertionError("a contribution belongs to an open round")
    return contribution(job.terms, job.round, job.model.blob.digest, node, update)


def contribution(
    terms: Terms, round_: Round, base: Digest, node: NodeId, update: AcceptedUpdate
) -> Contribution:
    """Contribution of a participant of a round that started from the model ``base``.

    Samples and inner steps are those that the coordinator assigned, whatever the node states.
    """
    participant = round_.participants[node]
    shard = participant.shard
    return Contribution(
        job=terms.job,
        epoch=round_.epoch,
        round=round_.number,
        node=node,
        shard=shard_digest(shard.partition, ((run.start, run.count) for run in shard.ranges)),
        model=base,
        update=update.blob.digest,
        samples=Samples(sum(run.count for run in shard.ranges)),
        inner_steps=participant.inner_steps,
        compute_ms=update.compute_ms,
        update_bytes=update.blob.size_bytes,
        lease=participant.lease,
        nonce=update.nonce,
    )
