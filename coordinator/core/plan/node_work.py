"""Each node's own part of a round: inner steps such that all finish together (DyLU,
arXiv:2401.09135). Updates are weighed by samples (`weights`), whatever their batches (`batches`).

Where every step is exchanged no node can take fewer steps. There the round's span is the one in
which the nodes' batches come to as many samples as the job's own would (LB-BSP): fast nodes share
what slow ones leave, so that neither the mean of the gradients nor the learning rate means
anything else.
"""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from coordinator.core.plan.decision import NodeMemory
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec

_HOLD_STEPS = 1.15
"""A node's H is kept until the round asks for this much more or less, and as long as it finishes
no more than this too early: noise is no reason.
"""
_HOLD_LATE = 1.12
"""Or no more than this too late, which others wait for."""
_HOLD_US = 50_000
"""Or so little off that a busy machine's scheduler may have made it."""

_SPAN_CHANGE = 1.15
_STRAYED = 1.03
_COVER = 1.5
_PATIENCE = 5
"""Plans in a row in which a node may be so far off and within what is held."""


class StepBounds(NamedTuple):
    """The fewest and the most inner steps of one node."""

    least: int
    most: int


def step_bounds(middle_steps: int, inner_steps_max: int, *, is_common: bool) -> StepBounds:
    """How far single nodes may stray from the median node's H.

    Where any node may train on any sample updates are weighted by their samples, so that few
    steps do no harm and many are what a fast node is there for: from one step to eight times the
    middle node's.
    Where nodes hold samples that others do not, unequal work biases the model: half to twice.
    """
    least, most = _reach(is_common)
    upper = max(1, min(inner_steps_max, int(middle_steps * most)))
    return StepBounds(min(upper, max(1, ceil(middle_steps * least))), upper)


def own_bounds(limits: StepBounds, batch_share: float, spec: JobSpec) -> StepBounds:
    """The bounds of a node with another batch: more inner steps make up for a smaller one, and
    fewer are as much work of a larger one.

    Where nodes hold samples that others do not, updates count by their steps, and the bounds stay.
    """
    if not spec.data.is_common:
        return limits
    most = max(1, int(limits.most / batch_share))
    return StepBounds(limits.least, min(spec.aware.inner_steps_max, most))


def work_share(step_us: float, middle_step_us: float, *, is_common: bool) -> float:
    """A node's work in a round over the middle one's: as its speed is, as far as `bounds` lets it
    stray. What a node says of its speed moves nothing by more than that.
    """
    least, most = _reach(is_common)
    return min(most, max(least, middle_step_us / step_us))


def _reach(is_common: bool) -> tuple[float, float]:  # noqa: FBT001 - the only argument
    """The least and the most of the median node's H."""
    return (0, 8) if is_common else (0.5, 2)


def steady_span_us(span_us: float, held_ms: int) -> float:
    """The span that was held, unless it has really changed. 0 ms: none was."""
    held_us = held_ms * 1000
    is_near = held_us / _SPAN_CHANGE <= span_us <= held_us * _SPAN_CHANGE
    return held_us if is_near else span_us


def own_steps(
    step_us: float, moving_us: float, span_us: float, *, bounds_: StepBounds, memory: NodeMemory
) -> int:
    """The inner steps that fill the round once moving is taken off.

    Args:
        step_us: Time of one of the node's steps, with its own batch.
        moving_us: What it moves bytes for.
        span_us: What the round takes.
        bounds_: The fewest and the most.
        memory: What it was given last is kept while it is near. Each of its rounds in a row that
            closed without its update halves its steps.
    """
    held, cuts = memory.inner_steps, memory.cut_rounds
    wanted = max(0, int((span_us - moving_us) / step_us)) >> min(cuts, 16)
    wanted = min(bounds_.most, max(bounds_.least, wanted))
    if not bounds_.least <= held <= bounds_.most or memory.strayed_rounds >= _PATIENCE:
        return wanted
    # Half a step is what rounding makes.
    is_near = wanted <= held * _HOLD_STEPS + 0.5 and held <= wanted * _HOLD_STEPS + 0.5
    # Of a node that mostly moves bytes a little noise is many steps, and still little time.
    finish_us = held * step_us + moving_us
    is_in_time = span_us / _HOLD_STEPS <= finish_us <= span_us * _HOLD_LATE
    is_in_time = not cuts and (is_in_time or abs(finish_us - span_us) <= _HOLD_US)
    return held if is_near or is_in_time else wanted


def strayed_rounds(
    step_us: float, moving_us: float, span_us: float, *, memory: NodeMemory, steps: int
) -> int:
    """Plans in a row, this one with so many steps included, in which the node does not quite fill
    the round. Noise comes and goes; what stays makes all others wait, or it.
    """
    finish_us = steps * step_us + moving_us
    is_near = span_us / _STRAYED <= finish_us <= span_us * _STRAYED
    is_near = is_near or abs(finish_us - span_us) <= _HOLD_US
    if is_near or not memory.inner_steps or memory.strayed_rounds >= _PATIENCE:
        return 0
    return memory.strayed_rounds + 1


def prefetch_limit(spec: JobSpec, inner_steps: int) -> int:
    """The inner steps that may be taken before a round is open, of one with so many, where nothing
    is known of lines.

    They start from the node's own end of the round before, without what the others found. Half of
    a round costs next to nothing, a whole one a quarter more samples (docs/decisions/0016).
    """
    return inner_steps // 2 if spec.round.overlap == "eager" else 0


def planned_prefetch(spec: JobSpec, span_us: float, moving_us: float, step_us: float) -> int:
    """The steps of the next round that a node may begin, of one that will take as long as this one.

    They take a little longer than its bytes are forecast to move: half of a round for the middle
    node, and up to all of it where a line is so slow that its node would do little but wait.
    """
    if spec.round.overlap != "eager":
        return 0
    return min(int(span_us / step_us), ceil(_COVER * moving_us / step_us))


def fit_steps(
    steps: Mapping[NodeId, int], batches: Mapping[NodeId, int], samples_left: int
) -> dict[NodeId, int]:
    """The same steps, fewer where the job ends: its last two rounds share what is left."""
    planned = sum(mine * batches[node] for node, mine in steps.items())
    rounds_left = max(1, ceil(samples_left / max(1, planned)))
    if rounds_left > 2 or samples_left >= rounds_left * planned:
        return dict(steps)
    share = max(0, samples_left) / rounds_left / planned
    return {node: max(1, ceil(mine * share)) for node, mine in steps.items()}
