"""Early stopping of a sweep by successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943).

In the first rung every point is trained for a part of its steps; the best of them, one in
``factor``, are trained for ``factor`` times as many in the next, and so on until the last rung has
all steps. A rung is a farm job of its own, so that any node may train any point; each training
begins anew, which costs less than to carry states between machines that may be gone.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hypergpu.workloads.metrics import RISES

RUNGS_MOST = 4
FACTOR_LEAST, FACTOR_MOST = 2, 10


class Rung(NamedTuple):
    """One round of the elimination."""

    number: int
    """From 1."""
    divisor: int
    """A point takes one in so many of its steps."""

    def steps_of(self, steps: int) -> int:
        """Inner steps that a point with so many in all takes; at least 1."""
        return max(1, -(-steps // self.divisor))


def rungs_of(points: int, factor: int) -> tuple[Rung, ...]:
    """The rungs of so many points; one without early stopping.

    Args:
        points: At least 1.
        factor: One in so many stays; 0: all.
    """
    count = 1
    while factor and count < RUNGS_MOST and points >= factor**count:
        count += 1
    return tuple(Rung(number + 1, factor ** (count - 1 - number)) for number in range(count))


def survivors(
    values: Mapping[int, float], factor: int, mode: str, points: Sequence[int]
) -> tuple[int, ...]:
    """Positions of the points that go on to the next rung, in order.

    Args:
        values: Metrics by position; a point without one does not go on.
        factor: One in so many of the rung's points goes on, rounded down, at least one.
        mode: Whether the metric falls or rises.
        points: Positions of the rung's points.
    """
    sign = -1 if mode == RISES else 1
    order = sorted(values, key=lambda position: (sign * values[position], position))
    return tuple(sorted(order[: max(1, len(points) // factor)]))
