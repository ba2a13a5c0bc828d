"""Figures as the text that Prometheus reads."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coordinator.core.hub.node_figures import FigureSeries


class _Families:
    """Gives families that were made before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def metrics_text(families: Sequence[Metric]) -> bytes:
    """The text of some families."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


def gauge(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """A figure that rises and falls, a sample a value of its label."""
    family = GaugeMetricFamily(f"hypergpu_{name}", meaning, labels=[label])
    for value, figure in values.items():
        family.add_metric([value], figure)
    return family


def total(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """A figure that only grows, a sample a value of its label."""
    family = CounterMetricFamily(f"hypergpu_{name}", meaning, labels=[label])
    for value, figure in values.items():
        family.add_metric([value], figure)
    return family


def single(name: str, meaning: str, value: float, *, is_total: bool = False) -> Metric:
    """A figure without a label."""
    kind = CounterMetricFamily if is_total else GaugeMetricFamily
    return kind(f"hypergpu_{name}", meaning, value=value)


def by_node(series: FigureSeries) -> Metric:
    """A figure by node."""
    figure = series.figure
    family = total if figure.is_total else gauge
    return family(figure.name, figure.meaning, "node", dict(series.samples))
