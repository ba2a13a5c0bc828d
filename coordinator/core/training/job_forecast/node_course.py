"""One way that a node may do in a job: what its work takes, and when it is away.

Everything is drawn by a hash of the way's number, so that equal arguments give equal forecasts.
"""

from collections.abc import Iterator, Mapping
from math import exp, log
from statistics import NormalDist
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import (
    Estimate,
    NodeReading,
    Presence,
    laplace_quantile,
    median_reading,
)
from coordinator.core.network.work_forecast import (
    ASSUMED_STEP_US,
    FinishForecast,
    RoundWork,
    finish_forecast,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

_FLEET_SPREAD = 0.5
"""Deviation of the logarithm of a step time that is taken from the fleet."""
_ASSUMED_SPREAD = 1.2
"""The same where nothing is known of any node."""
_NODE_SPREAD, _JOB_SPREAD = 0.04, 0.16
"""Deviation of the logarithm of what a measured node's work takes all through a job, over what is
forecast, and of what all nodes' work takes. The latter as jobs in 60 drawn worlds were off.
"""
_FIRST_ERROR = 0.1
"""What forecasts of a node are off by once its first update is in."""
_CHANCE = 0.6
"""Part of a forecast's deviation that is chance from one update to the next. The rest is error that
the corrections of forecasts take away while a job runs.
"""
_FLEET_WEIGHT_MS = 600_000
"""Time of the fleet's own absences that a node's are averaged with."""
_QUIET_MS, _QUIET_ABSENCES = 3_600_000, 0.05
"""So few absences are assumed of a fleet, in so long a time, before any were seen."""
_AWAY_MS = 10_000
"""How long an absence is assumed to last, counted as one."""
_AWAY_TIMES = 3
"""A node that is away for so many mean absences is not expected back."""
_NORMAL = NormalDist()
Absences = Iterator[tuple[float, float]]
"""Time until each absence, and its length, in milliseconds."""


def drawn_share(*keys: object) -> float:
    """A number in (0, 1) that follows from the keys alone."""
    digest = blake3("/".join(map(str, keys)).encode()).digest(8)
    return (int.from_bytes(digest, "big") + 0.5) / 2**64


class AbsenceRates(NamedTuple):
    """How often nodes are away, and for how long."""

    each_ms: Mapping[NodeId, float]
    """Mean time between two absences of a node."""
    away_ms: float
    """Mean length of one."""


def expected_nodes(
    readings: Mapping[NodeId, NodeReading], now_ms: Milliseconds
) -> dict[NodeId, NodeReading]:
    """Nodes that are there, and those that are away for no longer than usual."""
    rates = absence_rates(readings, now_ms)
    longest_ms = _AWAY_TIMES * rates.away_ms
    return {
        node: each
        for node, each in readings.items()
        if each.is_present or (each.presence_count and now_ms - each.presence_at_ms <= longest_ms)
    }


def absence_rates(readings: Mapping[NodeId, NodeReading], now_ms: Milliseconds) -> AbsenceRates:
    """Absences of each node as it was seen, averaged with those of its fleet."""
    readings = {node: _until_now(each, now_ms) for node, each in readings.items()}
    known_readings = readings.values()
    absences = sum(each.absences for each in known_readings)
    usual = (absences + _QUIET_ABSENCES) / (
        sum(each.present_ms for each in known_readings) + _QUIET_MS
    )
    each_ms = {
        node: (mine.present_ms + _FLEET_WEIGHT_MS) / (mine.absences + _FLEET_WEIGHT_MS * usual)
        for node, mine in readings.items()
    }
    away_ms = (sum(each.absent_ms for each in known_readings) + _AWAY_MS) / (absences + 1)
    return AbsenceRates(each_ms, away_ms)


def _until_now(reading: NodeReading, now_ms: Milliseconds) -> NodeReading:
    """The reading with the time since the node came; an absence counts once it is over."""
    if not reading.is_present:
        return reading
    return add_observation(reading, Presence(now_ms, reading.is_present, reading.is_starting))


class NodeCourse:
    """How one node does.

    Args:
        node: Its id.
        reading: What is known of it.
        typical: Of its fleet.
        draw: Number of the way, and whatever else it is to follow from.
    """

    def __init__(self, node: NodeId, reading: NodeReading, typical: NodeReading, draw: str) -> None:
        self._key = f"{draw}/{node}"
        self._reading = _with_first_update(reading, typical, self._key)
        self._typical = typical
        self._factor = exp(_NODE_SPREAD * _normal(self._key, "node"))
        self._assigned = 0

    @property
    def reading(self) -> NodeReading:
        """Its reading once its first update is in."""
        return self._reading

    def finish_ms(self, work: RoundWork) -> Milliseconds:
        """What its next work takes, from the assignment until the update is in."""
        self._assigned += 1
        forecast = self._forecast(work)
        share = drawn_share(self._key, "work", self._assigned)
        took_ms = laplace_quantile(forecast.mean_ms, _CHANCE * forecast.deviation_ms, share)
        return Milliseconds(max(1, round(self._factor * took_ms)))

    def _forecast(self, work: RoundWork) -> FinishForecast:
        finish = finish_forecast(self._reading, work, self._typical)
        if finish is None:
            raise AssertionError("a node's step time is known or assumed")
        return finish


def node_courses(readings: Mapping[NodeId, NodeReading], draw: str) -> dict[NodeId, NodeCourse]:
    """One way that the nodes may do."""
    typical = median_reading(readings.values())
    return {node: NodeCourse(node, mine, typical, draw) for node, mine in readings.items()}


def job_factor(share: float) -> float:
    """What all nodes' work takes over what is forecast: no more than that in this share of cases,
    in (0, 1).
    """
    return exp(_JOB_SPREAD * _NORMAL.inv_cdf(share))


def absence_moments(node: NodeId, rates: AbsenceRates, draw: str) -> Absences:
    """Endless times from the end of one absence to the next, each with its length, in ms."""
    number = 0
    while True:
        number += 1
        wait = -log(drawn_share(draw, node, "present", number)) * rates.each_ms[node]
        yield wait, -log(drawn_share(draw, node, "absent", number)) * rates.away_ms


def _normal(*keys: object) -> float:
    return _NORMAL.inv_cdf(drawn_share(*keys))


def _with_first_update(reading: NodeReading, typical: NodeReading, key: str) -> NodeReading:
    """The reading as it is once the node's first update is in. What is not known of it is drawn
    around what is typical of its fleet.
    """
    if not reading.step_us.count:
        usual = typical.step_us.mean or ASSUMED_STEP_US
        spread = _FLEET_SPREAD if typical.step_us.count else _ASSUMED_SPREAD
        reading = replace(reading, step_us=_draw_around(usual, spread, key, "step"))
    for name in ("up_bits_per_s", "down_bits_per_s"):
        usual = getattr(typical, name).mean
        if usual and not getattr(reading, name).count:
            reading = replace(reading, **{name: _draw_around(usual, _FLEET_SPREAD, key, name)})
    if not reading.forecast_error.count:
        reading = replace(reading, forecast_error=Estimate(_FIRST_ERROR, _FIRST_ERROR / 2, 1))
    return reading


def _draw_around(usual: float, spread: float, *keys: object) -> Estimate:
    mean = usual * exp(spread * _normal(*keys))
    return Estimate(mean, mean / 10, 1, newest=mean)
