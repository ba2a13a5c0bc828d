"""Over how many connections each node moves bytes.

A sender that takes each loss for congestion settles at what losses allow, whatever the line could
carry; several of them reach further. A sender that knows its line's rate needs no second one.
"""

from collections.abc import Mapping
from math import sqrt

from msgspec.structs import replace

from coordinator.core.network.line import (
    congestion_control_of,
    is_loss_inferred,
    likely_loss,
)
from coordinator.core.network.reading import NodeReading, TransferDirection
from coordinator.core.network.tcp import CongestionControl
from coordinator.core.network.work_forecast import transfer_forecast
from coordinator.core.training.plan.decision import NodeMemory
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes

SMALL_BYTES = 64 * 1024
"""Smaller transfers are over before a second connection helps, or a slow line shows."""
_SHARE_BYTES = 16 * 1024
"""A connection's least share of a transfer."""
_WITHOUT_LOSS = 4
"""For their slow starts, which are faster together, and for losses that no probe has met yet."""
_COUNTS = (4, 8, 16)
_WORTH = 1.05
"""More connections have to save this much of the time."""
_HOLD = 1.15
"""The count that a node has is kept unless it takes this much longer than the best: a few lost
probes more or less are no reason to shake hands again.
"""


def node_connections(
    spec: JobSpec,
    readings: Mapping[NodeId, NodeReading],
    memories: Mapping[NodeId, NodeMemory],
    *,
    typical: NodeReading,
    size_bytes: Bytes,
) -> dict[NodeId, int]:
    """Connections of each candidate: as the job states, or those that the node's line needs.

    Args:
        spec: The job's.
        readings: Of each candidate.
        memories: Of each candidate.
        typical: Median reading of the candidates.
        size_bytes: The largest thing that moves in a round.
    """
    if spec.aware.takes_as_stated("round.connections") and spec.round.connections:
        return dict.fromkeys(readings, spec.round.connections)
    return {
        node: connection_count(reading, typical, size_bytes, memories[node].connections)
        for node, reading in readings.items()
    }


def connection_count(
    reading: NodeReading, typical: NodeReading, size_bytes: Bytes, before: int
) -> int:
    """How many connections: 1 where senders know their rate, else 4, and up to 16 where packets
    are lost, the fewest that are about as fast as any by the transfer model.

    Args:
        reading: What is known of the node.
        typical: Median of its fleet, for what is not.
        size_bytes: The largest thing that moves in a round.
        before: Count that the node was given last; 0: none.
    """
    loss_ways = [
        way
        for way in TransferDirection
        if congestion_control_of(reading, way) is not CongestionControl.BBR
    ]
    if size_bytes < SMALL_BYTES or not loss_ways:
        return 1
    if not likely_loss(reading):
        return max(_WITHOUT_LOSS, before)
    lossy = _cautious(reading)

    def moving_us(count: int) -> float:
        return sum(
            transfer_forecast(lossy, way, size_bytes, connections=count, typical=typical).mean_us
            for way in loss_ways
        )

    useful = [count for count in _COUNTS if count * _SHARE_BYTES <= size_bytes]
    times = {count: moving_us(count) for count in useful}
    best = min(times.values())
    if before in times and times[before] <= _HOLD * best:
        return before
    return next(count for count in useful if times[count] <= _WORTH * best)


def _cautious(reading: NodeReading) -> NodeReading:
    """The reading with as many losses as one in forty lines like it has.

    Twenty probes now and then tell little, and a line that is believed better than it is seems to
    be its own limit: nobody would find out what more connections can do. Losses that are only
    inferred are the most that there can be, and are left as they are.
    """
    if is_loss_inferred(reading):
        return reading
    losses = reading.packets_lost
    more = min((losses + 2 * sqrt(losses)) / losses, 0.5 * reading.packets_sent / losses)
    return replace(reading, packets_lost=losses * more, bursts_lost=reading.bursts_lost * more)
