"""Delay that wanders: correlated in time, never negative, and no packet overtakes another by it.

Independent jitter a packet either reorders or, where order is kept, turns into added mean delay.
Here the delay is a line through points a quarter of the jitter's memory apart. It falls more slowly
than time passes, so that a later packet never arrives earlier. That costs nothing while the jitter
is below an eighth of its memory; at a quarter it adds a tenth of the delay to the mean.
"""

import math

from netsim.link.link import LinkDirection
from netsim.link.noise import CorrelatedNoise

_POINTS_A_MEMORY = 4
_STEEPEST = 63 / 64  # Below 1, so that whole microseconds keep the order too.
_LOOK_BACK = 8  # Points whose slope may reach the present one; see `_point`.
_CORRELATION = math.exp(-1 / _POINTS_A_MEMORY)
# A line between two points varies less than its ends: 2 t (1 - t) averages 1/3.
_SPREAD = 1 / math.sqrt(1 - (1 - _CORRELATION) / 3)


class WanderingDelay:
    """A direction's delay as a function of time. Equal keys give equal delays.

    While the jitter is at most the delay, the delay is lognormal with exactly this mean and spread:
    skewed to the late side as measured delays are. A clamped jitter above the delay is a normal
    one cut off at zero.
    """

    def __init__(self, direction: LinkDirection, *, key: str) -> None:
        self._delay_us = direction.delay_us
        self._jitter_us = direction.jitter_us * _SPREAD
        self._apart_us = max(1, direction.jitter_memory_ms * 1000 // _POINTS_A_MEMORY)
        self._noise = CorrelatedNoise(key, _CORRELATION)
        self._from_us = 0
        self._until_us = 0
        self._first_us = 0.0
        self._slope = 0.0
        self._sigma = 0.0
        if direction.jitter_us <= direction.delay_us and direction.delay_us:
            self._sigma = math.sqrt(math.log1p((self._jitter_us / direction.delay_us) ** 2))

    def at(self, now_us: int) -> int:
        """Microseconds that a packet takes which leaves the bottleneck now."""
        if not self._jitter_us:
            return self._delay_us
        if not self._from_us <= now_us < self._until_us:
            self._move(now_us // self._apart_us)
        return int(self._first_us + self._slope * (now_us - self._from_us))

    def _move(self, step: int) -> None:
        self._from_us = step * self._apart_us
        self._until_us = self._from_us + self._apart_us
        self._first_us = self._point(step)
        self._slope = (self._point(step + 1) - self._first_us) / self._apart_us

    def _point(self, step: int) -> float:
        """The delay at a point, raised to where the steepest fall from earlier points ends."""
        fall_us: float = self._apart_us * _STEEPEST
        return max(self._draw(step - back) - back * fall_us for back in range(_LOOK_BACK))

    def _draw(self, step: int) -> float:
        noise = self._noise.at(step)
        if self._sigma:
            return self._delay_us * math.exp(self._sigma * noise - self._sigma**2 / 2)
        return max(self._delay_us + self._jitter_us * noise, 0.0)
