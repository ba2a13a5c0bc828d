"""Memory that a plan keeps for the next one, so that nothing flaps."""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.training.plan.decision import NodeMemory, NodePlan, PlanMemory
from coordinator.core.training.plan.inner_steps import HOLD_US, STRAYED_MOST
from coordinator.core.training.plan.node_shares import NodeShares
from coordinator.core.training.plan.node_work import NodeWork
from coordinator.core.training.plan.round_shape import RoundShape
from coordinator.core.training.plan.speeds import RoundSpeeds
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

_STRAYED = 1.03
"""A node that is done within this factor of the round's span fills the round."""


def plan_memory(
    speeds: RoundSpeeds, shape: RoundShape, shares: NodeShares, plans: Mapping[NodeId, NodePlan]
) -> PlanMemory:
    """The memory of the plan.

    Args:
        speeds: First stage.
        shape: Second stage.
        shares: Third stage.
        plans: Of the participants.
    """
    middle, nodes = shape.middle, dict(speeds.memories.absentees)
    for node, work in shares.works.items():
        memory = shares.parts[node].memory
        steps = shares.full_steps.get(node, memory.inner_steps)
        nodes[node] = replace(
            memory,
            codec=work.codec,
            lighter_rounds=work.lighter_rounds,
            inner_steps=steps,
            strayed_rounds=_strayed_rounds(work, memory, steps, shares.span_us),
            connections=plans[node].connections if node in plans else memory.connections,
            batch_size=plans[node].batch_size if node in plans else memory.batch_size,
            growth=work.growth if node in plans else memory.growth,
        )
    return PlanMemory(
        inner_steps=middle.inner_steps,
        changed_at_round=middle.changed_at_round,
        is_sparse=shape.codecs.family.is_sparse,
        nodes=nodes,
        crowded_rounds=middle.drift.crowded_rounds,
        drift=middle.drift.factor,
        span_ms=Milliseconds(max(1, round(shape.span_us / 1000))),
        stretched_ms=Milliseconds(max(1, round(shares.span_us / 1000))),
        dense_ms=Milliseconds(max(1, round(middle.dense_at_change_us / 1000))),
        dense_rounds=shape.codecs.family.dense_rounds,
        down=shape.codecs.down,
        noise_share=speeds.agreement.noise_share,
    )


def _strayed_rounds(work: NodeWork, memory: NodeMemory, steps: int, span_us: float) -> int:
    """Plans in a row, this one included, in which the node does not quite fill the round. Noise
    comes and goes; a lasting difference makes all others wait, or the node.
    """
    if work.long:
        return 0
    finish_us = steps * work.step_us + work.moving_us
    is_near = span_us / _STRAYED <= finish_us <= span_us * _STRAYED
    is_near = is_near or abs(finish_us - span_us) <= HOLD_US
    if is_near or not memory.inner_steps or memory.strayed_rounds >= STRAYED_MOST:
        return 0
    return memory.strayed_rounds + 1
