"""Figures by node for a monitor, bounded: beyond `SERIES_MOST` series the rest of the nodes share
one label.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from hypergpu.ids import NodeId

SERIES_MOST = 1_000
"""Series by node of all figures together, the rest's included."""
REST = "rest"
"""The label of all nodes that have none of their own."""


class NodeFigure(NamedTuple):
    """One figure of many nodes."""

    name: str
    meaning: str
    values: dict[NodeId, float]
    """The value by node, where it is known."""
    is_total: bool = False
    """Whether it only grows."""
    is_mean: bool = False
    """Whether of the rest the mean is told, as a sum would say nothing."""


class FigureSeries(NamedTuple):
    """One figure as it is told."""

    figure: NodeFigure
    samples: list[tuple[str, float]]
    """Label of the node, and value; the rest last."""


def bounded_series(
    figures: Sequence[NodeFigure], nodes: Sequence[NodeId], most: int = SERIES_MOST
) -> list[FigureSeries]:
    """Series of the first nodes, and one of all others together.

    Args:
        figures: At least one, fewer than ``most``.
        nodes: By first contact, so that a node keeps its series.
        most: Series of all figures together.
    """
    if len(nodes) * len(figures) > most:
        own, rest = nodes[: most // len(figures) - 1], nodes[most // len(figures) - 1 :]
    else:
        own, rest = nodes, nodes[:0]
    return [FigureSeries(figure, _samples(figure, own, rest)) for figure in figures]


def _samples(
    figure: NodeFigure, own: Sequence[NodeId], rest: Sequence[NodeId]
) -> list[tuple[str, float]]:
    samples = [(str(node), figure.values[node]) for node in own if node in figure.values]
    others = [figure.values[node] for node in rest if node in figure.values]
    if others:
        samples.append((REST, fmean(others) if figure.is_mean else sum(others)))
    return samples
