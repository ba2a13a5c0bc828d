"""Each node's own part of a round: inner steps such that all finish together (DyLU,
arXiv:2401.09135), and its batch.

The learning rate of a step stays the job's own, whatever the batch, and its schedule counts
samples. A smaller batch so means noisier steps of the same length: a node that takes twice as many
steps of half the batch moves further on the same samples, by a factor between the square root of
two, where noise leads, and two. Updates are weighed by samples (`weights`).

Where every step is exchanged no node can take fewer steps. There the round's span is the one in
which the nodes' batches come to as many samples as the job's own would (LB-BSP): fast nodes share
what slow ones leave, so that neither the mean of the gradients nor the learning rate means
anything else.
"""

from collections.abc import Mapping, Sequence
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
    """The bounds of a node with a smaller batch: more inner steps make up for it.

    Where nodes hold samples that others do not, updates count by their steps, and the bounds stay.
    """
    if not spec.data.is_common:
        return limits
    most = int(limits.most / min(1.0, batch_share))
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


LEAST_SHARE, _MOST_SHARE = 1 / 8, 2
"""Smallest and largest part of the job's batch. Below the first a step is mostly noise; above the
second it asks for more memory than the job's user may have tried.
"""
_HOLD_BATCH = 1.1
"""A batch is kept until the round asks for this much more or less: noise is no reason."""
_HALVINGS = 60


class Batch(NamedTuple):
    """Samples of each of a node's inner steps."""

    size: int
    reason: str = ""
    """``batch 16 of 32: a full one takes ...``; empty for the job's own batch."""


def most_samples(spec: JobSpec) -> int:
    """Samples of the largest batch that a node may be given."""
    stated = spec.training.batch_size
    return _MOST_SHARE * stated if exchanges_each_step(spec) else stated


def exchanges_each_step(spec: JobSpec) -> bool:
    """Whether every node takes one step a round, whatever is measured."""
    return spec.aware.inner_steps_max == 1


def held_batch(spec: JobSpec, memory: NodeMemory) -> Batch:
    """The batch that the node was given last, as far as the job still allows it."""
    stated = spec.training.batch_size
    size = min(memory.batch_size or stated, most_samples(spec))
    return _explain_batch(size, stated, "as before")


def own_batch(spec: JobSpec, memory: NodeMemory, *, fewest_us: float, room_us: float) -> Batch:
    """The batch with which the fewest inner steps fit into the round.

    A smaller batch is the last resort: a slow node takes fewer steps first, down to the fewest that
    the job's sharding allows. Where moving bytes alone fills the round no batch would help.

    Args:
        spec: The job's.
        memory: Each of the node's rounds in a row that closed without its update halves the room.
        fewest_us: Time of the fewest inner steps with the job's own batch.
        room_us: The round's span less the time for which the node moves bytes.
    """
    stated, most = spec.training.batch_size, most_samples(spec)
    share = room_us / fewest_us / (1 << min(memory.cut_rounds, 16))
    fits = min(most, _clamp(share) * stated if share > 0 else stated)
    held = held_batch(spec, memory).size
    if fits < most and held / _HOLD_BATCH <= fits <= held * _HOLD_BATCH:
        fits = held
    why = f"a full one takes {1 / share:.1f} times the time there is" if share > 0 else ""
    return _explain_batch(max(1, round(fits)), stated, why)


def balanced_span_us(steps_us: Sequence[float], moving_us: Sequence[float]) -> float:
    """The span in which the batches of all nodes come to as many samples as the job's own.

    Args:
        steps_us: Time of one step of each node, with the job's own batch.
        moving_us: Time for which each node moves bytes.
    """
    nodes = tuple(zip(steps_us, moving_us, strict=True))
    low, high = 0.0, max(moved_us + _MOST_SHARE * step_us for step_us, moved_us in nodes)
    for _ in range(_HALVINGS):
        span_us = (low + high) / 2
        together = sum(_clamp((span_us - moved_us) / step_us) for step_us, moved_us in nodes)
        low, high = (span_us, high) if together < len(nodes) else (low, span_us)
    return high


def _clamp(share: float) -> float:
    return min(_MOST_SHARE, max(LEAST_SHARE, share))


def _explain_batch(size: int, stated: int, why: str) -> Batch:
    if size == stated:
        return Batch(size)
    return Batch(size, f"batch {size} of {stated}" + (f": {why}" if why else ""))
