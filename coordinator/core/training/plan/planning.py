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
from coordinator.core.training.plan.closing import close_plan
from coordinator.core.training.plan.decision import MemoryFit, ModelSizes, PlanRequest, RoundPlan
from coordinator.core.training.plan.memory_fit import fit_plan
from coordinator.core.training.plan.node_shares import node_shares
from coordinator.core.training.plan.round_shape import round_shape
from coordinator.core.training.plan.speeds import round_speeds
from coordinator.core.training.plan.unmeasured import unmeasured_plan
from hypergpu.ids import NodeId


def plan_round(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: ModelSizes
) -> RoundPlan:
    """The plan of the round ``request.round``.

    Args:
        request: At least one candidate.
        readings: Of nodes; those of others than the candidates are ignored.
        sizes: Bytes of the model under each codec.

    Returns:
        A plan in which every candidate either takes part or rests with a reason, and at least
        one takes part. Equal arguments give equal plans.
    """
    speeds = round_speeds(request, readings, sizes)
    if speeds.nodes:
        shape = round_shape(speeds)
        shares = node_shares(speeds, shape)
        plan = close_plan(speeds, shape, shares)
    else:
        plan = unmeasured_plan(speeds)
    nodes = {
        node: fit_plan(part, request.fits.get(node, MemoryFit()), request.spec)
        for node, part in plan.nodes.items()
    }
    return replace(plan, nodes=nodes, resting={**plan.resting, **request.paused})
