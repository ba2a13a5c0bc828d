"""A job's forecast in the words of a terminal."""

from collections.abc import Callable

from hypergpu.units import several
from hypergpu.user.client.forecasts import ForecastRangeView, JobForecastView
from hypergpu.user.terminal.output import size, span


def forecast_lines(found: JobForecastView) -> list[str]:
    """What a job would take, a line each: time, bytes, cost, work, and what that is based on."""
    up, down = (_spread(size, each) for each in (found.bytes_up, found.bytes_down))
    nodes = several(found.nodes, "node")
    lines = [
        f"time      about {_spread(_seconds, found.left_ms)}",
        f"traffic   about {up} up, {down} down",
        f"work      {found.samples:,} samples in about {several(found.rounds, 'round')}, {nodes}",
    ]
    if found.cost is not None:
        cost = _spread(str, found.cost)
        lines.append(f"cost      about {cost} of an escrow of {found.escrow}")
    return [*lines, f"based on  {found.reason}"]


def left_text(found: JobForecastView) -> str:
    """Time that is left to a running job: ``about 4 min 10 s left (3 min 02 s to 5 min 50 s)``."""
    low, middle, high = _texts(_seconds, found.left_ms)
    return f"about {middle} left ({low} to {high})"


def _spread(text: Callable[[int], str], found: ForecastRangeView) -> str:
    low, middle, high = _texts(text, found)
    return middle if low == high else f"{middle} ({low} to {high})"


def _texts(text: Callable[[int], str], found: ForecastRangeView) -> tuple[str, str, str]:
    return text(found.low), text(found.middle), text(found.high)


def _seconds(time_ms: int) -> str:
    return span(time_ms / 1000)
