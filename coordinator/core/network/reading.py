"""Measured line and speed of a node, the observations that they are made of, and how one follows
a quantity that wanders. Pure values.

Nothing here is journalled: after a restart readings are made anew, and plans go on from the plan
before until there are some.

Jacobson 1988 (RFC 6298) with two additions. An observation further off than four deviations counts
as four deviations, so that a settled mean moves by half a deviation at most, however absurd the
observation is. And evidence that the level has changed is added up as in a CUSUM chart (Page 1954):
two observations beyond the limit on the same side, or more of them that are less far off, and the
estimate starts again from the newest two, the one that claims less. All that is compared are
ratios: a line that became ten times faster is as much of a surprise as one ten times slower.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from math import inf, log
from statistics import median

import msgspec

from hypergpu.units import Bytes, Microseconds, Milliseconds


class Estimate(msgspec.Struct, frozen=True):
    """A quantity that wanders: its mean and mean deviation (Jacobson; RFC 6298)."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    """Observations since its level last changed at once; 0: not known."""
    at_ms: Milliseconds = Milliseconds(0)
    """Job time of the newest one."""
    drift: float = 0.0
    """Evidence in a row that the level has changed, in deviations; negative: downwards."""
    newest: float = 0.0
    """The newest observation as it was."""


class TransferDirection(Enum):
    """Way of a transfer, as the node sees it."""

    UP = "up"
    DOWN = "down"


class RoundTrip(msgspec.Struct, frozen=True):
    """A probe of the control stream came back."""

    at_ms: Milliseconds
    took_us: Microseconds


class PacketTrain(msgspec.Struct, frozen=True):
    """A train of datagrams was sent, and what of it was not echoed."""

    at_ms: Milliseconds
    sent: int
    lost: int
    bursts: int


class TransferTime(msgspec.Struct, frozen=True):
    """Bytes that got through, and how long they took once the first was there.

    One that broke off counts for the bytes that arrived: it is what a line that has become bad
    shows first.
    """

    at_ms: Milliseconds
    direction: TransferDirection
    size_bytes: Bytes
    took_us: Microseconds
    connections: int


class StepTime(msgspec.Struct, frozen=True):
    """Inner steps that were taken, counted in steps of the job's own batch."""

    at_ms: Milliseconds
    steps: float
    took_ms: Milliseconds


class Finish(msgspec.Struct, frozen=True):
    """An update arrived: what was forecast and what it took, from its assignment on."""

    at_ms: Milliseconds
    forecast_ms: Milliseconds
    took_ms: Milliseconds


class Presence(msgspec.Struct, frozen=True):
    """The node came or went."""

    at_ms: Milliseconds
    is_present: bool
    is_starting: bool = False
    """The node is there and its worker is not ready yet."""


class SocketReport(msgspec.Struct, frozen=True):
    """What the node says of its own sockets."""

    at_ms: Milliseconds
    congestion_control: str
    is_probing_blocked: bool
    coordinator_congestion_control: str = ""
    """That of the coordinator's sockets to nodes, which carry what goes down; empty: not known."""


Observation = RoundTrip | PacketTrain | TransferTime | StepTime | Finish | Presence | SocketReport


class Conditions(msgspec.Struct, frozen=True):
    """What held while a goodput was measured, so that it can be carried over to other numbers."""

    round_trip_us: Microseconds = Microseconds(0)
    """0: not known."""
    connections: int = 1


class NodeReading(msgspec.Struct, frozen=True):
    """Everything that is known of one node."""

    round_trip_us: Estimate = Estimate()
    least_round_trip_us: Microseconds = Microseconds(0)
    """Least of the newest probes: the line without queues; 0: not known."""
    newest_round_trips_us: tuple[Microseconds, ...] = ()
    """Up to ten, the newest last."""
    up_bits_per_s: Estimate = Estimate()
    """Goodput once slow start is over. The mean is harmonic: times are predicted from it."""
    down_bits_per_s: Estimate = Estimate()
    up_conditions: Conditions = Conditions()
    """Under which the newest upload was measured, and to which all before were carried over."""
    down_conditions: Conditions = Conditions()
    step_us: Estimate = Estimate()
    """Time of a step with the job's own batch: a node with a smaller one is no faster for it."""
    steps_most: float = 0.0
    """Most steps of one of its observations; 0: it has none, or is remembered."""
    packets_sent: float = 0.0
    """Probes, old ones forgotten bit by bit: with ``packets_lost`` a Beta posterior of losses."""
    packets_lost: float = 0.0
    bursts_lost: float = 0.0
    loss_at_ms: Milliseconds = Milliseconds(0)
    loss_bound: float = 0.0
    """The most that uploads so far leave room for; it stands in where probes are blocked."""
    correction: float = 1.0
    """What forecasts were off by: actual over predicted, in [0.5, 3]."""
    newest_ratios: tuple[float, ...] = ()
    """The same of single finishes, up to five, the newest last."""
    forecast_error: Estimate = Estimate()
    """Absolute error of forecasts over what it took."""
    is_present: bool = True
    is_starting: bool = False
    """Its worker's process is a new one that is not ready yet."""
    presence_count: int = 0
    """Times that it came or went; 0: nothing is known of its presence."""
    presence_at_ms: Milliseconds = Milliseconds(0)
    """When it came or went last."""
    present_ms: float = 0.0
    """How long it was there until then, and away; old times are forgotten bit by bit."""
    absent_ms: float = 0.0
    absences: float = 0.0
    """How often it went in that time."""
    congestion_control: str = ""
    """That of the node's sockets, which carry what goes up."""
    coordinator_congestion_control: str = ""
    """That of the coordinator's sockets, which carry what goes down."""
    is_probing_blocked: bool = False


MEAN_GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
"""Both of RFC 6298, once there are enough observations; the first few are averaged."""
DEVIATION_LOSS = 1 / 8
"""The same while observations are closer than usual. With RFC 6298's own gain a few close ones in
a row make the next one a surprise: every hundredth of normal noise of 20 % passed for a new level.
"""
SURPRISE = 4.0
"""Deviations from the mean beyond which an observation is clipped."""
STEADY_SHARE = 0.05
"""Least deviation over the mean, as no line is too steady to vary."""
NEW_LEVEL = 4.5
"""Evidence from which on the level is a new one: two surprises make 6. Half of it must have been
there before, so that no single observation convinces.
"""


def update_estimate(
    estimate: Estimate, value: float, at_ms: Milliseconds, *, weight: float = 1.0
) -> Estimate:
    """The estimate after one more observation.

    Args:
        estimate: Of a positive quantity.
        value: Observed; what is not positive is passed over.
        at_ms: When. An older observation than the newest counts, but makes nothing newer.
        weight: How far it is to be believed, in [0, 1]; 0 changes nothing.
    """
    if not 0 < value < inf or weight <= 0:
        return estimate
    if not estimate.count:
        # RFC 6298 begins with half; what is hardly believed may be off by all of itself.
        return Estimate(value, value * (1 - min(1.0, weight) / 2), 1, at_ms, newest=value)
    newest_ms = max(at_ms, estimate.at_ms)
    surprise = _surprise(estimate, value)
    drift = _drift(estimate.drift, surprise, weight)
    if min(abs(drift), 2 * abs(estimate.drift)) >= NEW_LEVEL and drift * estimate.drift > 0:
        level = min(
            value, estimate.newest or value, key=lambda each: abs(log(each / estimate.mean))
        )
        # If that claims too little, one more surprise is enough.
        left_drift = NEW_LEVEL / 2 if drift > 0 else -NEW_LEVEL / 2
        return Estimate(level, level / 2, 1, newest_ms, drift=left_drift, newest=value)
    off = _clip(estimate, value) - estimate.mean
    count = estimate.count + 1
    mean_gain = weight * max(MEAN_GAIN, 1 / count)
    gain = DEVIATION_GAIN if abs(off) > estimate.deviation else DEVIATION_LOSS
    deviation_gain = weight * max(gain, 1 / count)
    return Estimate(
        mean=estimate.mean + mean_gain * off,
        deviation=estimate.deviation + deviation_gain * (abs(off) - estimate.deviation),
        count=count,
        at_ms=newest_ms,
        drift=drift,
        newest=value,
    )


def update_rate(
    estimate: Estimate, value: float, at_ms: Milliseconds, *, weight: float = 1.0
) -> Estimate:
    """The same for a rate, whose mean is harmonic: what is averaged is the time of one unit."""
    if not 0 < value < inf:
        return estimate
    return inverse(update_estimate(inverse(estimate), 1 / value, at_ms, weight=weight))


def inverse(estimate: Estimate) -> Estimate:
    """Estimate of one over the quantity; twice gives it back."""
    if not estimate.count:
        return estimate
    mean = 1 / estimate.mean
    return msgspec.structs.replace(
        estimate,
        mean=mean,
        deviation=estimate.deviation * mean * mean,
        drift=-estimate.drift,
        newest=1 / estimate.newest if estimate.newest else 0.0,
    )


def laplace_quantile(mean: float, deviation: float, share: float) -> float:
    """The value that this share of observations stays under, never negative.

    Above the mean it is that of a Laplace distribution. Below, it is as many times less than the
    mean as the opposite quantile is more, which makes a rate's the inverse of its time's.

    Args:
        mean: Of a positive quantity.
        deviation: Its mean deviation.
        share: In (0, 1).
    """
    if mean <= 0:
        return 0.0
    beyond = deviation * -log(2 * min(share, 1 - share))
    return mean + beyond if share >= 0.5 else mean * mean / (mean + beyond)


def _limit(estimate: Estimate) -> float:
    """How many times the mean an observation may be without being clipped."""
    return 1 + SURPRISE * max(estimate.deviation / estimate.mean, STEADY_SHARE)


def _clip(estimate: Estimate, value: float) -> float:
    limit = _limit(estimate)
    return min(max(value, estimate.mean / limit), estimate.mean * limit)


def _surprise(estimate: Estimate, value: float) -> float:
    """How far off an observation is, in deviations; below the mean negative, by ratio alike."""
    times = max(value / estimate.mean, estimate.mean / value) - 1
    off = min(SURPRISE, SURPRISE * times / (_limit(estimate) - 1))
    return off if value >= estimate.mean else -off


def _drift(before: float, surprise: float, weight: float) -> float:
    """Evidence after one more observation: what is to be expected is no evidence, and one
    observation on the other side refutes all there was.
    """
    evidence = weight * max(0.0, abs(surprise) - 1)
    if surprise >= 0:
        return max(0.0, before) + evidence
    return min(0.0, before) - evidence


def median_reading(readings: Iterable[NodeReading]) -> NodeReading:
    """The median of each quantity over the nodes that are there and of which it is known."""
    there = [reading for reading in readings if reading.is_present]
    probed_readings = [reading for reading in there if reading.packets_sent > 0]
    round_trip_us = _middle(there, lambda reading: reading.round_trip_us)
    least = [r.least_round_trip_us for r in there if r.least_round_trip_us]
    return NodeReading(
        round_trip_us=round_trip_us,
        least_round_trip_us=Microseconds(round(median(least))) if least else Microseconds(0),
        up_bits_per_s=_middle(there, lambda reading: reading.up_bits_per_s),
        down_bits_per_s=_middle(there, lambda reading: reading.down_bits_per_s),
        step_us=_middle(there, lambda reading: reading.step_us),
        packets_sent=median(r.packets_sent for r in probed_readings) if probed_readings else 0.0,
        packets_lost=median(r.packets_lost for r in probed_readings) if probed_readings else 0.0,
        bursts_lost=median(r.bursts_lost for r in probed_readings) if probed_readings else 0.0,
    )


def _middle(
    readings: Sequence[NodeReading], quantity: Callable[[NodeReading], Estimate]
) -> Estimate:
    known_estimates = [estimate for reading in readings if (estimate := quantity(reading)).count]
    if not known_estimates:
        return Estimate()
    return Estimate(
        mean=median(estimate.mean for estimate in known_estimates),
        deviation=median(estimate.deviation for estimate in known_estimates),
        count=len(known_estimates),
        at_ms=max(estimate.at_ms for estimate in known_estimates),
    )
