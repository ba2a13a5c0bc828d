"""When a node will be done with a round's work: a mean, a spread, and what the time goes into.

    H * step + up + down + round trips, times the node's correction

Moving bytes takes ``size / goodput`` and the waiting of slow start, which is what a small transfer
consists of; and never less than the transfer model takes for the first 256 KiB over a line without
end, which is where losses stall a transfer however fast its line. What is not known of the node is
taken from its fleet, or assumed, and is then off by as much as it says.
"""

from math import exp, hypot

import msgspec

from coordinator.core.network.line import (
    LARGE_BYTES,
    goodput_of,
    path_of,
    round_trip_us,
    slow_start_us,
)
from coordinator.core.network.reading import (
    Estimate,
    NodeReading,
    TransferDirection,
    laplace_quantile,
)
from coordinator.core.network.tcp import CongestionControl, NetworkPath
from coordinator.core.network.transfer_forecast import forecast_transfer, round_path
from hypergpu.units import Bytes, Milliseconds

UNKNOWN = NodeReading()
_EXCHANGES = 2
"""Round trips of asking and answering: one call down, one up."""
ASSUMED_STEP_US = 100_000.0
UNCALIBRATED = 0.25
"""Spread of a node's whole forecast before any was compared with what it took."""
_BURSTS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Lengths that forecasts tell apart, so that nodes share them."""


class RoundWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is to do from its assignment on until its update is in."""

    inner_steps: float = 0
    """Counted in steps of the job's own batch."""
    up_bytes: Bytes = Bytes(0)
    down_bytes: Bytes = Bytes(0)
    connections: int = 1


class ForecastTime(msgspec.Struct, frozen=True):
    """How long something takes, in microseconds."""

    mean_us: float = 0.0
    deviation_us: float = 0.0


class FinishParts(msgspec.Struct, frozen=True):
    """What a forecast's mean is made of, corrected as it is."""

    compute_ms: Milliseconds = Milliseconds(0)
    up_ms: Milliseconds = Milliseconds(0)
    down_ms: Milliseconds = Milliseconds(0)
    round_trips_ms: Milliseconds = Milliseconds(0)

    @property
    def moving_ms(self) -> Milliseconds:
        """All that is not computing."""
        return Milliseconds(self.up_ms + self.down_ms + self.round_trips_ms)


class FinishForecast(msgspec.Struct, frozen=True):
    """Time of one node's finish, counted from its assignment."""

    mean_ms: Milliseconds
    deviation_ms: Milliseconds
    parts: FinishParts = FinishParts()

    def quantile_ms(self, share: float) -> Milliseconds:
        """It will be done by then with this chance, in (0, 1)."""
        return Milliseconds(round(laplace_quantile(self.mean_ms, self.deviation_ms, share)))

    def chance_by(self, limit_ms: Milliseconds) -> float:
        """The chance that it is done by then: the inverse of `quantile_ms`."""
        if limit_ms <= 0 or not self.deviation_ms:
            return 1.0 if limit_ms >= self.mean_ms else 0.0
        if limit_ms >= self.mean_ms:
            return 1 - exp(-(limit_ms - self.mean_ms) / self.deviation_ms) / 2
        times = self.mean_ms / limit_ms
        return exp(-self.mean_ms * (times - 1) / self.deviation_ms) / 2


def finish_forecast(
    reading: NodeReading, work: RoundWork, typical: NodeReading = UNKNOWN
) -> FinishForecast | None:
    """When the node will be done; None: nothing at all is known of it.

    Costs tens of microseconds, and a millisecond where losses are new.

    Args:
        reading: Of the node.
        work: What it is to do.
        typical: Of its fleet, for what is not known of the node itself.
    """
    if not _is_known(reading):
        return None
    connections = work.connections
    spans = (
        _computing(reading, work.inner_steps, typical),
        transfer_forecast(
            reading, TransferDirection.UP, work.up_bytes, connections=connections, typical=typical
        ),
        transfer_forecast(
            reading,
            TransferDirection.DOWN,
            work.down_bytes,
            connections=connections,
            typical=typical,
        ),
        _round_trips(_line(reading, typical)),
    )
    parts = FinishParts(
        *(Milliseconds(round(s.mean_us * reading.correction / 1000)) for s in spans)
    )
    mean_ms = parts.compute_ms + parts.moving_ms
    spread_ms = hypot(*(span.deviation_us for span in spans)) * reading.correction / 1000
    if reading.forecast_error.count and _is_all_known(reading, work):
        spread_ms = max(spread_ms, reading.forecast_error.mean * mean_ms)
    else:
        # What is assumed is off independently of what was ever compared.
        usual = reading.forecast_error.mean if reading.forecast_error.count else UNCALIBRATED
        spread_ms = hypot(spread_ms, usual * mean_ms)
    return FinishForecast(
        mean_ms=Milliseconds(mean_ms),
        deviation_ms=Milliseconds(round(spread_ms)),
        parts=parts,
    )


def transfer_forecast(
    reading: NodeReading,
    direction: TransferDirection,
    size_bytes: Bytes,
    *,
    connections: int = 1,
    typical: NodeReading = UNKNOWN,
) -> ForecastTime:
    """To move so many bytes, from the first that arrives to the last; not corrected."""
    if size_bytes <= 0:
        return ForecastTime()
    connections = max(1, connections)
    is_up = direction is TransferDirection.UP
    usual = typical.up_bits_per_s if is_up else typical.down_bits_per_s
    reading = _line(reading, typical)
    rtt_us = round_trip_us(reading)
    rate = goodput_of(reading, direction, connections, usual.mean)
    moving_us = size_bytes * 8e6 / rate.mean
    waiting_us = slow_start_us(size_bytes, rate.mean, rtt_us, connections)
    jitter = min(1.0, reading.round_trip_us.deviation / rtt_us)
    start_bytes = Bytes(-(-min(size_bytes, LARGE_BYTES) // connections))
    path = _start_path(path_of(reading, direction, rtt_us))
    start = forecast_transfer(path, start_bytes)
    # The first byte's way is that of the path as it is rounded: else a longer one could end sooner.
    start_us = max(0.0, start.median_us - path.rtt_us / 2)
    return ForecastTime(
        mean_us=max(moving_us + waiting_us, start_us),
        deviation_us=hypot(
            moving_us * rate.deviation / rate.mean, waiting_us * jitter, start_us * start.spread
        ),
    )


def _start_path(path: NetworkPath) -> NetworkPath:
    """For the first 256 KiB, in steps that nodes share. CUBIC starts as Reno does, whose windows
    move by round trips alone.
    """
    bursts = [burst for burst in _BURSTS if burst <= path.burst_packets]
    is_bbr = path.congestion_control is CongestionControl.BBR
    control = CongestionControl.BBR if is_bbr else CongestionControl.RENO
    near = round_path(path)
    return msgspec.structs.replace(near, burst_packets=bursts[-1], congestion_control=control)


def _computing(reading: NodeReading, inner_steps: float, typical: NodeReading) -> ForecastTime:
    if reading.step_us.count:
        each = reading.step_us
    else:
        mean = typical.step_us.mean or ASSUMED_STEP_US
        each = Estimate(mean=mean, deviation=mean)
    return ForecastTime(inner_steps * each.mean, inner_steps * each.deviation)


def _round_trips(reading: NodeReading) -> ForecastTime:
    mean_us = reading.round_trip_us.mean or round_trip_us(reading)
    deviation_us = reading.round_trip_us.deviation if reading.round_trip_us.count else mean_us
    return ForecastTime(_EXCHANGES * mean_us, _EXCHANGES * deviation_us)


def _line(reading: NodeReading, typical: NodeReading) -> NodeReading:
    """The reading with a typical round trip if it has none of its own."""
    usual = typical.round_trip_us
    if reading.round_trip_us.count or not usual.count:
        return reading
    return msgspec.structs.replace(
        reading,
        round_trip_us=Estimate(mean=usual.mean, deviation=usual.mean),
        least_round_trip_us=typical.least_round_trip_us,
    )


def _is_known(reading: NodeReading) -> bool:
    estimates = (
        reading.round_trip_us,
        reading.up_bits_per_s,
        reading.down_bits_per_s,
        reading.step_us,
    )
    return any(estimate.count for estimate in estimates)


def _is_all_known(reading: NodeReading, work: RoundWork) -> bool:
    """Whether nothing that the work needs has to be assumed of the node."""
    return bool(
        reading.round_trip_us.count
        and (reading.step_us.count or not work.inner_steps)
        and (reading.up_bits_per_s.count or not work.up_bytes)
        and (reading.down_bits_per_s.count or not work.down_bytes)
    )
