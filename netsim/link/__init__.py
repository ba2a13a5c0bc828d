"""The bad internet as pure data and pure, seeded functions. Reads no clock and opens no socket."""

from coordinator.core.network.tcp import CongestionControl
from netsim.link.course import (
    COORDINATOR_LINK,
    UNLIMITED,
    Episodes,
    EpisodeTimes,
    LinkCourse,
    Shape,
    Variation,
    Way,
)
from netsim.link.link import (
    STALLED_BITS_PER_S,
    TRACE_BYTES_MAX,
    Link,
    LinkDirection,
    LinkTrace,
    NetsimError,
    TraceRow,
    csv_trace,
    mahimahi_trace,
    most_loss,
)
from netsim.link.nat import NatKind
from netsim.link.pairs import PairDelay
from netsim.link.processes import (
    NEVER_US,
    LossChain,
    RateProcess,
    RateShape,
    WanderingDelay,
    loss_events_per_packet,
    transitions,
)

__all__ = [
    "COORDINATOR_LINK",
    "NEVER_US",
    "STALLED_BITS_PER_S",
    "TRACE_BYTES_MAX",
    "UNLIMITED",
    "CongestionControl",
    "EpisodeTimes",
    "Episodes",
    "Link",
    "LinkCourse",
    "LinkDirection",
    "LinkTrace",
    "LossChain",
    "NatKind",
    "NetsimError",
    "PairDelay",
    "RateProcess",
    "RateShape",
    "Shape",
    "TraceRow",
    "Variation",
    "WanderingDelay",
    "Way",
    "csv_trace",
    "loss_events_per_packet",
    "mahimahi_trace",
    "most_loss",
    "transitions",
]
