"""Which samples go to whom.

A prefetch is a piece of a stream like a shard, kept with a member until the next round opens. There
it becomes the beginning of the member's shard, or goes back into the stream: nothing is dropped,
and nothing counts that no accepted update covers.
"""

from collections.abc import Mapping
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.training.job.state import Job, Member, Shard, Stream
from coordinator.core.training.plan.decision import NodePlan, RoundPlan
from coordinator.core.training.streams import return_samples, shard_samples, take_samples
from hypergpu.assignment import Prefetch
from hypergpu.ids import NodeId
from hypergpu.units import Samples


class ShardDeal(NamedTuple):
    """Who has which samples once the round is open."""

    shards: dict[NodeId, Shard]
    prefetched: dict[NodeId, Prefetch]
    """The beginnings of shards that were prefetches of the round before."""
    members: dict[NodeId, Member]
    streams: tuple[Stream, ...]


def seed_for(job_seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    text = "/".join((str(job_seed), purpose, *map(str, keys)))
    return int.from_bytes(blake3(text.encode()).digest(8), "big") >> 1


def due_prefetch(job: Job, node: NodeId) -> Prefetch | None:
    """A member's prefetch of the round after the newest model's; None without one."""
    prefetch = job.members[node].prefetch
    is_due = prefetch is not None and job.model is not None and prefetch.round == job.model.round
    return prefetch if is_due else None


def deal_shards(job: Job, plan: RoundPlan, total_samples: Samples) -> ShardDeal:
    """Give every node of the plan its shard and, unless the job is done then, its next prefetch.

    Args:
        job: The job before the round.
        plan: The plan of the round.
        total_samples: With so many the job is done, and schedules end there.
    """
    stated_batch, streams = job.spec.training.batch_size, list(job.streams)
    members, prefetches = dict(job.members), {}
    for node, member in job.members.items():
        if (prefetch := member.prefetch) is None:
            continue
        members[node] = replace(member, prefetch=None)
        if _is_of_use(prefetch, plan.round, plan.nodes.get(node), stated_batch):
            prefetches[node] = prefetch
        else:
            return_samples(streams, job.partition_of(node), prefetch.ranges)
    shards = {}
    places = _partitions(job, plan, streams, prefetches)
    for node, part in plan.nodes.items():
        first = prefetches[node].ranges if node in prefetches else ()
        samples = Samples(part.inner_steps * part.batch(stated_batch) - shard_samples(first))
        place = places[node]
        rest, streams[place] = take_samples(streams[place], samples)
        shards[node] = Shard(place, (*first, *rest))
    done_samples = job.tally.samples + sum(shard_samples(shard.ranges) for shard in shards.values())
    for node, part in plan.nodes.items() if done_samples < total_samples else ():
        if not part.prefetch_steps:
            continue
        slot, number = members[node].slot, plan.round + 1
        place = job.partition_of(node)
        samples = Samples(part.prefetch_steps * part.batch(stated_batch))
        ranges, streams[place] = take_samples(streams[place], samples)
        seed = seed_for(job.spec.training.seed, "prefetch", slot, number)
        prefetch = Prefetch(
            number, part.prefetch_steps, ranges, seed, Samples(done_samples), total_samples
        )
        members[node] = replace(members[node], prefetch=prefetch)
    return ShardDeal(shards, prefetches, members, tuple(streams))


def _partitions(
    job: Job, plan: RoundPlan, streams: list[Stream], prefetched: Mapping[NodeId, Prefetch]
) -> dict[NodeId, int]:
    """The partition of each node: its own, or one that was left behind by nodes that have no part
    in the round; those who take one over are others from round to round. Where data stay on nodes
    there is nothing to take over.
    """
    places = {node: job.partition_of(node) for node in plan.nodes}
    if job.spec.data.stays_on_nodes:
        return places
    served_partitions = set(places.values())
    orphan_partitions = [
        n for n, stream in enumerate(streams) if stream.returned and n not in served_partitions
    ]
    free = [node for node in places if node not in prefetched]
    for count, partition in enumerate(orphan_partitions[: len(free)]):
        places[free[(plan.round + count) % len(free)]] = partition
    return places


def _is_of_use(prefetch: Prefetch, number: int, part: NodePlan | None, stated: int) -> bool:
    """Whether the node takes part, with so many steps of that size at least."""
    if part is None or prefetch.round != number or part.inner_steps < prefetch.inner_steps:
        return False
    return shard_samples(prefetch.ranges) == prefetch.inner_steps * part.batch(stated)
