"""What nodes take on when a round opens: their shards, and what they may begin the next one with.

A grant is a piece of a stream like a shard, held by a member until the next round opens. There it
becomes the beginning of the member's shard, or goes back into the stream: nothing is dropped, and
nothing counts that no accepted update covers.
"""

from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.job import Ahead, Job, Member, SampleRange, Shard, Stream
from coordinator.core.plan.decision import NodePlan, RoundPlan
from coordinator.core.round.seeds import seed_for
from coordinator.core.round.streams import return_samples, take_samples
from hypergpu.ids import NodeId
from hypergpu.units import Samples


class Dealt(NamedTuple):
    """Who holds which samples once the round is open."""

    shards: dict[NodeId, Shard]
    begun: dict[NodeId, Ahead]
    """What shards begin with that was granted with the round before."""
    members: dict[NodeId, Member]
    streams: tuple[Stream, ...]


def shard_samples(ranges: tuple[SampleRange, ...]) -> Samples:
    """How many samples a shard holds."""
    return Samples(sum(range_.count for range_ in ranges))


def due_prefetch(job: Job, node: NodeId) -> Ahead | None:
    """What a member may begin the round after the newest model's with, if there is something."""
    ahead = job.members[node].ahead
    is_due = ahead is not None and job.model is not None and ahead.round == job.model.round
    return ahead if is_due else None


def deal_shards(job: Job, plan: RoundPlan, total_samples: Samples) -> Dealt:
    """Give every node of the plan its shard and, unless the job is done then, its next grant.

    Args:
        job: Before the round.
        plan: Of the round.
        total_samples: With so many the job is done, and schedules end there.
    """
    stated, streams = job.spec.training.batch_size, list(job.streams)
    members, begun = dict(job.members), {}
    for node, member in job.members.items():
        if (ahead := member.ahead) is None:
            continue
        members[node] = replace(member, ahead=None)
        if _is_of_use(ahead, plan.round, plan.nodes.get(node), stated):
            begun[node] = ahead
        else:
            place = ahead.shard.partition
            streams[place] = return_samples(streams[place], ahead.shard.ranges)
    shards = {}
    for node, part in plan.nodes.items():
        first = begun[node].shard.ranges if node in begun else ()
        samples = Samples(part.inner_steps * part.batch(stated) - shard_samples(first))
        place = members[node].slot % len(streams)
        rest, streams[place] = take_samples(streams[place], samples)
        shards[node] = Shard(place, (*first, *rest))
    done = job.tally.samples + sum(shard_samples(shard.ranges) for shard in shards.values())
    for node, part in plan.nodes.items() if done < total_samples else ():
        if not part.ahead_steps:
            continue
        place, number = shards[node].partition, plan.round + 1
        samples = Samples(part.ahead_steps * part.batch(stated))
        ranges, streams[place] = take_samples(streams[place], samples)
        members[node] = replace(
            members[node],
            ahead=Ahead(
                round=number,
                inner_steps=part.ahead_steps,
                shard=Shard(place, ranges),
                seed=seed_for(job.spec.training.seed, "ahead", members[node].slot, number),
                global_samples=Samples(done),
                total_samples=total_samples,
            ),
        )
    return Dealt(shards, begun, members, tuple(streams))


def _is_of_use(ahead: Ahead, number: int, part: NodePlan | None, stated: int) -> bool:
    """Whether the node takes part, with so many steps of that size at least."""
    if part is None or ahead.round != number or part.inner_steps < ahead.inner_steps:
        return False
    return shard_samples(ahead.shard.ranges) == ahead.inner_steps * part.batch(stated)
