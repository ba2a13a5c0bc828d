"""What plans reckon with: each node's speed, and its line over the connections that it will use.

What was never measured of a node is taken from its fleet (`coordinator.core.measure`).
"""

from collections.abc import Iterable, Mapping

import msgspec

from coordinator.core.measure.fleet import median_reading
from coordinator.core.measure.forecast import (
    FinishForecast,
    RoundWork,
    finish_forecast,
    transfer_forecast,
)
from coordinator.core.measure.line import goodput_of
from coordinator.core.measure.reading import NodeReading, TransferDirection
from coordinator.core.plan.transfers import connection_count
from hypergpu.ids import NodeId
from hypergpu.units import Bytes

_QUARTILE = 0.84
"""Mean deviations between the mean and the lower quartile of a normal distribution."""


_LEAST, _LEAST_OF_FEW, _FEW = 0.25, 0.75, 3
"""The lower quartile's least share of the mean, after more than so many observations and before."""


class NodeSpeed(msgspec.Struct, frozen=True):
    """One node's speed and line. What its forecasts were off by is included."""

    reading: NodeReading
    typical: NodeReading
    """Median reading of its fleet."""
    connections: int
    step_us: float
    """With the job's own batch."""
    up_bits_per_s: float
    """Goodput over so many connections."""
    cautious_up_bits_per_s: float
    """The lower quartile: three of four uploads are faster."""
    is_measured: bool
    """Whether its own steps and its own line were seen, or forecasts of it were compared."""

    def finish(self, inner_steps: float, up_bytes: Bytes, down_bytes: Bytes) -> FinishForecast:
        """When it is done with a round's work, from its assignment on. Steps are those of the job's
        own batch; one with half of it counts half.
        """
        work = RoundWork(
            inner_steps=inner_steps,
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            connections=self.connections,
        )
        # Of a node of which nothing at all is known the fleet says everything.
        found = finish_forecast(self.reading, work, self.typical)
        found = found or finish_forecast(self.typical, work, self.typical)
        if found is None:
            raise AssertionError("plans are made of fleets of which something is known")
        return found

    def moving_us(self, up_bytes: Bytes, down_bytes: Bytes) -> float:
        """Everything in a round that is not computing."""
        return self.finish(0, up_bytes, down_bytes).mean_ms * 1000.0

    def cautious_up_us(self, size_bytes: Bytes) -> float:
        """To upload so much when the line is as bad as in one of four cases."""
        return size_bytes * 8e6 / self.cautious_up_bits_per_s

    def down_us(self, size_bytes: Bytes) -> float:
        """To download so much."""
        span = transfer_forecast(
            self.reading,
            TransferDirection.DOWN,
            size_bytes,
            connections=self.connections,
            typical=self.typical,
        )
        return span.mean_us * self.reading.correction


def node_speeds(
    candidates: Iterable[NodeId],
    readings: Mapping[NodeId, NodeReading],
    *,
    size_bytes: Bytes,
    held: Mapping[NodeId, int],
) -> dict[NodeId, NodeSpeed]:
    """Speed and line of each candidate; empty until one node's steps were measured.

    A line that never carried enough to be measured is taken for a slow one at home; what finishes
    then say of it corrects its forecasts.

    Args:
        candidates: Nodes that are there.
        readings: Of any nodes.
        size_bytes: Of the largest thing that moves in a round.
        held: The connections that nodes were given last.
    """
    mine = {node: readings.get(node, NodeReading()) for node in candidates}
    usual = median_reading(mine.values())
    if usual.step_us.mean <= 0:
        return {}
    return {
        node: _known_node(
            reading, usual, connection_count(reading, usual, size_bytes, held.get(node, 0))
        )
        for node, reading in mine.items()
    }


def _known_node(reading: NodeReading, usual: NodeReading, count: int) -> NodeSpeed:
    up = goodput_of(reading, TransferDirection.UP, count, usual.up_bits_per_s.mean)
    # A line that wanders by more than its mean is no line without bytes, and the deviation of a
    # line that was hardly measured says more of the measurement than of the line.
    least = _LEAST if up.count > _FEW else _LEAST_OF_FEW
    cautious = up.mean * max(least, 1 - _QUARTILE * up.deviation / up.mean)
    step = reading.step_us if reading.step_us.count else usual.step_us
    return NodeSpeed(
        reading=reading,
        typical=usual,
        connections=count,
        # Steps are measured: a forecast that was too long was wrong about the line.
        step_us=max(1.0, step.mean * max(1.0, reading.correction)),
        up_bits_per_s=up.mean / reading.correction,
        cautious_up_bits_per_s=cautious / reading.correction,
        is_measured=bool(
            reading.step_us.count and (reading.up_bits_per_s.count or reading.forecast_error.count)
        ),
    )
