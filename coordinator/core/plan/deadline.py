"""When a round closes without those who are late: at the moment that makes the most of it."""

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.core.measure.forecast import FinishForecast, FinishParts
from hypergpu.units import Milliseconds, Samples

_LEAST_SPREAD = 0.04
"""No finish is known better than to a twenty-fifth."""
_LEAST_SPREAD_MS = 40
"""A busy machine's scheduler is worth that much."""
LEAST_MS = 4 * _LEAST_SPREAD_MS
"""No round closes without somebody sooner, however little there is to do: what is as good as
immediate is hardly ever later than this.
"""
_NO_PARTS = FinishParts(*[Milliseconds(0)] * 5)
_GRACE = 0.25
_MOMENTS = 64
"""Moments that are compared at most."""


class UpdateArrival(NamedTuple):
    """When an update is forecast to be in, after the round's opening."""

    mean_ms: Milliseconds
    spread_ms: Milliseconds
    samples: Samples

    @property
    def forecast(self) -> FinishForecast:
        """The same as `measure` has it, never more certain than anything is."""
        spread = max(self.spread_ms, int(_LEAST_SPREAD * self.mean_ms), _LEAST_SPREAD_MS)
        return FinishForecast(self.mean_ms, Milliseconds(spread), _NO_PARTS)

    @property
    def late_ms(self) -> Milliseconds:
        """Nine of ten are in by then."""
        return self.forecast.quantile_ms(0.9)

    @property
    def safe_ms(self) -> Milliseconds:
        """Hardly ever later: what RFC 6298 makes a timer of, four mean deviations."""
        forecast = self.forecast
        return Milliseconds(forecast.mean_ms + 4 * forecast.deviation_ms)

    def chance_by(self, at_ms: int) -> float:
        """How likely it is in by then."""
        return self.forecast.chance_by(Milliseconds(at_ms))


def deadline(arrivals: Sequence[UpdateArrival], quorum: int) -> Milliseconds:
    """The deadline that makes the most samples a second, and some grace.

    It is never before the quorum is likely. The grace is what makes even the latest one safe, up
    to a quarter of the deadline: a round closes as soon as everybody is in, so it costs only when
    somebody is missing.

    Args:
        arrivals: One for each participant that was ever measured, at least one.
        quorum: Updates that have to be in, at least one.

    Returns:
        Time after the round's opening, more than 0.
    """
    late = sorted(arrival.late_ms for arrival in arrivals)
    needed = late[min(len(late), quorum) - 1]
    moments = sorted({arrival.mean_ms for arrival in arrivals} | set(late))
    moments = [moment for moment in moments[:: len(moments) // _MOMENTS + 1] if moment >= needed]
    best = max([needed, *moments], key=lambda at_ms: (_goodput(arrivals, at_ms), -at_ms))
    safe = max(arrival.safe_ms for arrival in arrivals)
    grace = min(max(0, safe - best), int(_GRACE * best))
    return Milliseconds(max(LEAST_MS, best + grace))


def _goodput(arrivals: Sequence[UpdateArrival], at_ms: int) -> float:
    """Samples a second that are expected if a round always closes then."""
    expected = sum(arrival.samples * arrival.chance_by(at_ms) for arrival in arrivals)
    return expected / max(1, at_ms)
