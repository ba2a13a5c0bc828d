"""A round's plan: one pure function of what was measured, asked and planned before, in four stages.

1. Speeds: each node's speed and line (`speeds`).
2. The shape of the round: the codecs' family, the median node's inner steps, and with them the span
   that the round is made for (`round_shape`).
3. Shares: the steps of each node that fill that span, or work that no round waits for
   (`node_shares`).
4. The closing: when the round closes, and what the next plan remembers (`closing`).
"""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.network.reading import NodeReading
from coordinator.core.plan.closing import close_plan
from coordinator.core.plan.codecs import (
    FINEST,
)
from coordinator.core.plan.decision import (
    MemoryFit,
    ModelSizes,
    NodeMemory,
    PlanRequest,
    RoundPlan,
)
from coordinator.core.plan.memory_fit import fit_plan
from coordinator.core.plan.node_shares import PlanInputs, node_shares
from coordinator.core.plan.node_work import (
    step_bounds,
)
from coordinator.core.plan.participation import (
    candidate_memories,
)
from coordinator.core.plan.round_shape import round_shape
from coordinator.core.plan.speeds import (
    NodeSpeed,
    believed_speed,
    node_speeds,
    stated_connections,
)
from coordinator.core.plan.unmeasured import unmeasured_plan
from hypergpu.ids import NodeId


def plan_round(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: ModelSizes
) -> RoundPlan:
    """The plan of the round ``request.round``.

    Args:
        request: At least one candidate.
        readings: What is known of nodes; those of others than the candidates are ignored.
        sizes: Bytes of the model under each codec.

    Returns:
        A plan in which every candidate either takes part or rests with a reason, and at least
        one takes part. Equal arguments give equal plans.
    """
    plan = _candidates_plan(request, readings, sizes)
    fitted = {
        node: fit_plan(part, request.fits.get(node, MemoryFit()), request.spec)
        for node, part in plan.nodes.items()
    }
    return replace(plan, nodes=fitted, resting={**plan.resting, **request.paused})


def _candidates_plan(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: ModelSizes
) -> RoundPlan:
    memories = candidate_memories(request)
    known = node_speeds(
        request.candidates,
        readings,
        size_bytes=sizes.update_bytes[FINEST],
        held={node: memory.connections for node, memory in memories.items()},
        stated=stated_connections(request.spec),
    )
    if not known:
        return unmeasured_plan(request, readings, sizes)
    known = {
        node: believed_speed(
            mine,
            memories[node],
            _moved_us(request, mine, memories[node], sizes),
            takes_ahead=request.spec.round.overlap == "eager",
        )
        for node, mine in known.items()
    }
    shape = round_shape(request, known, memories, sizes)
    limits = step_bounds(
        shape.middle.inner_steps,
        request.spec.aware.inner_steps_max,
        is_common=request.spec.data.is_common,
    )
    inputs = PlanInputs(request, sizes, shape, limits)
    return close_plan(inputs, node_shares(inputs, known))


def _moved_us(
    request: PlanRequest, mine: NodeSpeed, memory: NodeMemory, sizes: ModelSizes
) -> float:
    """What a round like the node's last one is forecast to move bytes for."""
    down = request.previous.down if request.previous is not None else ""
    up_bytes, down_bytes = (sizes.update_bytes[each or FINEST] for each in (memory.codec, down))
    return mine.moving_us(up_bytes, down_bytes)
