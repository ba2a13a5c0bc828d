"""Who can work, and what fits into a member's memory."""

from msgspec.structs import replace

from coordinator.core.persistent_map import count_where
from coordinator.core.training.job.state import AcceptedUpdate, Job, Member
from coordinator.core.training.plan.batches import most_samples
from coordinator.core.training.plan.decision import MemoryFit, NodePlan
from coordinator.core.training.plan.memory_fit import estimated_fit, least_use
from coordinator.core.work.members import free_nodes
from hypergpu.ids import NodeId


def available_nodes(job: Job) -> list[NodeId]:
    """Nodes that can take work, in slot order. Who has a lease over several rounds cannot."""
    return free_nodes(job, job.long_leases)


def fit_of(job: Job, node: NodeId) -> MemoryFit:
    """How a member's steps are made to fit: by its own, else by what others measured."""
    member = job.members[node]
    if member.fit != MemoryFit() or member.accepted_lease:
        return member.fit
    most = most_samples(job.spec)
    return estimated_fit(
        job.memory_use, member.memory_bytes, most=most, can_checkpoint=job.can_checkpoint
    )


def with_memory_use(job: Job, node: NodeId, plan: NodePlan, update: AcceptedUpdate) -> Job:
    """The job with what a node measured of its memory; no step takes more than the device has."""
    most, memory_use = job.members[node].memory_bytes, update.memory
    if memory_use is None or 0 < most < memory_use.sample_bytes:
        return job
    return replace(job, memory_use=least_use(job.memory_use, memory_use, plan, job.spec))


def left_out(job: Job) -> int:
    """How many nodes are there and get no work, since not even one sample fits into memory."""
    return count_where(job.members, _lacks_memory)


def _lacks_memory(member: Member) -> bool:
    return member.is_present and bool(member.fit.shortage)


def nodes_needed(job: Job) -> int:
    """Nodes without which no round opens: the stated number for the first, then one."""
    is_first = job.model is None or job.model.round == 0
    return job.spec.training.nodes if is_first else 1
