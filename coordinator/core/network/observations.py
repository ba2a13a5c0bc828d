"""Observations of a node, added to its reading one by one.

Forgetting is by observation. Nothing is ever averaged over more than a few minutes: lines and
machines change.
"""

from math import inf, log
from statistics import median

from msgspec.structs import replace

from coordinator.core.network.line import (
    LARGE_BYTES,
    congestion_control_of,
    goodput_under,
    loss_of_goodput,
    round_trip_us,
    seen_rate,
)
from coordinator.core.network.reading import (
    Conditions,
    Estimate,
    Finish,
    NodeReading,
    Observation,
    PacketTrain,
    Presence,
    RoundTrip,
    SocketReport,
    StepTime,
    TransferDirection,
    TransferTime,
    update_estimate,
    update_rate,
)
from coordinator.core.network.tcp import CongestionControl
from hypergpu.units import Microseconds, Milliseconds

NEWEST_ROUND_TRIPS = 10
KEPT_OF_TRAINS = 0.95
"""With 20 packets a train, 400 are remembered: 1 % is known to about half of itself."""
LOSS_BOUND_GROWTH = 1.05
"""The least bound that transfers gave is forgotten by this much with each."""
CORRECTION_LEAST, CORRECTION_MOST = 0.5, 3.0
CORRECTION_GAIN = 1 / 2
NEWEST_RATIOS, RATIOS_LEAST = 5, 3
"""Finishes whose median corrects forecasts, and from how many on."""
ABSENCES_MOST, KEPT_OF_ABSENCES = 16, 0.5
"""Absences that are remembered, and how much is kept of them once there are more."""
STEP_TIMES = 4.0
"""One observation moves the time of a step by this factor at most, whatever it claims."""
STEP_US_LEAST, STEP_US_MOST = 1.0, 1e10
"""No step is believed to be shorter than a microsecond or longer than three hours."""
FEW_STEPS, MORE_STEPS = 4, 4
"""Observations of fewer steps than the first are forgotten with one of so many times as many."""
ERROR_GAIN = 1 / 4
ERROR_MOST = 3.0


def add_observation(reading: NodeReading, observation: Observation) -> NodeReading:
    """The reading after an observation, which may be late, absurd or empty; none is rejected."""
    match observation:
        case RoundTrip():
            return _round_trip(reading, observation)
        case PacketTrain():
            return _train(reading, observation)
        case TransferTime():
            return _transfer(reading, observation)
        case SocketReport():
            return _host(reading, observation)
        case StepTime():
            return _steps(reading, observation)
        case Finish():
            return _finish(reading, observation)
        case Presence():
            return _presence(reading, observation)


def _round_trip(reading: NodeReading, probe: RoundTrip) -> NodeReading:
    if probe.took_us <= 0:
        return reading
    newest = (*reading.newest_round_trips_us, probe.took_us)[-NEWEST_ROUND_TRIPS:]
    return replace(
        reading,
        round_trip_us=update_estimate(reading.round_trip_us, probe.took_us, probe.at_ms),
        newest_round_trips_us=newest,
        least_round_trip_us=min(newest),
    )


def _train(reading: NodeReading, train: PacketTrain) -> NodeReading:
    if train.sent <= 0:
        return reading
    lost_packets = min(max(0, train.lost), train.sent)
    bursts = min(max(1, train.bursts), lost_packets)
    return replace(
        reading,
        packets_sent=KEPT_OF_TRAINS * reading.packets_sent + train.sent,
        packets_lost=KEPT_OF_TRAINS * reading.packets_lost + lost_packets,
        bursts_lost=KEPT_OF_TRAINS * reading.bursts_lost + bursts,
        loss_at_ms=max(reading.loss_at_ms, train.at_ms),
    )


def _transfer(reading: NodeReading, transfer: TransferTime) -> NodeReading:
    if transfer.size_bytes <= 0 or transfer.took_us <= 0:
        return reading
    now = Conditions(_known_round_trip_us(reading), max(1, transfer.connections))
    sample = seen_rate(transfer.size_bytes, transfer.took_us, now.round_trip_us, now.connections)
    is_up = transfer.direction is TransferDirection.UP
    before = reading.up_bits_per_s if is_up else reading.down_bits_per_s
    if before.count:
        estimate_now = goodput_under(reading, transfer.direction, now)
        before = min(before, estimate_now, key=lambda each: abs(log(each.mean / sample.bits_per_s)))
    # What is seen of a transfer that slow start explains is the least that the line can be.
    bits_per_s = max(sample.bits_per_s, before.mean) if sample.is_least else sample.bits_per_s
    after = update_rate(before, bits_per_s, transfer.at_ms, weight=sample.weight)
    if not is_up:
        return replace(reading, down_bits_per_s=after, down_conditions=now)
    bound = _loss_bound(reading, transfer, now)
    return replace(reading, up_bits_per_s=after, up_conditions=now, loss_bound=bound)


def _known_round_trip_us(reading: NodeReading) -> Microseconds:
    return round_trip_us(reading) if reading.round_trip_us.count else Microseconds(0)


def _loss_bound(reading: NodeReading, transfer: TransferTime, now: Conditions) -> float:
    """The least of what uploads leave room for: fewer connections that came to as much say that
    the line was the limit with more of them.
    """
    heeds = congestion_control_of(reading, TransferDirection.UP) is not CongestionControl.BBR
    if transfer.size_bytes < LARGE_BYTES or not now.round_trip_us or not heeds:
        return reading.loss_bound
    goodput = transfer.size_bytes * 8e6 / transfer.took_us
    bound = loss_of_goodput(goodput, now.round_trip_us, now.connections)
    return min(bound, LOSS_BOUND_GROWTH * reading.loss_bound) if reading.loss_bound else bound


def _steps(reading: NodeReading, steps: StepTime) -> NodeReading:
    if not 0 < steps.steps < inf or steps.took_ms <= 0:
        return reading
    before = reading.step_us
    each_us = min(STEP_US_MOST, max(STEP_US_LEAST, steps.took_ms * 1000 / steps.steps))
    if before.count:
        each_us = min(max(each_us, before.mean / STEP_TIMES), before.mean * STEP_TIMES)
    if 0 < reading.steps_most < FEW_STEPS and steps.steps >= MORE_STEPS * reading.steps_most:
        # What surrounds a training, and warming up, was most of the time of so few steps.
        before = replace(before, mean=each_us, deviation=each_us / 10, drift=0.0)
    return replace(
        reading,
        step_us=update_estimate(before, each_us, steps.at_ms),
        steps_most=max(reading.steps_most, steps.steps),
    )


def _finish(reading: NodeReading, finish: Finish) -> NodeReading:
    """Learn what forecasts are off by, whatever the node's own estimates say.

    A node whose line has just broken down finishes late once or twice, until its estimates have
    followed. That is no fault of forecasts: the median of the newest five does not move by it.
    """
    if finish.forecast_ms <= 0 or finish.took_ms <= 0:
        return reading
    # The forecast had the correction in it already.
    ratio = reading.correction * finish.took_ms / finish.forecast_ms
    ratio = min(max(ratio, CORRECTION_LEAST), CORRECTION_MOST)
    newest = (*reading.newest_ratios, ratio)[-NEWEST_RATIOS:]
    correction = reading.correction
    if len(newest) >= RATIOS_LEAST:
        correction += CORRECTION_GAIN * (median(newest) - correction)
    error = min(ERROR_MOST, abs(finish.took_ms - finish.forecast_ms) / finish.took_ms)
    return replace(
        reading,
        correction=correction,
        newest_ratios=newest,
        forecast_error=_error(reading.forecast_error, error, finish.at_ms),
    )


def _error(known: Estimate, error: float, at_ms: Milliseconds) -> Estimate:
    """A plain moving mean: an error may be 0, so ratios of errors say nothing. The first forecast
    was made of assumptions and the first error is forgotten with the second.
    """
    newest_ms = max(known.at_ms, at_ms)
    if known.count < 2:
        return Estimate(error, error / 2, known.count + 1, newest_ms)
    off = error - known.mean
    return Estimate(
        mean=known.mean + ERROR_GAIN * off,
        deviation=known.deviation + ERROR_GAIN * (abs(off) - known.deviation),
        count=known.count + 1,
        at_ms=newest_ms,
    )


def _presence(reading: NodeReading, presence: Presence) -> NodeReading:
    kept_share = KEPT_OF_ABSENCES if reading.absences >= ABSENCES_MOST else 1.0
    is_known, was_present = reading.presence_count > 0, reading.is_present
    passed_ms = max(0, presence.at_ms - reading.presence_at_ms) if is_known else 0
    is_gone = is_known and was_present and not presence.is_present
    return replace(
        reading,
        presence_count=reading.presence_count + 1,
        presence_at_ms=max(presence.at_ms, reading.presence_at_ms) if is_known else presence.at_ms,
        present_ms=kept_share * (reading.present_ms + (passed_ms if was_present else 0)),
        absent_ms=kept_share * (reading.absent_ms + (0 if was_present else passed_ms)),
        absences=kept_share * (reading.absences + is_gone),
        is_present=presence.is_present,
        is_starting=presence.is_present and presence.is_starting,
    )


def _host(reading: NodeReading, host: SocketReport) -> NodeReading:
    return replace(
        reading,
        congestion_control=host.congestion_control,
        coordinator_congestion_control=host.coordinator_congestion_control,
        is_probing_blocked=host.is_probing_blocked,
    )
