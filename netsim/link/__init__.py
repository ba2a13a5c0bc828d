"""The bad internet as pure data and pure, seeded functions. Reads no clock and opens no socket."""

from coordinator.core.transfer.path import CongestionControl
from netsim.link.course import LinkCourse, Variation
from netsim.link.episodes import Episodes, EpisodeTimes
from netsim.link.jitter import WanderingDelay
from netsim.link.link import STALLED_BITS_PER_S, Link, LinkDirection, most_loss
from netsim.link.loss import LossChain, loss_events_per_packet, transitions
from netsim.link.rate import NEVER_US, RateProcess, RateShape
from netsim.link.shape import COORDINATOR_LINK, UNLIMITED, Shape, Way
from netsim.link.trace import TRACE_BYTES_MAX, LinkTrace, TraceRow, csv_trace, mahimahi_trace

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
