"""The same work for two nodes of unequal speed, so that their updates can be compared, and whether
one of them is as fast as it says.

How fast a node is only the node can tell, and a fast one gets more steps and more pay. Who claims
steps that it never took cannot be seen by what its updates are worth. So, compared with a slower
one, it takes no more steps than that one, and has to be in as much sooner as they are fewer, by the
coordinator's clock. One that does fewer to be in time sends another update than the other node.
"""

from msgspec.structs import replace

from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.plan.reasons import reason_of_lesser
from hypergpu.jobfile.spec import CODECS
from hypergpu.units import Milliseconds

_COMPUTING_MORE, _FORECAST_MORE = 0.75, 0.1
"""So much of its computing, or of its whole round, on top of the forecast is no sign of a lie."""
_SPREADS_MORE, _SPREADS_MOST = 3, 0.5
"""Nor are so many of the forecast's deviations, within this part of the node's whole round."""
_MORE_MS = 1_500
"""Nor is the time that it takes to store an update at a busy moment."""
_TIMED_SHARE = 0.75
"""Part of its whole round that a node's lesser work takes at most, to say much of its speed."""


def is_work_equal(first: NodePlan, second: NodePlan, stated_batch: int) -> bool:
    """Whether both plans make the same update of the same shard."""
    return _work(first, stated_batch) == _work(second, stated_batch)


def _work(plan: NodePlan, stated_batch: int) -> tuple[int, int, float, int, str]:
    batch = plan.batch(stated_batch)
    return plan.inner_steps, batch, plan.learning_rate, plan.micro_batch, plan.codec


def lesser_work(plan: NodePlan, other: NodePlan, stated_batch: int) -> NodePlan:
    """The plan with no more of anything than another one has.

    Args:
        plan: It has a forecast, and so has the other one.
        other: Of the node that it is compared with.
        stated_batch: The job's.
    """
    if is_work_equal(plan, other, stated_batch):
        return plan
    steps = min(plan.inner_steps, other.inner_steps)
    smaller = min(plan, other, key=lambda each: each.batch(stated_batch))
    micro_batches = [each.micro_batch for each in (plan, other) if each.micro_batch]
    passes = (
        min(micro_batches, default=0),
        plan.checkpoints_activations or other.checkpoints_activations,
    )
    has_own_passes = passes == (plan.micro_batch, plan.checkpoints_activations)
    saved_ms = (plan.inner_steps - steps) * plan.step_us // 1000
    lesser = replace(
        plan,
        inner_steps=steps,
        batch_size=smaller.batch_size,
        learning_rate=smaller.learning_rate,
        micro_batch=passes[0],
        checkpoints_activations=passes[1],
        codec=max(plan.codec, other.codec, key=CODECS.index),
        # Part of a step takes as long for a smaller batch, and nobody knows what other passes take.
        step_us=plan.step_us if has_own_passes else 0,
        forecast_ms=Milliseconds(max(1, plan.forecast_ms - saved_ms)),
        full_forecast_ms=plan.forecast_ms,
    )
    return replace(lesser, reason=reason_of_lesser(plan, lesser))


def is_lesser(plan: NodePlan) -> bool:
    """Whether a node has less work than it says it can do."""
    return plan.forecast_ms < plan.full_forecast_ms


def is_timed(plan: NodePlan) -> bool:
    """Whether being in time with the lesser work says much of a node's speed."""
    return plan.step_us > 0 and plan.forecast_ms <= _TIMED_SHARE * plan.full_forecast_ms


def is_too_slow(plan: NodePlan, elapsed_ms: Milliseconds) -> bool:
    """Whether a node that was given less than it says it can do takes longer than that allows.

    Args:
        plan: Its lesser work.
        elapsed_ms: From its assignment until its update was in, or until now.
    """
    full_ms = plan.full_forecast_ms
    if not full_ms or not plan.step_us:
        return False
    slack_ms = max(
        _MORE_MS,
        _FORECAST_MORE * full_ms,
        _COMPUTING_MORE * plan.inner_steps * plan.step_us / 1000,
        min(_SPREADS_MORE * plan.spread_ms, _SPREADS_MOST * full_ms),
    )
    return elapsed_ms > plan.forecast_ms + slack_ms
