"""The node in the middle: what stands in for what is not known of one, and what health compares
with.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from coordinator.core.measure.reading import Estimate, NodeReading
from hypergpu.units import Microseconds


def median_reading(readings: Iterable[NodeReading]) -> NodeReading:
    """The median of each quantity over the nodes that are there and of which it is known."""
    there = [reading for reading in readings if reading.is_present]
    probed = [reading for reading in there if reading.packets_sent > 0]
    round_trip_us = _middle(there, lambda reading: reading.round_trip_us)
    least = [r.least_round_trip_us for r in there if r.least_round_trip_us]
    return NodeReading(
        round_trip_us=round_trip_us,
        least_round_trip_us=Microseconds(round(median(least))) if least else Microseconds(0),
        up_bits_per_s=_middle(there, lambda reading: reading.up_bits_per_s),
        down_bits_per_s=_middle(there, lambda reading: reading.down_bits_per_s),
        step_us=_middle(there, lambda reading: reading.step_us),
        packets_sent=median(r.packets_sent for r in probed) if probed else 0.0,
        packets_lost=median(r.packets_lost for r in probed) if probed else 0.0,
        bursts_lost=median(r.bursts_lost for r in probed) if probed else 0.0,
    )


def _middle(
    readings: Sequence[NodeReading], quantity: Callable[[NodeReading], Estimate]
) -> Estimate:
    known = [estimate for reading in readings if (estimate := quantity(reading)).count]
    if not known:
        return Estimate()
    return Estimate(
        mean=median(estimate.mean for estimate in known),
        deviation=median(estimate.deviation for estimate in known),
        count=len(known),
        at_ms=max(estimate.at_ms for estimate in known),
    )
