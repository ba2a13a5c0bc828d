"""What a chart draws of a strategy: the middle of its seeds and the band around it. Pure."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hypergpu.cli.compare.outcome import StrategyRun
from hypergpu.client.history import EvaluationPoint

POINTS = 160
Amount = Callable[[EvaluationPoint], float]


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


def levels(runs: Sequence[StrategyRun], amount: Amount) -> list[Level]:
    """The seeds' metric over time or bytes, from where all have one to where the last one ends.

    A run that has ended keeps its last metric. Between evaluations a line is drawn.
    """
    curves = [curve for run in runs if (curve := _curve(run, amount))]
    if not curves:
        return []
    begin = max(curve[0][0] for curve in curves)
    end = max(curve[-1][0] for curve in curves)
    found = []
    for at in _places(begin, end, curves):
        metrics = [_metric(curve, at) for curve in curves]
        found.append(Level(at, min(metrics), statistics.median(metrics), max(metrics)))
    return found


Curve = list[tuple[float, float]]


def _curve(run: StrategyRun, amount: Amount) -> Curve:
    points = [(amount(each), each.metric) for each in run.evaluations]
    return [(at, metric) for at, metric in points if metric is not None and at > 0]


def _places(begin: float, end: float, curves: Sequence[Curve]) -> Iterator[float]:
    """Every evaluation's place, and others between them at even steps of a logarithmic axis."""
    places = {at for curve in curves for at, _ in curve if begin <= at <= end}
    if end > begin:
        ratio = math.log(end / begin) / POINTS
        places |= {begin * math.exp(ratio * step) for step in range(1, POINTS)}
    yield from sorted(places)


def _metric(curve: Curve, at: float) -> float:
    for (left, before), (right, after) in pairwise(curve):
        if left <= at < right:
            return before + (after - before) * (at - left) / (right - left)
    return curve[-1][1] if at >= curve[-1][0] else curve[0][1]
