"""The second stage of a plan, the shape of the round: the codecs' family, the median node's inner
steps, and with them the span that the round is made for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.training.plan.capacity import capacities, weighted_median
from coordinator.core.training.plan.codecs import RoundCodecs, round_codecs
from coordinator.core.training.plan.decision import FINEST
from coordinator.core.training.plan.median_node import (
    MedianNode,
    node_computing_us,
    plan_median_node,
)
from coordinator.core.training.plan.span import balanced_span_us, round_span_us
from coordinator.core.training.plan.speeds import RoundSpeeds
from coordinator.core.training.plan.step_limits import StepBounds, most_inner_steps, step_bounds
from hypergpu.ids import NodeId


class RoundShape(NamedTuple):
    """Values that hold for all nodes of the round."""

    codecs: RoundCodecs
    middle: MedianNode
    weights: Mapping[NodeId, float]
    """Work that each node which shapes the round can add, see `capacities`."""
    limits: StepBounds
    """How far single nodes may stray from the median node's H."""
    span_us: float
    """Time that the round is made to take, before it is stretched for anybody."""
    is_middle_kept: bool
    """Whether the median node's H is that of the round before."""


def round_shape(speeds: RoundSpeeds) -> RoundShape:
    """The round as the middle node sees it of those that are neither excluded nor on trial, where
    each counts by what it can add.

    Args:
        speeds: Of one candidate at least.
    """
    request, spec, sizes = speeds.request, speeds.request.spec, speeds.sizes.update_bytes
    memories = speeds.memories
    unproven = request.on_trial | memories.excluded_nodes
    reference = {n: speed for n, speed in speeds.nodes.items() if n not in unproven} or speeds.nodes
    steps_us = {node: speed.step_us for node, speed in reference.items()}
    dense_us = {n: speed.moving_us(sizes[FINEST], sizes[FINEST]) for n, speed in reference.items()}
    weights = capacities(reference, dense_us, memories.candidates, spec.training.inner_steps)
    step_us = weighted_median(steps_us, weights)
    most = most_inner_steps(request, reference, step_us)
    codecs = round_codecs(speeds, reference, weights, step_us=step_us, most_steps=most)
    moving_us = {
        node: speed.moving_us(sizes[codecs.nodes[node]], sizes[codecs.down])
        for node, speed in reference.items()
    }
    computing_us = {
        node: node_computing_us(spec, speed, moving_us[node], sizes[codecs.nodes[node]])
        for node, speed in reference.items()
    }
    middle = plan_median_node(
        speeds,
        step_us=step_us,
        moving_us=weighted_median(moving_us, weights),
        dense_us=weighted_median(dense_us, weights),
        computing_us=weighted_median(computing_us, weights),
        most=most,
    )
    limits = step_bounds(
        middle.inner_steps, spec.aware.inner_steps_max, is_common=spec.data.is_common
    )
    is_kept = request.previous is not None and request.previous.inner_steps == middle.inner_steps
    span_us = middle.span_us
    if spec.aware.exchanges_each_step:
        span_us = balanced_span_us(tuple(steps_us.values()), tuple(moving_us.values()))
    span_us = round_span_us(request, span_us, is_middle_kept=is_kept)
    return RoundShape(codecs, middle, weights, limits, span_us, is_kept)
