"""Between protobuf and observations: what a node reports, bounded and clamped."""

from collections.abc import Iterator

from coordinator.core.measure.line import is_loss_inferred, loss_share
from coordinator.core.measure.reading import (
    Estimate,
    NodeReading,
    Observation,
    PacketTrain,
    RoundTrip,
    SocketReport,
    TransferDirection,
    TransferTime,
)
from hypergpu.units import Bytes, Microseconds, Milliseconds
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.bulk import SMALLEST_BYTES
from hypergpu.wire.probing import PACKETS_MAX

ROUND_TRIPS_MAX = 64
TRAINS_MAX = 16
TRANSFERS_MAX = 16
"""Limits of each kind in one report; the newest are used."""
_ROUND_TRIP_US_MAX = 60_000_000
_SIZE_BYTES_MAX = 1 << 42
_TOOK_US_MAX = 86_400_000_000
_BITS_PER_US_MAX = 100_000
"""100 Gbit/s."""
_CONNECTIONS_MAX = 64
_NAME_LENGTH_MAX = 16  # as long as the kernel's
_DIRECTIONS = {
    node_pb2.DIRECTION_UP: TransferDirection.UP,
    node_pb2.DIRECTION_DOWN: TransferDirection.DOWN,
}


def observations(
    message: node_pb2.Measured, at_ms: Milliseconds, *, own: str
) -> Iterator[Observation]:
    """Observations in a report, clamped to what is possible.

    Args:
        message: The report.
        at_ms: Time of its arrival: the node's clock is not used.
        own: Congestion control of the coordinator's sockets.
    """
    for took_us in message.round_trips_us[-ROUND_TRIPS_MAX:]:
        if took_us > 0:
            yield RoundTrip(at_ms, Microseconds(min(took_us, _ROUND_TRIP_US_MAX)))
    for train in message.trains[-TRAINS_MAX:]:
        if train.sent > 0:
            yield _train(train, at_ms)
    for transfer in message.transfers[-TRANSFERS_MAX:]:
        direction = _DIRECTIONS.get(transfer.direction)
        if direction is not None and transfer.size_bytes >= SMALLEST_BYTES:
            yield _transfer(transfer, at_ms, direction)
    name = message.congestion_control[:_NAME_LENGTH_MAX]
    yield SocketReport(
        at_ms=at_ms,
        congestion_control=name if name.isascii() and name.isprintable() else "",
        is_probing_blocked=message.is_probing_blocked,
        coordinator_congestion_control=own,
    )


def _train(message: node_pb2.ProbeTrain, at_ms: Milliseconds) -> PacketTrain:
    sent = min(message.sent, PACKETS_MAX)
    lost = min(message.lost, sent)
    bursts = min(max(message.bursts, 1), lost)
    return PacketTrain(at_ms, sent, lost, bursts)


def _transfer(
    message: node_pb2.MeasuredTransfer, at_ms: Milliseconds, direction: TransferDirection
) -> TransferTime:
    size_bytes = min(message.size_bytes, _SIZE_BYTES_MAX)
    fastest_us = size_bytes * 8 // _BITS_PER_US_MAX + 1
    return TransferTime(
        at_ms=at_ms,
        direction=direction,
        size_bytes=Bytes(size_bytes),
        took_us=Microseconds(min(max(message.took_us, fastest_us), _TOOK_US_MAX)),
        connections=min(max(message.connections, 1), _CONNECTIONS_MAX),
    )


def reading_message(reading: NodeReading, now_ms: Milliseconds) -> job_pb2.Reading:
    """A reading as the public sees it, with the age of each figure."""
    return job_pb2.Reading(
        round_trip_us=_estimate(reading.round_trip_us, now_ms),
        least_round_trip_us=reading.least_round_trip_us,
        up_bits_per_s=_estimate(reading.up_bits_per_s, now_ms),
        down_bits_per_s=_estimate(reading.down_bits_per_s, now_ms),
        step_us=_estimate(reading.step_us, now_ms),
        loss=_loss(reading, now_ms),
        congestion_control=reading.congestion_control,
    )


def _estimate(estimate: Estimate, now_ms: Milliseconds) -> job_pb2.Estimate:
    return job_pb2.Estimate(
        mean=estimate.mean,
        spread=estimate.deviation,
        samples=estimate.count,
        age_ms=max(0, now_ms - estimate.at_ms) if estimate.count else 0,
    )


def _loss(reading: NodeReading, now_ms: Milliseconds) -> job_pb2.Estimate:
    """The mean of a Beta posterior and its standard deviation; inferred losses have no samples."""
    mean = loss_share(reading)
    if mean is None:
        return job_pb2.Estimate()
    if is_loss_inferred(reading):
        return job_pb2.Estimate(mean=mean, age_ms=max(0, now_ms - reading.up_bits_per_s.at_ms))
    return job_pb2.Estimate(
        mean=mean,
        spread=(mean * (1 - mean) / (reading.packets_sent + 2)) ** 0.5,
        samples=round(reading.packets_sent),
        age_ms=max(0, now_ms - reading.loss_at_ms),
    )
