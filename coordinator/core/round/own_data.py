"""Jobs whose training samples stay on the nodes that have them.

Each member has a partition of its own, numbered by its slot: nobody else is ever assigned one of
its positions. What a lost node leaves behind waits for it in its stream; a node that takes its
place in the round brings samples of its own.
"""

from msgspec.structs import replace

from coordinator.core.job.state import Job, Stream
from coordinator.core.plan.decision import NodePlan, RoundPlan
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Samples, several


def first_streams(job: Job, sizes: tuple[Samples, ...]) -> tuple[Stream, ...]:
    """The streams of a job whose first model is made, or made anew."""
    return job.streams if job.spec.data.stays_on_nodes else tuple(map(Stream, sizes))


def with_own_streams(job: Job) -> Job:
    """The job with a stream of every member, where data stay on nodes; sizes are known later."""
    missing = len(job.members) - len(job.streams)
    if not job.spec.data.stays_on_nodes or missing <= 0:
        return job
    return replace(job, streams=(*job.streams, *(Stream(Samples(0)) for _ in range(missing))))


def counted_streams(job: Job, node: NodeId, samples: Samples) -> tuple[Stream, ...]:
    """The streams once a node has told how many samples of its own it has; 0: it has not."""
    streams, slot = list(job.streams), job.members[node].slot
    if job.spec.data.stays_on_nodes and samples:
        streams[slot] = replace(streams[slot], size=samples)
    return tuple(streams)


def one_pass_at_most(job: Job, plan: RoundPlan) -> RoundPlan:
    """The plan in which no node takes more steps than a pass over its own samples has.

    Updates weigh by their samples: so a node with few samples weighs little, and one that claims
    more than it has gains nothing beyond the steps that all others take.
    """
    if not job.spec.data.stays_on_nodes:
        return plan
    nodes = {node: own_pass(job, node, part) for node, part in plan.nodes.items()}
    return replace(plan, nodes=nodes)


def own_pass(job: Job, node: NodeId, part: NodePlan) -> NodePlan:
    """A node's part of a plan, cut to a pass over its own samples, where their number is known."""
    size = job.streams[job.members[node].slot].size
    most = max(1, size // part.batch(job.spec.training.batch_size))
    if not size or part.inner_steps <= most:
        return part
    reason = f"{part.reason}; a pass over its own {size} samples is {several(most, 'step')}"
    prefetched = min(part.prefetch_steps, most // 2)
    return replace(
        part,
        inner_steps=most,
        prefetch_steps=prefetched,
        reason=reason,
        # Both were made for all the steps.
        forecast_ms=Milliseconds(0),
        spread_ms=Milliseconds(0),
    )
