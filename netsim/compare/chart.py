"""`compare.svg`: the metric against time and against bytes, a line and a band a strategy. Pure."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hypergpu import svg
from hypergpu.units import are, several
from hypergpu.user.client.history import EvaluationPoint
from hypergpu.user.terminal.output import size, span
from netsim.compare.outcome import EXTRAPOLATED, Comparison, StrategyRun

PAGE = (1040.0, 470.0)
_PANEL = (420.0, 300.0)
_LEFTS = (70.0, 580.0)
_TOP = 104.0
_STEPS = (1, 2, 5)
_LABELS = 7
_STYLE = """
text { font: 12px "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #1f2933 }
.title { font-size: 18px; font-weight: 600 } .quiet { fill: #5f6c7b }
.page { fill: #ffffff } .ground { fill: #f5f7f9 } .grid { stroke: #d5dbe1 }
.target { stroke: #1f2933; stroke-dasharray: 2 4 }
polyline { fill: none; stroke-width: 2 } polygon { opacity: .18 }
.worked-out { stroke-dasharray: 7 4 } .key { stroke-width: 2.5 }
.sync { stroke: #7b8794 } polygon.sync { fill: #7b8794; stroke: none }
.fedavg { stroke: #d9730d } polygon.fedavg { fill: #d9730d; stroke: none }
.diloco { stroke: #2468b4 } polygon.diloco { fill: #2468b4; stroke: none }
.aware { stroke: #17855a } polygon.aware { fill: #17855a; stroke: none }
"""


AmountOf = Callable[[EvaluationPoint], float]
Curve = list[tuple[float, float]]


class Level(NamedTuple):
    """The metric at one place of the axis."""

    at: float
    least: float
    median: float
    most: float


def seconds(point: EvaluationPoint) -> float:
    """Since the first round was opened."""
    return point.at_ms / 1000


def moved_bytes(point: EvaluationPoint) -> float:
    """Both ways."""
    return float(point.bytes_up + point.bytes_down)


_PANELS: tuple[tuple[str, AmountOf, Callable[[float], str]], ...] = (
    ("time since the first round was opened", seconds, span),
    ("bytes moved, up and down", moved_bytes, lambda count: size(round(count))),
)


class Axes(NamedTuple):
    """A panel's place and scales; the lower one is logarithmic."""

    left: float
    least: float
    most: float
    low: float
    high: float

    def x(self, at: float) -> float:
        """Where an amount lies."""
        return self.left + _PANEL[0] * _share(
            math.log(at), math.log(self.least), math.log(self.most)
        )

    def y(self, metric: float) -> float:
        """Where a metric lies."""
        return _TOP + _PANEL[1] * (1 - _share(metric, self.low, self.high))


def _share(value: float, least: float, most: float) -> float:
    return (value - least) / (most - least) if most > least else 0.5


def comparison_svg(comparison: Comparison) -> str:
    """Both panels; a strategy without evaluations has no line."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE[0]:.0f}" height="{PAGE[1]:.0f}">',
        f"<style>{_STYLE}</style>",
        svg.box((0, 0), PAGE, style="page"),
        *_head(comparison),
    ]
    for left_x, (title, amount, format_tick) in zip(_LEFTS, _PANELS, strict=True):
        levels_by_name = {
            name: levels([run for run in comparison.outcomes if run.strategy == name], amount)
            for name in _names(comparison)
        }
        all_levels = [level for each in levels_by_name.values() for level in each]
        if not all_levels:
            parts.append(svg.text(left_x, _TOP + 20, "nothing was evaluated", style="quiet"))
            continue
        axes = _axes(left_x, all_levels, comparison.target)
        parts += _frame(axes, title, [format_tick(tick) for tick in ticks(axes.least, axes.most)])
        parts += _target(axes, comparison.target)
        for name, each in levels_by_name.items():
            parts += _series(axes, each, _classes(comparison, name))
    return "\n".join([*parts, "</svg>", ""])


def ticks(least: float, most: float) -> list[float]:
    """Round numbers within a logarithmic axis: powers of ten, and more where those are few."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    powers = [10.0**power for power in range(first, last + 1)]
    round_numbers = [
        step * power for power in powers for step in _STEPS if least <= step * power <= most
    ]
    if len(round_numbers) > _LABELS:
        round_numbers = [power for power in powers if least <= power <= most]
    return round_numbers or [least]


def _names(comparison: Comparison) -> list[str]:
    return [each.strategy for each in comparison.strategies]


def _classes(comparison: Comparison, name: str) -> str:
    is_worked_out = any(
        each.strategy == name and each.how == EXTRAPOLATED for each in comparison.strategies
    )
    return f"{name} worked-out" if is_worked_out else name


def _axes(left: float, drawn: Sequence[Level], target: float) -> Axes:
    low = min(level.least for level in drawn)
    high = max(*(level.most for level in drawn), target)
    margin = (high - low) * 0.06 or 0.5
    least, most = min(level.at for level in drawn), max(level.at for level in drawn)
    return Axes(left, least / 1.15, most * 1.15, low - margin, high + margin)


def _head(comparison: Comparison) -> Iterator[str]:
    yield svg.text(20, 32, f"{comparison.job} in {comparison.world}", style="title")
    runs = max(each.runs for each in comparison.strategies)
    bands = f"median of {runs} seeds, band from least to most" if runs > 1 else "one seed"
    subtitle = f"{comparison.workload} over {comparison.backend}; {bands}"
    yield svg.text(PAGE[0] - 20, 32, subtitle, style="quiet", anchor="end")
    x = 20.0
    for each in comparison.strategies:
        words = each.strategy + (f" ({each.how})" if each.how == EXTRAPOLATED else "")
        yield svg.line((x, 60), (x + 26, 60), style=f"key {_classes(comparison, each.strategy)}")
        yield svg.text(x + 34, 64, words)
        x += 64 + 6.6 * len(words)
    if invalid := sum(each.runs_invalid for each in comparison.strategies):
        words = f"{several(invalid, 'run')} {are(invalid)} INVALID: links were not as asked"
        yield svg.text(PAGE[0] - 20, 64, words, anchor="end")


def _frame(axes: Axes, title: str, words: Sequence[str]) -> Iterator[str]:
    yield svg.box((axes.left, _TOP), _PANEL, style="ground")
    bottom = _TOP + _PANEL[1]
    for tick, word in zip(ticks(axes.least, axes.most), words, strict=True):
        x = axes.x(tick)
        yield svg.line((x, _TOP), (x, bottom), style="grid")
        yield svg.text(x, bottom + 18, word, style="quiet", anchor="middle")
    for tick in _even(axes.low, axes.high):
        y = axes.y(tick)
        yield svg.line((axes.left, y), (axes.left + _PANEL[0], y), style="grid")
        yield svg.text(axes.left - 8, y + 4, f"{tick:g}", style="quiet", anchor="end")
    middle = axes.left + _PANEL[0] / 2
    yield svg.text(middle, bottom + 42, title, style="quiet", anchor="middle")


def _even(low: float, high: float) -> list[float]:
    """Round numbers within a linear axis."""
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(
        each * power / 10 for each in (1, 2, 5, 10, 20) if (high - low) / each <= power / 1.6
    )
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(number * step, 9) for number in range(first, last + 1)]


def _target(axes: Axes, target: float) -> Iterator[str]:
    y = axes.y(target)
    yield svg.line((axes.left, y), (axes.left + _PANEL[0], y), style="target")
    yield svg.text(axes.left + 6, y - 5, f"target {target:g}", style="quiet")


def _series(axes: Axes, found: Sequence[Level], classes: str) -> Iterator[str]:
    if not found:
        return
    if any(level.least != level.most for level in found):
        upper = [(axes.x(level.at), axes.y(level.most)) for level in found]
        lower = [(axes.x(level.at), axes.y(level.least)) for level in found]
        yield svg.area(upper, lower, style=classes)
    yield svg.curve([(axes.x(each.at), axes.y(each.median)) for each in found], style=classes)


def levels(runs: Sequence[StrategyRun], amount: AmountOf) -> list[Level]:
    """The seeds' metric over time or bytes, from where all have one to where the last one ends.

    A run that has ended keeps its last metric. Between evaluations a line is drawn.
    """
    curves = [curve for run in runs if (curve := _curve(run, amount))]
    if not curves:
        return []
    begin = max(curve[0][0] for curve in curves)
    end = max(curve[-1][0] for curve in curves)
    seed_levels = []
    places = {at for curve in curves for at, _ in curve if begin <= at <= end}
    for at in sorted(places):
        metrics = [_metric(curve, at) for curve in curves]
        seed_levels.append(Level(at, min(metrics), statistics.median(metrics), max(metrics)))
    return seed_levels


def _curve(run: StrategyRun, amount: AmountOf) -> Curve:
    points = [(amount(each), each.metric) for each in run.evaluations]
    return [(at, metric) for at, metric in points if metric is not None and at > 0]


def _metric(curve: Curve, at: float) -> float:
    for (start, before), (stop, after) in pairwise(curve):
        if start <= at < stop:
            return before + (after - before) * (at - start) / (stop - start)
    return curve[-1][1] if at >= curve[-1][0] else curve[0][1]
