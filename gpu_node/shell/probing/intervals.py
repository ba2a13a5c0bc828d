"""Intervals of measurements: short where a plan may soon rest on them, long on an idle line.

A thousand idle nodes must not keep a coordinator busy, so an idle node sends no probes:
the echo of each heartbeat is a round trip as well.
"""

import msgspec


class ProbeIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two measurements of each kind, before jitter."""

    round_trip_s: float = 2.0
    """While the node takes part in a job or is new."""
    first_train_s: float = 1.0
    train_s: float = 10.0
    """While it takes part in a job."""
    idle_train_s: float = 60.0
    blocked_train_s: float = 120.0
    report_s: float = 5.0
    """While it takes part in a job."""
    idle_report_s: float = 30.0
    news_s: float = 1.0
    """Time to the next report when a transfer has ended."""
    fresh_s: float = 10.0
    """Time after a greeting in which a node counts as new."""
    busy_s: float = 30.0
    """Time after its last sign of work in which a node counts as taking part in a job."""
