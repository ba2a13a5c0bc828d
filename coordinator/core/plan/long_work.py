"""Work under a lease that no round waits for: how many rounds it is made for, in how many steps of
which batch.

Theory of operation. Such a node is idle from its update's arrival until the next round opens. So
its work is made to be in shortly before a round closes, and of the lengths that do so the shortest
is taken that keeps it computing most of the time: a shorter one is folded with less staleness. One
step may be more than fits into a round, and moving bytes may take several rounds.
"""

from math import ceil
from typing import NamedTuple

from coordinator.core.plan.batches import BatchBounds
from coordinator.core.plan.node_work import StepBounds
from hypergpu.assignment import LEASE_ROUNDS_MOST

ROUNDS_MOST = LEASE_ROUNDS_MOST
"""Rounds that a lease lasts at most: its update then still counts a quarter, and the deltas that
lead on from its base are still kept.
"""
_BEFORE_CLOSE = 0.06
"""Part of a round's span that the update is made to be in before it closes."""
_SPREADS = 1.5
"""And so many mean deviations of the forecast, as far as they are within this part of a round."""
_SPREADS_MOST = 0.15
_BUSY = 0.88
"""Share of its time that a node is to compute, as far as any length lets it."""
_BUSY_OF_BEST = 0.95
_SLACK_ROUNDS, _SLACK_TIMES = 2, 2
"""A lease lasts so many rounds longer than it is made for: what is late is still of use."""
_STEPS_WHOLE = 8
"""From so many steps on they are whole, and of the largest batch."""


class LongWork(NamedTuple):
    """Work of a node that no round waits for."""

    inner_steps: int
    batch_size: int
    rounds: int
    """Rounds that its lease lasts at most, at least 2."""
    made_for: int
    """Rounds after which its update is forecast to be in."""


class WorkTimes(NamedTuple):
    """What a node's work consists of, in microseconds."""

    step_us: float
    """A step with the node's largest batch."""
    moving_us: float
    spread_us: float
    """Mean deviation of the forecast of a round's work."""
    span_us: float
    """When the round is forecast to close."""


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
    wanted = min(_BUSY, _BUSY_OF_BEST * best)
    made_for, (steps, share, _) = next(
        (rounds, found)
        for rounds, found in enumerate(sizes, 1)
        if (found[2] >= wanted and found[2] > 0) or rounds == len(sizes)
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
    wanted = room_us / times.step_us
    # Of many steps a part of one is not worth a batch of its own.
    whole = int(wanted) if wanted >= _STEPS_WHOLE else ceil(wanted)
    steps = min(max(bounds.least, whole), bounds.most)
    share = min(1.0, max(least, wanted / steps))
    # Samples are whole: a batch is what fits, never more.
    share = max(least, int(share * batches.most) / batches.most)
    busy_us = steps * share * times.step_us
    return steps, share, min(busy_us, room_us) / (rounds * times.span_us)
