"""Inner steps of each node, such that all finish together (DyLU, arXiv:2401.09135). Updates are
weighed by samples (`weights`), whatever their batches (`batches`).
"""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.network.work_forecast import FinishForecast
from coordinator.core.training.plan.decision import NodeMemory
from coordinator.core.training.plan.node_work import NodeWork
from coordinator.core.training.plan.participation import Participation
from coordinator.core.training.plan.round_shape import RoundShape
from coordinator.core.training.plan.span import steady_span_us
from coordinator.core.training.plan.speeds import RoundSpeeds
from coordinator.core.training.plan.step_limits import StepBounds
from hypergpu.ids import NodeId

HOLD_US = 50_000
"""Times that differ by less may differ by a busy machine's scheduler alone."""
STRAYED_MOST = 5
"""Plans in a row in which a node may not quite fill the round and keep its steps."""
_HOLD_STEPS = 1.15
"""A node's H is kept until the round asks for this much more or less, and as long as it finishes
no more than this too early: noise is no reason.
"""
_HOLD_LATE = 1.12
"""The same where the node finishes too late, so that others wait."""


class RoundPace(NamedTuple):
    """Pace of the job by the nodes alone that its rounds wait for."""

    round_us: float
    """Time until the last of their updates is forecast to be in."""
    rounds_left: int
    """Rounds that the job would last if they did all of its work."""


def round_pace(
    speeds: RoundSpeeds,
    shape: RoundShape,
    works: Mapping[NodeId, NodeWork],
    parts: Mapping[NodeId, Participation],
) -> RoundPace:
    """Pace of a round without the nodes that it does not wait for.

    Args:
        speeds: Of all candidates.
        shape: Of the round.
        works: Of the candidates.
        parts: Of the candidates.
    """
    awaited_works = {
        node: work
        for node, work in works.items()
        if parts[node].is_awaited and parts[node].is_taking_part
    }
    span_us = stretched_span_us(speeds, shape, awaited_works)
    steps = filling_steps(awaited_works, parts, span_us)
    round_us = 1000.0 * max(
        finish(speeds, shape, work, steps[node]).mean_ms for node, work in awaited_works.items()
    )
    return RoundPace(round_us, rounds_left(speeds, awaited_works, steps))


def stretched_span_us(
    speeds: RoundSpeeds, shape: RoundShape, works: Mapping[NodeId, NodeWork]
) -> float:
    """The round's span, longer where a node that it waits for needs more."""
    previous = speeds.request.previous
    needs_us = [_least_us(work) for work in works.values() if work.long is None]
    span_us = max([shape.span_us, *needs_us])
    if previous is None or not shape.is_middle_kept:
        return span_us
    return max(shape.span_us, steady_span_us(span_us, previous.stretched_ms))


def _least_us(work: NodeWork) -> float:
    """Time of the fewest steps that the node may take, with moving."""
    least = max(work.bounds.least, min(work.prefetched_steps, work.bounds.most))
    return least * work.step_us + work.moving_us


def filling_steps(
    works: Mapping[NodeId, NodeWork], parts: Mapping[NodeId, Participation], span_us: float
) -> dict[NodeId, int]:
    """Steps that participants would take if the job went on."""
    return {
        node: work.long.inner_steps
        if work.long
        else _inner_steps(work, span_us, parts[node].memory)
        for node, work in works.items()
    }


def _inner_steps(work: NodeWork, span_us: float, memory: NodeMemory) -> int:
    """Steps that fill the round, and no fewer than were prefetched."""
    if not work.is_batch_held:
        memory = replace(memory, inner_steps=0)
    steps = own_steps(work.step_us, work.moving_us, span_us, bounds=work.bounds, memory=memory)
    return max(steps, min(work.prefetched_steps, work.bounds.most))


def own_steps(
    step_us: float, moving_us: float, span_us: float, *, bounds: StepBounds, memory: NodeMemory
) -> int:
    """Inner steps that fill the round once moving is taken off.

    Args:
        step_us: Time of one of the node's steps, with its own batch.
        moving_us: Time for which it moves bytes.
        span_us: Of the round.
        bounds: The fewest and the most.
        memory: The node's last number of steps is kept while it is near. Each of its rounds in a
            row that closed without its update halves its steps.
    """
    before, cuts = memory.inner_steps, memory.cut_rounds
    steps = max(0, int((span_us - moving_us) / step_us)) >> min(cuts, 16)
    steps = min(bounds.most, max(bounds.least, steps))
    if not bounds.least <= before <= bounds.most or memory.strayed_rounds >= STRAYED_MOST:
        return steps
    # Half a step is what rounding makes.
    is_near = steps <= before * _HOLD_STEPS + 0.5 and before <= steps * _HOLD_STEPS + 0.5
    # Of a node that mostly moves bytes a little noise is many steps, and still little time.
    finish_us = before * step_us + moving_us
    is_in_time = span_us / _HOLD_STEPS <= finish_us <= span_us * _HOLD_LATE
    is_in_time = not cuts and (is_in_time or abs(finish_us - span_us) <= HOLD_US)
    return before if is_near or is_in_time else steps


def finish(
    speeds: RoundSpeeds, shape: RoundShape, work: NodeWork, inner_steps: int
) -> FinishForecast:
    """Forecast of a node's work of so many steps, less those that it took ahead."""
    sizes, stated_batch = speeds.sizes.update_bytes, speeds.request.spec.training.batch_size
    steps = inner_steps * work.batch.size / stated_batch
    if inner_steps >= work.prefetched_steps:
        steps = max(0.0, steps - work.hidden_us / work.speed.step_us)
    return work.speed.finish(steps, sizes[work.codec], sizes[shape.codecs.down])


def rounds_left(
    speeds: RoundSpeeds, works: Mapping[NodeId, NodeWork], steps: Mapping[NodeId, int]
) -> int:
    """Rounds like this one that the job goes on for, at least one."""
    request = speeds.request
    samples_left = request.samples_total - request.samples_done
    return max(1, ceil(samples_left / _round_samples(works, steps)[1]))


def _round_samples(
    works: Mapping[NodeId, NodeWork], steps: Mapping[NodeId, int]
) -> tuple[int, float]:
    """Samples of a round by those whom it waits for, and by everybody."""
    samples = {node: steps[node] * work.batch.size for node, work in works.items()}
    awaited_samples = sum(samples[node] for node, work in works.items() if not work.long)
    beside = sum(samples[n] / work.long.made_for for n, work in works.items() if work.long)
    return awaited_samples, max(1.0, awaited_samples + beside)


def steps_in_job(
    speeds: RoundSpeeds, works: Mapping[NodeId, NodeWork], full_steps: Mapping[NodeId, int]
) -> dict[NodeId, int]:
    """Steps that the end of the job leaves to those who take part.

    Args:
        speeds: Of all candidates.
        works: Of those who take part.
        full_steps: Steps that they would take if the job went on.
    """
    request = speeds.request
    awaited_steps = {node: full_steps[node] for node, work in works.items() if not work.long}
    batches = {node: work.batch.size for node, work in works.items()}
    awaited_samples, together = _round_samples(works, full_steps)
    samples_left = request.samples_total - request.samples_done
    awaited_left = ceil(samples_left * awaited_samples / together)
    fitted_steps = fit_steps(awaited_steps, batches, awaited_left)
    # Prefetched steps are done, or nearly so: the end of the job does not cut them.
    kept_steps = {
        node: max(steps, min(full_steps[node], works[node].prefetched_steps))
        for node, steps in fitted_steps.items()
    }
    long_steps = {
        node: min(full_steps[node], max(1, ceil(samples_left / batches[node])))
        for node, work in works.items()
        if work.long
    }
    return kept_steps | long_steps


def fit_steps(
    steps: Mapping[NodeId, int], batches: Mapping[NodeId, int], samples_left: int
) -> dict[NodeId, int]:
    """The same steps, fewer where the job ends: its last two rounds share the rest."""
    planned_samples = sum(count * batches[node] for node, count in steps.items())
    rounds_left = max(1, ceil(samples_left / max(1, planned_samples)))
    if rounds_left > 2 or samples_left >= rounds_left * planned_samples:
        return dict(steps)
    share = max(0, samples_left) / rounds_left / planned_samples
    return {node: max(1, ceil(count * share)) for node, count in steps.items()}
