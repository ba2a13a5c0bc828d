"""The first stage of a plan, the speeds: what is remembered of each node, and how fast its device
and its line are believed to be.
"""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.network.reading import NodeReading, median_reading
from coordinator.core.training.plan.agreement import UpdateAgreement, update_agreement
from coordinator.core.training.plan.connections import SMALL_BYTES, node_connections
from coordinator.core.training.plan.decision import FINEST, ModelSizes, PlanRequest
from coordinator.core.training.plan.memories import NodeMemories, node_memories
from coordinator.core.training.plan.node_speed import NodeSpeed, believed_speed, stated_speed
from hypergpu.ids import NodeId


class RoundSpeeds(NamedTuple):
    """The request with what is known before anything is decided."""

    request: PlanRequest
    sizes: ModelSizes
    readings: Mapping[NodeId, NodeReading]
    """Reading of each candidate; an empty one where nothing was measured."""
    memories: NodeMemories
    agreement: UpdateAgreement
    connections: Mapping[NodeId, int]
    """To move models and updates over, for each candidate."""
    nodes: Mapping[NodeId, NodeSpeed]
    """Speed and line of each candidate; empty until one node's steps were measured."""

    @property
    def stated_batch(self) -> int:
        """Samples in a step of the job's own batch."""
        return self.request.spec.training.batch_size


def round_speeds(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: ModelSizes
) -> RoundSpeeds:
    """Speed of each candidate. Arguments as of `plan_round`."""
    memories = node_memories(request)
    agreement = update_agreement(request)
    own = {node: readings.get(node, NodeReading()) for node in request.candidates}
    typical, size_bytes = median_reading(own.values()), sizes.update_bytes[FINEST]
    connections = node_connections(
        request.spec, own, memories.candidates, typical=typical, size_bytes=size_bytes
    )
    nodes = {}
    # Steps of one node at least have to be measured, or there is nothing to compare others with.
    for node, reading in own.items() if typical.step_us.mean > 0 else ():
        speed = stated_speed(
            reading, typical, connections[node], needs_line=size_bytes >= SMALL_BYTES
        )
        nodes[node] = believed_speed(request, speed, memories.candidates[node], sizes)
    return RoundSpeeds(request, sizes, own, memories, agreement, connections, nodes)
