"""A figure out of readings that scatter, and how surely: no figure is told without its interval.

Nothing is assumed of how readings scatter. Each is to be independent of the others: a difference
between neighbours in time, not a value that drifts with the machine.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST = 6
"""Readings without which no 95 % interval of a median exists."""
_TAIL = 0.025
_RESAMPLES = 1_000
_SEED = 1
Readings = NDArray[np.float64]


class Estimate(NamedTuple):
    """What was found; with 95 % confidence it lies in [low, high]."""

    value: float
    low: float
    high: float

    def verdict(self, most: float) -> str:
        """What can be said of a limit: kept, missed, or that the interval holds the limit."""
        if self.high <= most:
            return ""
        return " MISSED" if self.low > most else " not shown"


def median_of(readings: Sequence[float]) -> Estimate:
    """The median, between two of the readings: a sign test's interval.

    Raises:
        ValueError: there are fewer than `LEAST`.
    """
    count = len(readings)
    if count < LEAST:
        raise ValueError(f"{count} readings have no interval, {LEAST} at least do")
    ordered = np.sort(np.asarray(readings, np.float64))
    # So many at either end that a fair coin falls so one-sidedly in 1 of 40 runs at most.
    below, out = 0.0, 0
    while (below := below + math.comb(count, out) / 2**count) <= _TAIL:
        out += 1
    return Estimate(float(np.median(ordered)), float(ordered[out - 1]), float(ordered[-out]))


def resampled(figure: Callable[[Sequence[int]], float], groups: int) -> Estimate:
    """A figure of groups of readings, its interval by drawing groups again (percentile bootstrap).

    Args:
        figure: Computes it from the groups with these numbers, which may come several times.
        groups: How many there are. Readings of one group may depend on each other.
    """
    draw = np.random.default_rng(_SEED)
    found = [figure(draw.integers(groups, size=groups).tolist()) for _ in range(_RESAMPLES)]
    low, high = np.quantile(found, [_TAIL, 1 - _TAIL])
    return Estimate(figure(range(groups)), float(low), float(high))
