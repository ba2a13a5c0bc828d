"""A node's health for people: the band that its newest plan gave it, with the plan's reason."""

from typing import NamedTuple

from coordinator.core.job.state import Job
from coordinator.core.plan.decision import Band
from hypergpu.ids import NodeId


class NodeHealth(NamedTuple):
    """The band by which a node takes part in rounds."""

    band: Band
    reason: str
    """Begins with the band: ``low: H=20, batch 10 of 32, ...``."""


def node_health(job: Job, node: NodeId) -> NodeHealth | None:
    """Health of the node in the job's newest round; None: no plan named it."""
    round_ = job.round or job.closed
    if round_ is None or round_.spec.strategy != "aware":
        return None
    if node in round_.resting:
        return NodeHealth(Band.POOR, round_.resting[node])
    participant = round_.participants.get(node)
    if participant is None:
        return None
    return NodeHealth(participant.plan.band, participant.plan.reason)
