"""Time that a round is made to take: what the median node needs, steady from round to round.

Where every step is exchanged no node can take fewer steps. There the span is the one in which the
nodes' batches come to as many samples as the job's own would (LB-BSP): fast nodes share the samples
that slow ones leave, so that neither the mean of the gradients nor the learning rate means anything
else.
"""

from collections.abc import Sequence

from coordinator.core.training.plan.batches import BALANCED_SHARE, LEAST_SHARE
from coordinator.core.training.plan.decision import PlanRequest

_CHANGE = 1.15
"""The span before is kept where the new one is within this factor of it."""
_OF_STATED = 0.75
"""A round is made to take this much of a deadline that the job states."""
_HALVINGS = 60


def round_span_us(request: PlanRequest, span_us: float, *, is_middle_kept: bool) -> float:
    """The span of the round: as the one before where that is near, and no more than a deadline that
    the job states leaves.

    Args:
        request: What is planned.
        span_us: Of the round if nothing came before.
        is_middle_kept: Whether the median node's H is that of the round before.
    """
    before_ms = request.previous.span_ms if request.previous is not None else 0
    span_us = steady_span_us(span_us, before_ms if is_middle_kept else 0)
    if stated_ms := request.spec.round.deadline_ms:
        span_us = min(span_us, _OF_STATED * stated_ms * 1000)
    return span_us


def steady_span_us(span_us: float, before_ms: int) -> float:
    """The span of the round before, unless it has really changed. 0 ms: there was none."""
    before_us = before_ms * 1000
    is_near = before_us / _CHANGE <= span_us <= before_us * _CHANGE
    return before_us if is_near else span_us


def balanced_span_us(steps_us: Sequence[float], moving_us: Sequence[float]) -> float:
    """The span in which the batches of all nodes come to as many samples as the job's own.

    Args:
        steps_us: Time of one step of each node, with the job's own batch.
        moving_us: Time for which each node moves bytes.
    """
    nodes = tuple(zip(steps_us, moving_us, strict=True))
    low, high = 0.0, max(moved_us + BALANCED_SHARE * step_us for step_us, moved_us in nodes)
    for _ in range(_HALVINGS):
        span_us = (low + high) / 2
        together = sum(
            min(BALANCED_SHARE, max(LEAST_SHARE, (span_us - moved_us) / step_us))
            for step_us, moved_us in nodes
        )
        low, high = (span_us, high) if together < len(nodes) else (low, span_us)
    return high
