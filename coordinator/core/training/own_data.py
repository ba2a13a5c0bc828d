"""Jobs whose training samples stay on the nodes that have them.

Each member has a partition of its own, numbered by its slot: nobody else is ever assigned one of
its positions. What a lost node leaves behind waits for it in its stream; a node that takes its
place in the round brings samples of its own.
"""

from msgspec.structs import replace

from coordinator.core.training.job.state import AcceptedUpdate, Job, Stream
from hypergpu.ids import NodeId
from hypergpu.units import Samples


def first_streams(job: Job, sizes: tuple[Samples, ...]) -> tuple[Stream, ...]:
    """The streams of a job whose first model is made, or made anew."""
    return job.streams if job.spec.data.stays_on_nodes else tuple(map(Stream, sizes))


def with_own_streams(job: Job) -> Job:
    """The job with a stream of every member, where data stay on nodes; sizes are known later."""
    missing_streams = len(job.members) - len(job.streams)
    if not job.spec.data.stays_on_nodes or missing_streams <= 0:
        return job
    return replace(
        job, streams=(*job.streams, *(Stream(Samples(0)) for _ in range(missing_streams)))
    )


def counted_streams(job: Job, node: NodeId, samples: Samples) -> tuple[Stream, ...]:
    """The streams once a node has told how many samples of its own it has; 0: it has not."""
    streams, slot = list(job.streams), job.members[node].slot
    if job.spec.data.stays_on_nodes and samples:
        streams[slot] = replace(streams[slot], size=samples)
    return tuple(streams)


def own_weighing(job: Job, update: AcceptedUpdate) -> AcceptedUpdate:
    """An update as it weighs: where data stay on nodes, by no more samples than its node has.

    All nodes take the same steps, some of them over few samples again and again. So a node with few
    samples weighs little, and one that claims more than it trained on gains nothing.
    """
    own = update.data_samples
    if not job.spec.data.stays_on_nodes or not own:
        return update
    return replace(update, samples=min(own, update.samples))
