"""What a gateway tells a monitor, by node, link and job."""

from collections import Counter
from collections.abc import Collection

from coordinator.core.hub.node_figures import NodeFigure, bounded_series
from coordinator.shell.gateway.counts import GatewayCounts
from coordinator.shell.gateway.session import GatewaySession
from coordinator.shell.metrics.text import by_node, gauge, metrics_text, single
from hypergpu.clock import monotonic_ms

JOBS_MOST = 100
_MEANINGS = {
    "answered": "Heartbeats and probes that were answered here.",
    "folded": "Messages that were replaced or merged and never went on.",
    "passed": "Messages of streams that went on to the coordinator.",
    "postponed": "Nodes that were told when to come again.",
    "silent": "Nodes that were let go of since they said nothing.",
    "calls": "Calls beside the streams.",
}


def gateway_metrics(
    counts: GatewayCounts, sessions: Collection[GatewaySession], coordinator: str
) -> bytes:
    """The text of all figures as they are now.

    Args:
        counts: Of this gateway.
        sessions: Open streams; of a node that dialled twice the later one is told.
        coordinator: Address of the one that this gateway speaks to.
    """
    newest = {each.node: each for each in sorted(sessions, key=lambda each: each.heard_ms)}
    now_ms, nodes = monotonic_ms(), sorted(newest)
    figures = [
        NodeFigure(
            "gateway_node_passed",
            "Messages of the node's open stream that went on.",
            {node: float(each.passed) for node, each in newest.items()},
        ),
        NodeFigure(
            "gateway_link_silence_seconds",
            "Time since the node said anything.",
            {node: (now_ms - each.heard_ms) / 1000 for node, each in newest.items()},
            is_mean=True,
        ),
        NodeFigure(
            "gateway_link_round_trip_seconds",
            "Round trip, the newest that the node measured.",
            {node: s.round_trip_us / 1e6 for node, s in newest.items() if s.round_trip_us},
            is_mean=True,
        ),
    ]
    jobs = Counter(each.job for each in newest.values() if each.job).most_common(JOBS_MOST)
    return metrics_text(
        [
            gauge("gateway_coordinator", "1: it serves this one.", "coordinator", {coordinator: 1}),
            single("gateway_sessions", "Open streams of nodes.", counts.sessions),
            *(
                single(f"gateway_{name}", _MEANINGS[name], value, is_total=True)
                for name, value in counts.totals().items()
            ),
            gauge("gateway_job_nodes", "Nodes that work for a job.", "job", dict(jobs)),
            *(by_node(each) for each in bounded_series(figures, nodes)),
        ]
    )
