"""What a participant signs for its update, out of what it was assigned and what it sent."""

from coordinator.core.job import Job, Round, Update
from hypergpu.ids import Digest, NodeId
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import Contribution, shard_digest
from hypergpu.units import Samples


def epoch_of(round_: Round) -> int:
    """The epoch that a round is settled in."""
    return round_.number // round_.spec.pay.rounds_per_epoch


def contribution_to(job: Job, node: NodeId, update: Update) -> Contribution:
    """What a participant of the open round signs for an update that it offers."""
    if job.round is None or job.model is None:
        raise AssertionError("a contribution belongs to an open round")
    return contribution(job.terms or Terms(), job.round, job.model.blob.digest, node, update)


def contribution(
    terms: Terms, round_: Round, base: Digest, node: NodeId, update: Update
) -> Contribution:
    """What a participant of a round that started from the model ``base`` signed, or is to sign.

    Samples and steps are those that it was assigned, whatever it says.
    """
    participant = round_.participants[node]
    shard = participant.shard
    return Contribution(
        job=terms.job,
        epoch=epoch_of(round_),
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
