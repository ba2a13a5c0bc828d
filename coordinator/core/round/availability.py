"""Which members of a job can take work, and how many cannot."""

from coordinator.core.job.state import Job, Member
from coordinator.core.persistent_map import count_where
from hypergpu.ids import NodeId


def available_nodes(job: Job) -> list[NodeId]:
    """Nodes that can take work, in slot order."""
    able = [(member.slot, node) for node, member in job.members.items() if member.can_work]
    return [node for _, node in sorted(able)]


def available_count(job: Job) -> int:
    """How many nodes can take work. Cheap to ask whenever one comes."""
    return count_where(job.members, _can_work)


def _can_work(member: Member) -> bool:
    return member.can_work


def left_out(job: Job) -> int:
    """How many nodes are there and get no work, since not even one sample fits into memory."""
    return count_where(job.members, _lacks_memory)


def _lacks_memory(member: Member) -> bool:
    return member.is_present and bool(member.fit.shortage)
