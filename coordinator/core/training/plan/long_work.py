"""Work under a lease that no round waits for: how many rounds it is made for, in how many steps of
which batch.

Theory of operation. Such a node is idle from its update's arrival until the next round opens. So
its work is made to be in shortly before a round closes, and of the lengths that do so the shortest
is taken that keeps it computing most of the time: a shorter one is folded with less staleness. One
step may be more than fits into a round, and moving bytes may take several rounds.
"""

from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.training.plan.batches import (
    BatchBounds,
    explain_batch,
    growth_reason,
    node_bounds,
    node_growth,
)
from coordinator.core.training.plan.decision import BatchGrowth, NodeMemory
from coordinator.core.training.plan.inner_steps import RoundPace
from coordinator.core.training.plan.node_work import LongWork, NodeWork
from coordinator.core.training.plan.round_shape import RoundShape
from coordinator.core.training.plan.speeds import RoundSpeeds
from coordinator.core.training.plan.step_limits import StepBounds
from hypergpu.assignment import LEASE_ROUNDS_MOST
from hypergpu.ids import NodeId
from hypergpu.units import Bytes

ROUNDS_MOST = LEASE_ROUNDS_MOST
"""Rounds that a lease lasts at most: its update then still counts a quarter, and the deltas that
lead on from its base are still kept.
"""
_BEFORE_CLOSE = 0.06
"""Part of a round's span that the update is made to be in before it closes."""
_SPREADS = 1.5
"""Mean deviations of the forecast that are added to it, within this part of a round."""
_SPREADS_MOST = 0.15
_BUSY = 0.88
"""Share of its time that a node is to compute, as far as any length lets it."""
_BUSY_OF_BEST = 0.95
_SLACK_ROUNDS, _SLACK_TIMES = 2, 2
"""A lease lasts so many rounds longer than it is made for: what is late is still of use."""
_STEPS_WHOLE = 8
"""From so many steps on they are whole, and of the largest batch."""


class WorkTimes(NamedTuple):
    """Times that a node's work consists of."""

    step_us: float
    """A step with the node's largest batch."""
    moving_us: float
    spread_us: float
    """Mean deviation of the forecast of a round's work."""
    span_us: float
    """Time until the round is forecast to close."""


def with_long_work(
    speeds: RoundSpeeds,
    shape: RoundShape,
    node: NodeId,
    work: NodeWork,
    memory: NodeMemory,
    pace: RoundPace,
) -> NodeWork:
    """The work of a node that no round waits for: one step where nothing is known of its speed, or
    where the node was excluded for work that its speed should have allowed.
    """
    stated_batch = speeds.request.spec.training.batch_size
    if not work.speed.reading.step_us.count or memory.retries:
        long, growth, reason = LongWork(1, stated_batch, ROUNDS_MOST, 1), memory.growth, ""
    else:
        long, growth = _measured_work(speeds, shape, node, work, memory, pace)
        is_grown = long.batch_size > stated_batch
        reason = growth_reason(growth, long.batch_size) if is_grown else "as much as its time holds"
    return work._replace(
        moving_us=work.moving_us + work.hidden_us,
        hidden_us=0.0,
        batch=explain_batch(speeds.request.spec, long.batch_size, reason),
        step_us=work.speed.step_us * long.batch_size / stated_batch,
        prefetched_steps=0,
        growth=growth,
        long=long,
    )


def _measured_work(
    speeds: RoundSpeeds,
    shape: RoundShape,
    node: NodeId,
    work: NodeWork,
    memory: NodeMemory,
    pace: RoundPace,
) -> tuple[LongWork, BatchGrowth]:
    """The work of a node whose speed is known, with the batches that it keeps or tries."""
    request, speed, round_us = speeds.request, work.speed, pace.round_us
    stated_batch = request.spec.training.batch_size
    up_bytes = speeds.sizes.update_bytes[work.codec]
    forecast = speed.finish(round_us / speed.step_us, up_bytes, Bytes(0))
    moving_us, spread_us = work.moving_us + work.hidden_us, 1000.0 * forecast.deviation_ms

    def work_of(batches: BatchBounds) -> LongWork:
        # The time of a batch goes as its samples do.
        step_us = speed.step_us * batches.most / stated_batch
        times = WorkTimes(step_us, moving_us, spread_us, round_us)
        return long_work(
            times,
            shape.limits,
            batches,
            cut_rounds=memory.cut_rounds,
            rounds_most=pace.rounds_left,
        )

    bounds, noise_share = node_bounds(request, node), speeds.agreement.noise_share
    growth = node_growth(request, node, memory, steps=0.0, noise_share=noise_share)
    usual_bounds = bounds._replace(most=growth.size or stated_batch)
    long = work_of(usual_bounds)
    steps = long.inner_steps * long.batch_size / usual_bounds.most
    growth = node_growth(request, node, memory, steps=steps, noise_share=noise_share)
    if growth.trial:
        long = work_of(bounds._replace(most=growth.trial))
    return long, growth if long.batch_size == growth.trial else replace(growth, trial=0)


def long_work(
    times: WorkTimes,
    bounds: StepBounds,
    batches: BatchBounds,
    *,
    cut_rounds: int,
    rounds_most: int = ROUNDS_MOST,
) -> LongWork:
    """The shortest work that keeps a node busy, of those that no round waits for.

    Args:
        times: Of the node.
        bounds: The fewest and the most of its steps in one round.
        batches: Its smallest and its largest batch.
        cut_rounds: Its leases in a row that ended without its update: each halves its work.
        rounds_most: Rounds that the job is forecast to last: shorter work than would keep the node
            busy is better than none. Work that needs more is returned as it is.
    """
    sizes = [_work_for(times, bounds, batches, rounds) for rounds in range(1, ROUNDS_MOST + 1)]
    within = sizes[: max(1, rounds_most)]
    sizes = within if any(busy > 0 for _, _, busy in within) else sizes
    best = max(busy for _, _, busy in sizes)
    least = min(_BUSY, _BUSY_OF_BEST * best)
    made_for, (steps, share, _) = next(
        (rounds, size)
        for rounds, size in enumerate(sizes, 1)
        if (size[2] >= least and size[2] > 0) or rounds == len(sizes)
    )
    steps = max(bounds.least, steps >> min(cut_rounds, 16))
    size = max(batches.least, min(batches.most, int(share * batches.most)))
    lasts = min(ROUNDS_MOST, max(_SLACK_TIMES * made_for, made_for + _SLACK_ROUNDS))
    return LongWork(steps, size, lasts, made_for)


def _work_for(
    times: WorkTimes, bounds: StepBounds, batches: BatchBounds, rounds: int
) -> tuple[int, float, float]:
    """Steps, share of the largest batch, and the part of so many rounds that it would compute."""
    margin_us = _BEFORE_CLOSE * times.span_us
    margin_us += min(_SPREADS_MOST * times.span_us, _SPREADS * times.spread_us)
    room_us = rounds * times.span_us - margin_us - times.moving_us
    least = batches.least / batches.most
    if room_us < bounds.least * least * times.step_us:
        return bounds.least, least, 0.0
    full_steps = room_us / times.step_us
    # Of many steps a part of one is not worth a batch of its own.
    whole = int(full_steps) if full_steps >= _STEPS_WHOLE else ceil(full_steps)
    steps = min(max(bounds.least, whole), bounds.most)
    share = min(1.0, max(least, full_steps / steps))
    # Samples are whole: a batch is what fits, never more.
    share = max(least, int(share * batches.most) / batches.most)
    busy_us = steps * share * times.step_us
    return steps, share, min(busy_us, room_us) / (rounds * times.span_us)
