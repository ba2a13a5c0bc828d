"""What was measured of a node, as plain data: part of the schemas of `node ls` and `node show`."""

import msgspec

from hypergpu.v1 import job_pb2


class EstimateView(msgspec.Struct, frozen=True):
    """A quantity that wanders."""

    mean: float
    spread: float
    """Mean deviation; of a loss its standard deviation."""
    samples: int
    """0: inferred from others."""
    age_ms: int


class ReadingView(msgspec.Struct, frozen=True):
    """A node's line and speed; null is not known yet."""

    round_trip_us: EstimateView | None
    least_round_trip_us: int | None
    """Of the last minutes: the line without queues."""
    loss: EstimateView | None
    """Share of packets."""
    up_bits_per_s: EstimateView | None
    down_bits_per_s: EstimateView | None
    step_us: EstimateView | None
    congestion_control: str | None
    """Of the node's sockets."""


def reading_view(reading: job_pb2.Reading) -> ReadingView:
    """A reading from the wire."""
    return ReadingView(
        round_trip_us=_estimate(reading.round_trip_us),
        least_round_trip_us=reading.least_round_trip_us or None,
        loss=_estimate(reading.loss),
        up_bits_per_s=_estimate(reading.up_bits_per_s),
        down_bits_per_s=_estimate(reading.down_bits_per_s),
        step_us=_estimate(reading.step_us),
        congestion_control=reading.congestion_control or None,
    )


def _estimate(estimate: job_pb2.Estimate) -> EstimateView | None:
    if not estimate.samples and not estimate.mean:
        return None
    return EstimateView(estimate.mean, estimate.spread, estimate.samples, estimate.age_ms)
