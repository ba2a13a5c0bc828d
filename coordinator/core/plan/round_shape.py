"""The second stage of a plan, the shape of the round: the codecs' family, the median node's inner
steps, and with them the span that the round is made for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.plan.batches import balanced_span_us, exchanges_each_step
from coordinator.core.plan.capacity import capacities, weighted_median
from coordinator.core.plan.codecs import (
    FINEST,
    CodecFamily,
    byte_budget,
    codec_for_span,
    delta_codec,
    round_family,
)
from coordinator.core.plan.decision import (
    ModelSizes,
    NodeMemory,
    PlanRequest,
)
from coordinator.core.plan.median_node import (
    MedianNode,
    computing_beside,
    computing_for,
    most_inner_steps,
    plan_median_node,
)
from coordinator.core.plan.node_work import steady_span_us
from coordinator.core.plan.participation import (
    is_excluded,
)
from coordinator.core.plan.speeds import (
    NodeSpeed,
)
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes

_COMFORT = 4
"""Times the user's own H: beyond it the codec gives way before H does."""
OVERRUN = 1.5
"""A node whose line is worse than the middle one's takes fewer steps before a sparser codec."""
_OF_STATED = 0.75
"""A round is made to take this much of a deadline that the job states."""


class RoundShape(NamedTuple):
    """What holds for all nodes of the round."""

    family: CodecFamily
    down: str
    middle: MedianNode
    step_us: float
    """What a step of the middle node takes."""
    weights: Mapping[NodeId, float]
    """What each candidate can add, see `capacities`."""
    span_us: float
    """What the round is made to take, before it is stretched for anybody."""


def round_shape(
    request: PlanRequest,
    known: Mapping[NodeId, NodeSpeed],
    memories: Mapping[NodeId, NodeMemory],
    sizes: ModelSizes,
) -> RoundShape:
    """The round as the middle one of those nodes sees it that are neither excluded nor on trial,
    where each counts by what it can add.

    Args:
        request: What is planned.
        known: Speed of each candidate, at least one.
        memories: Of each candidate.
        sizes: Of codecs.
    """
    number, previous = request.round, request.previous
    known = {
        node: mine
        for node, mine in known.items()
        if node not in request.on_trial and not is_excluded(memories[node], number)
    } or known
    dense_bytes = sizes.update_bytes[FINEST]
    dense_us = {node: mine.moving_us(dense_bytes, dense_bytes) for node, mine in known.items()}
    weights = capacities(known, dense_us, memories, request.spec.training.inner_steps)
    step_us = weighted_median({node: mine.step_us for node, mine in known.items()}, weights)
    most = most_inner_steps(request, known, step_us)
    comfortable_us = step_us * min(most, _COMFORT * request.spec.training.inner_steps)
    family = round_family(
        request.spec, previous, known, weights, sizes=sizes, computing_us=comfortable_us
    )
    down = _delta(request, known, weights, family, sizes, comfortable_us)
    held_us = max(comfortable_us, step_us * (previous.inner_steps if previous is not None else 0))
    codecs = {
        node: codec_for_span(
            family,
            memories[node],
            sizes,
            budget_bytes=byte_budget(mine, comfortable_us, request.spec.aware.utilisation),
            kept_bytes=byte_budget(mine, OVERRUN * held_us, request.spec.aware.utilisation),
        )
        for node, mine in known.items()
    }
    moving_us = {
        node: mine.moving_us(sizes.update_bytes[codecs[node]], sizes.update_bytes[down])
        for node, mine in known.items()
    }
    computing_us = {
        node: _computing_us(request.spec, mine, moving_us[node], sizes.update_bytes[codecs[node]])
        for node, mine in known.items()
    }
    middle_ = plan_median_node(
        request,
        step_us=step_us,
        moving=weighted_median(moving_us, weights),
        dense=weighted_median(dense_us, weights),
        computing_us=weighted_median(computing_us, weights),
        most=most,
    )
    span_us = _span_us(request, known, middle_, moving_us)
    return RoundShape(family, down, middle_, step_us, weights, span_us)


def _delta(
    request: PlanRequest,
    known: Mapping[NodeId, NodeSpeed],
    weights: Mapping[NodeId, float],
    family: CodecFamily,
    sizes: ModelSizes,
    comfortable_us: float,
) -> str:
    """Codec of the delta: as the job states, or by the lines of those who wait for it."""
    if request.spec.aware.takes_as_stated("codec.down"):
        return request.spec.codec.down
    return delta_codec(
        family,
        known,
        weights,
        sizes=sizes,
        allowed_us=(1 - request.spec.aware.utilisation) * comfortable_us,
        held=request.previous.down if request.previous is not None else "",
    )


def _span_us(
    request: PlanRequest,
    known: Mapping[NodeId, NodeSpeed],
    middle_: MedianNode,
    moving_us: Mapping[NodeId, float],
) -> float:
    """What the round is made to take: as the one before where that is near, and no more than a
    deadline that the job states leaves.
    """
    span_us = middle_.span_us
    if exchanges_each_step(request.spec):
        steps_us = [mine.step_us for mine in known.values()]
        span_us = balanced_span_us(steps_us, tuple(moving_us.values()))
    held_ms = request.previous.span_ms if request.previous is not None else 0
    span_us = steady_span_us(span_us, held_ms if is_middle_kept(request, middle_) else 0)
    if stated_ms := request.spec.round.deadline_ms:
        span_us = min(span_us, _OF_STATED * stated_ms * 1000)
    return span_us


def is_middle_kept(request: PlanRequest, middle_: MedianNode) -> bool:
    """Whether the middle node's H is that of the round before."""
    return request.previous is not None and request.previous.inner_steps == middle_.inner_steps


def _computing_us(spec: JobSpec, mine: NodeSpeed, moving_us: float, up_bytes: Bytes) -> float:
    utilisation = spec.aware.utilisation
    if spec.round.overlap == "eager":
        return computing_beside(moving_us, utilisation)
    return computing_for(moving_us, mine.cautious_up_us(up_bytes), utilisation)
