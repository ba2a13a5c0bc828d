"""Who can take work, and how many a job needs."""

from coordinator.core.job.state import Job
from hypergpu.ids import NodeId


def staff(job: Job) -> list[NodeId]:
    """Nodes that can take work, in slot order."""
    able = [
        (member.slot, node)
        for node, member in job.members.items()
        if member.is_present and not member.is_leaving
    ]
    return [node for _, node in sorted(able)]


def nodes_needed(job: Job) -> int:
    """Nodes without which no round opens: the stated number for the first, then one."""
    is_first = job.model is None or job.model.round == 0
    return job.spec.training.nodes if is_first else 1
