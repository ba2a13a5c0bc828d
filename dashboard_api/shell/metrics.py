"""Figures for Prometheus. Labels come from small fixed sets: no ids, no names."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dashboard_api.shell.services import DashboardServices

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES_MOST = 16
_TOTALS = {
    "updates_accepted": "Accepted updates of all jobs.",
    "updates_rejected": "Rejected updates of all jobs.",
    "samples": "Samples of accepted updates.",
    "bytes_up": "Bytes of updates that nodes sent.",
    "bytes_down": "Bytes of models that nodes fetched.",
}


class StateCollector:
    """Reads the server's own feed whenever somebody asks."""

    def __init__(self, services: DashboardServices) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        """Every figure as it is now."""
        feed = self._services.views.own.feed
        state: dict[str, Any] = feed.projection.state
        jobs, nodes = state["jobs"].values(), state["nodes"].values()
        reachable = float(state["coordinator"]["is_reachable"])
        yield _gauge("hypergpu_coordinator_reachable", "1: the coordinator answers.", reachable)
        for name, label, values, meaning in (
            ("hypergpu_jobs", "phase", [each["phase"] for each in jobs], "Jobs by phase."),
            ("hypergpu_nodes", "state", [each["state"] for each in nodes], "Nodes by state."),
            (
                "hypergpu_nodes_by_health",
                "level",
                [each["health"] for each in nodes if each["health"]],
                "Nodes by level of health.",
            ),
            (
                "hypergpu_alerts",
                "kind",
                [each["kind"] for each in state["alerts"].values()],
                "Standing alerts by kind.",
            ),
        ):
            family = GaugeMetricFamily(name, meaning, labels=[label])
            for value, count in Counter(values).most_common(STATES_MOST):
                family.add_metric([value], count)
            yield family
        for name, meaning in _TOTALS.items():
            total = sum(int(each[name]) for each in jobs)
            yield CounterMetricFamily(f"hypergpu_{name}", meaning, value=total)
        clients = len(feed.clients)
        yield _gauge("hypergpu_feed_clients", "Clients of the feed.", clients)
        forced_snapshots = feed.snapshots_forced
        meaning = "Snapshots sent to clients that fell behind."
        yield CounterMetricFamily("hypergpu_feed_snapshots_forced", meaning, value=forced_snapshots)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def metrics_text(services: DashboardServices) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(StateCollector(services))
    return generate_latest(registry)
