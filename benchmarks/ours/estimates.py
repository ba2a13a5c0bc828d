"""A figure out of readings that scatter, and how surely: no figure is told without its interval.

Nothing is assumed of how readings scatter. Each is to be independent of the others: a difference
between neighbours in time, not a value that drifts with the machine.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEAST = 6
"""Readings without which no 95 % interval of a median exists."""
_RESAMPLES = 1_000
_SEED = 1


class IntervalEstimate(NamedTuple):
    """What was found; with 95 % confidence it lies in [low, high]."""

    value: float
    low: float
    high: float

    def verdict(self, most: float) -> str:
        """What can be said of a limit: kept, missed, or that the interval holds the limit."""
        if self.high <= most:
            return ""
        return " MISSED" if self.low > most else " not shown"


def median_of(readings: Sequence[float]) -> IntervalEstimate:
    """The median, between two of the readings: a sign test's interval.

    Raises:
        ValueError: there are fewer than `LEAST`.
    """
    count = len(readings)
    if count < LEAST:
        raise ValueError(f"{count} readings have no interval, {LEAST} at least do")
    found = stats.quantile_test(readings, p=0.5).confidence_interval()
    return IntervalEstimate(float(np.median(readings)), float(found.low), float(found.high))


def bootstrap_estimate(figure: Callable[[Sequence[int]], float], groups: int) -> IntervalEstimate:
    """A figure of groups of readings, its interval by drawing groups again (percentile bootstrap).

    Args:
        figure: Computes it from the groups with these numbers, which may come several times.
        groups: How many there are. Readings of one group may depend on each other.
    """
    found = stats.bootstrap(
        (np.arange(groups),),
        lambda numbers: figure(numbers.tolist()),
        n_resamples=_RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=_SEED,
    ).confidence_interval
    return IntervalEstimate(figure(range(groups)), float(found.low), float(found.high))
