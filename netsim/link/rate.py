"""How a bottleneck's rate changes by itself: a seeded function of time, constant in pieces."""

import math
from typing import Annotated

import msgspec

from hypergpu.units import Milliseconds
from netsim.link.noise import CORRELATION_MOST, CorrelatedNoise

NEVER_US = 1 << 62
HOUR_US = 3_600_000_000
EVENING_HOURS = (18, 23)
_DAY_US = 24 * HOUR_US


_Factor = Annotated[float, msgspec.Meta(ge=0, le=1000)]


class RateShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors on a rate, as a world file gives them. The default leaves it constant."""

    every_ms: Annotated[Milliseconds, msgspec.Meta(ge=1)] = msgspec.field(
        default=Milliseconds(1000), name="every"
    )
    """How long each drawn or listed factor holds."""
    variation: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    """Standard deviation over mean of a lognormal factor with mean 1; 0: none is drawn."""
    correlation: Annotated[float, msgspec.Meta(ge=0, le=CORRELATION_MOST)] = 0.0
    """Correlation of that factor with the next one."""
    factors: tuple[_Factor, ...] = ()
    """Fixed factors, one after the other, then from the start again. 0 is a gap."""
    evening: _Factor = 1.0
    """Factor from 18 to 23 o'clock."""

    @property
    def changes_by_step(self) -> bool:
        """Whether every ``every_ms`` brings another factor."""
        return self.variation > 0 or len(self.factors) > 1


class RateProcess:
    """One direction's rate over time. Equal keys give equal rates.

    Args:
        shape: The rate's variation.
        bits_per_s: Its mean, before ``factors`` and ``evening``; 0 (no limit) stays 0.
        key: Seeds the drawn factors.
        starts_at_hour: Local time at the beginning of the world.
    """

    def __init__(
        self, shape: RateShape, bits_per_s: int, *, key: str, starts_at_hour: float = 12.0
    ) -> None:
        self._shape = shape
        self._bits_per_s = bits_per_s
        self._every_us = shape.every_ms * 1000
        self._starts_at_us = round(starts_at_hour * HOUR_US)
        variance = math.log1p(shape.variation**2)
        # The noise is correlated such that its exponential has the correlation asked for.
        of_noise = math.log1p(shape.correlation * shape.variation**2) / variance if variance else 0
        self._sigma = math.sqrt(variance)
        self._noise = CorrelatedNoise(key, of_noise)

    def factor_at(self, now_us: int) -> float:
        """What the rate is multiplied by."""
        step = now_us // self._every_us
        shape = self._shape
        factor = shape.factors[step % len(shape.factors)] if shape.factors else 1.0
        if self._sigma:
            factor *= math.exp(self._sigma * self._noise.at(step) - self._sigma**2 / 2)
        return factor * shape.evening if self._is_evening(now_us) else factor

    def next_change_us(self, now_us: int) -> int:
        """The first moment after ``now_us`` at which the rate may be another."""
        soonest = NEVER_US
        if self._bits_per_s and self._shape.changes_by_step:
            soonest = (now_us // self._every_us + 1) * self._every_us
        if self._bits_per_s and self._shape.evening != 1:
            soonest = min(soonest, self._next_evening_us(now_us))
        return soonest

    def _is_evening(self, now_us: int) -> bool:
        begins, ends = EVENING_HOURS
        return begins * HOUR_US <= (self._starts_at_us + now_us) % _DAY_US < ends * HOUR_US

    def _next_evening_us(self, now_us: int) -> int:
        since_midnight_us = (self._starts_at_us + now_us) % _DAY_US
        return now_us + min(
            (hour * HOUR_US - since_midnight_us - 1) % _DAY_US + 1 for hour in EVENING_HOURS
        )
