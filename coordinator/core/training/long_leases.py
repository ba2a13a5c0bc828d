"""Leases over several rounds: work of nodes that no round waits for.

A node whose least work, or whose bytes, take longer than a round trains on the model that it was
given while rounds open and close without it. Its update is folded by the round that closes after
it came. Until then the open round knows nothing of it: it counts in no quorum, no deadline and no
outer step.

A lease names its base, its last round and a number, and is void once its last round has closed;
its samples then go back into the stream. So is one whose node is lost or whose job is paused.

An update counts less the more rounds were folded since its base, by a rule that its node cannot
turn to its profit: who holds an update back only loses weight.
"""

from math import sqrt

from msgspec.structs import replace

from coordinator.core.training.job.commands import CancelShard
from coordinator.core.training.job.state import (
    EarlierDuplicate,
    Job,
    LeaseBase,
    Participant,
    Round,
    Stream,
)
from coordinator.core.training.plan.decision import RoundPlan
from coordinator.core.training.plan.long_work import ROUNDS_MOST
from coordinator.core.training.streams import return_samples, shard_samples
from coordinator.core.work.leases import WorkState
from hypergpu.ids import NodeId
from hypergpu.units import Samples

BASES_MOST = 8
"""Models that are kept at once for leases over several rounds, beside the newest."""


def staleness(participant: Participant, number: int) -> int:
    """Rounds that were folded between the participant's base and round ``number``, which folds it;
    0: none.
    """
    return number - participant.base.round if participant.base is not None else 0


def staleness_factor(rounds: int) -> float:
    """What a sample of an update counts that so many rounds came before: ``1 / sqrt(1 + rounds)``,
    as in FedBuff (arXiv:2106.06639). At least a quarter, after 15 rounds.
    """
    return 1 / sqrt(1 + rounds)


_FINE = 1 << 10
"""Weights of a round are so many times finer where one of its updates counts less."""


def with_staleness(weights: dict[NodeId, int], round_: Round) -> dict[NodeId, int]:
    """The weights of a closed round's updates with the staleness of each."""
    stale = {node: staleness(round_.participants[node], round_.number) for node in weights}
    if not any(stale.values()):
        return weights
    return {
        node: max(1, int(weight * _FINE * staleness_factor(stale[node])))
        for node, weight in weights.items()
    }


def lease_base(job: Job, rounds: int, total_samples: Samples) -> LeaseBase:
    """Base of a lease of so many rounds that is given out with the newest model."""
    model = job.newest_model
    return LeaseBase(
        round=model.round,
        last_round=model.round + min(rounds, ROUNDS_MOST) - 1,
        spec=job.spec,
        model=model,
        base_samples=job.tally.samples,
        total_samples=total_samples,
    )


def is_base_free(job: Job) -> bool:
    """Whether one more model may be kept for leases over several rounds."""
    held_rounds = {
        each.base.round for each in job.long_leases.values() if each.base and each.is_open
    }
    return len(held_rounds) < BASES_MOST


def reserved_samples(job: Job) -> Samples:
    """Samples of leases over several rounds that are under way: the job's funding covers them."""
    open_ = (each for each in job.long_leases.values() if each.is_open)
    return Samples(sum(shard_samples(each.shard.ranges) for each in open_))


def within_quota(job: Job, plan: RoundPlan) -> RoundPlan:
    """The plan, in which nobody begins a lease over several rounds where no further model may be
    kept for one: those nodes rest until a lease has ended.
    """
    if is_base_free(job):
        return plan
    waiting_nodes = {node for node, part in plan.nodes.items() if part.rounds > 1}
    nodes = {node: part for node, part in plan.nodes.items() if node not in waiting_nodes}
    why = f"leases over several rounds hold {BASES_MOST} models, the most: it waits for one to end"
    return replace(plan, nodes=nodes, resting={**plan.resting, **dict.fromkeys(waiting_nodes, why)})


def with_long_lease(job: Job, node: NodeId, participant: Participant) -> Job:
    """The job with the node's lease over several rounds."""
    return replace(job, long_leases={**job.long_leases, node: participant})


def with_earlier_duplicates(job: Job, round_: Round) -> Job:
    """The job as the round closes, in which each lease over several rounds knows the update that
    another node made of its shard in this round, in the same passes over its batches.
    """
    leases = dict(job.long_leases)
    for node, participant, update in round_.accepted_updates:
        lease = leases.get(participant.repeats) if participant.repeats is not None else None
        if participant.repeats is None or lease is None or lease.shard != participant.shard:
            continue
        if _passes(lease) == _passes(participant):
            duplicate = EarlierDuplicate(node, participant.slot, update)
            leases[participant.repeats] = replace(lease, duplicate=duplicate)
    return replace(job, long_leases=leases)


def _passes(participant: Participant) -> tuple[int, bool]:
    return participant.plan.micro_batch, participant.plan.checkpoints_activations


def void_leases(job: Job, nodes: set[NodeId], reason: str) -> tuple[Job, tuple[CancelShard, ...]]:
    """Take leases over several rounds back, as far as they are under way, and put their samples
    back into the streams.
    """
    void = {n: each for n, each in job.long_leases.items() if n in nodes and each.is_open}
    if not void:
        return job, ()
    streams: list[Stream] = list(job.streams)
    for each in void.values():
        return_samples(streams, each.shard.partition, each.shard.ranges)
    leases = {node: each for node, each in job.long_leases.items() if node not in void}
    job = replace(job, long_leases=leases, streams=tuple(streams))
    return job, tuple(
        CancelShard(node, each.base.round, each.lease, reason)
        for node, each in void.items()
        if each.base is not None
    )


def void_all(job: Job, reason: str) -> tuple[Job, tuple[CancelShard, ...]]:
    """The same for all of them."""
    return void_leases(job, set(job.long_leases), reason)


def folded_leases(job: Job, round_: Round) -> dict[NodeId, Participant]:
    """Participants by leases over several rounds that a closing round takes over: those whose
    update is in, and, as cut, those for whom it was the last round.
    """
    participants = {}
    for node, each in job.long_leases.items():
        if each.work is WorkState.RECEIVED:
            participants[node] = each
        elif each.base is not None and each.base.last_round <= round_.number:
            participants[node] = replace(each, work=WorkState.CUT)
    return participants
