"""What plans reckon with: each node's speed, and its line over the connections that it will use;
and in which order uploads begin where the coordinator's own line cannot take all
at once.

What was never measured of a node is taken from its fleet (`coordinator.core.network`).

A sender that takes each loss for congestion settles at what losses allow, whatever the line could
carry; several of them reach further. A sender that knows its line's rate needs no second one.
"""

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from coordinator.core.network.line import (
    congestion_control_of,
    goodput_of,
    is_loss_inferred,
    likely_loss,
)
from coordinator.core.network.reading import NodeReading, TransferDirection, median_reading
from coordinator.core.network.tcp import PACKET_HEADER_BYTES, STREAM_OVERHEAD, CongestionControl
from coordinator.core.network.work_forecast import (
    FinishForecast,
    RoundWork,
    finish_forecast,
    transfer_forecast,
)
from coordinator.core.plan.decision import NodeMemory
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds

_PACKET_BYTES = 1448
UNPROVEN_TIMES = 8
"""How many times as fast as the median one a node is believed to be before its first update: as
many as a plan gives it steps for.
"""
_MOVING_TIMES, _MOMENT_US = 2, 500_000
"""What moving bytes and everything else may take of an update's time beside what is forecast."""
_PROVEN_TIMES = 1.5
"""Steps may be stated as so much longer than the newest update shows, which may have been quick."""
_NOT_AS_STATED = "update was, and not as it says"
_STATED_TIMES = 2
"""Computing may take so many times what its node says."""
_SMALL_BYTES = 64 * 1024
"""Smaller transfers are over before a second connection helps, or a slow line shows."""
_SHARE_BYTES = 16 * 1024
"""A connection's least share of a transfer."""
_WITHOUT_LOSS = 4
"""For their slow starts, which are faster together, and for losses that no probe has met yet."""
_COUNTS = (4, 8, 16)
_WORTH = 1.05
"""More connections have to save this much of the time."""
_HOLD = 1.15
"""What a node has is kept unless it takes this much longer than the best: a few lost probes more or
less are no reason to shake hands again.
"""


def connection_count(reading: NodeReading, usual: NodeReading, size_bytes: Bytes, held: int) -> int:
    """How many connections: 1 where senders know their rate, else 4, and up to 16 where packets
    are lost, the fewest that are about as fast as any by the transfer model.

    Args:
        reading: What is known of the node.
        usual: Of its fleet, for what is not.
        size_bytes: The largest thing that moves in a round.
        held: What the node was given last; 0: nothing.
    """
    heeding = [
        way
        for way in TransferDirection
        if congestion_control_of(reading, way) is not CongestionControl.BBR
    ]
    if size_bytes < _SMALL_BYTES or not heeding:
        return 1
    if not likely_loss(reading):
        return max(_WITHOUT_LOSS, held)
    lossy = _cautious(reading)

    def moving_us(count: int) -> float:
        return sum(
            transfer_forecast(lossy, way, size_bytes, connections=count, typical=usual).mean_us
            for way in heeding
        )

    useful = [count for count in _COUNTS if count * _SHARE_BYTES <= size_bytes]
    times = {count: moving_us(count) for count in useful}
    best = min(times.values())
    if held in times and times[held] <= _HOLD * best:
        return held
    return next(count for count in useful if times[count] <= _WORTH * best)


def _cautious(reading: NodeReading) -> NodeReading:
    """The reading with as many losses as one in forty lines like it has.

    Twenty probes now and then tell little, and a line that is believed better than it is seems to
    be its own limit: nobody would find out what more connections can do. Losses that are only
    inferred are the most that there can be, and are left as they are.
    """
    if is_loss_inferred(reading):
        return reading
    lost = reading.packets_lost
    more = min((lost + 2 * sqrt(lost)) / lost, 0.5 * reading.packets_sent / lost)
    return replace(reading, packets_lost=lost * more, bursts_lost=reading.bursts_lost * more)


def payload_bits_per_s(line_bits_per_s: int) -> int:
    """Payload rate of a line without its headers: goodputs add up to this."""
    share = _PACKET_BYTES / (_PACKET_BYTES + PACKET_HEADER_BYTES) / (1 + STREAM_OVERHEAD)
    return int(line_bits_per_s * share)


class PlannedUpload(NamedTuple):
    """An update that will be sent."""

    ready_us: int
    """When its inner steps are done, after the round's opening."""
    size_bytes: Bytes
    bits_per_s: float
    """What the node's own line carries."""


def upload_delays(
    uploads: Mapping[NodeId, PlannedUpload], line_bits_per_s: int
) -> dict[NodeId, Milliseconds]:
    """How long each finished update waits, in milliseconds, so that each upload has the rate of
    its own line.

    First come, first served: a node begins as soon as the coordinator's line has its rate free.
    The last update is in no later than if all had shared the line, or else nobody waits.

    Args:
        uploads: What each node will send.
        line_bits_per_s: What the coordinator's line carries; 0: not known, nobody waits.
    """
    nobody = dict.fromkeys(uploads, Milliseconds(0))
    if not line_bits_per_s or sum(one.bits_per_s for one in uploads.values()) <= line_bits_per_s:
        return nobody
    order = sorted(uploads, key=lambda node: (uploads[node].ready_us, node))
    starts: dict[NodeId, float] = {}
    under_way: list[tuple[float, float]] = []
    for node in order:
        one = uploads[node]
        rate = min(one.bits_per_s, line_bits_per_s)
        start = _first_room(under_way, one.ready_us, line_bits_per_s - rate)
        starts[node] = start
        under_way.append((start + one.size_bytes * 8e6 / rate, rate))
    if max(end for end, _ in under_way) > 1.02 * _shared_end_us(uploads, order, line_bits_per_s):
        return nobody
    return {
        node: Milliseconds(int(starts[node] - uploads[node].ready_us) // 1000) for node in order
    }


def _first_room(under_way: list[tuple[float, float]], ready_us: float, most: float) -> float:
    """When the uploads under way first leave enough of the line. They all began before."""
    ends = sorted(end for end, _ in under_way if end > ready_us)
    for start in [ready_us, *ends]:
        if sum(rate for end, rate in under_way if end > start) <= most * (1 + 1e-9):
            return start
    return ready_us


def _shared_end_us(
    uploads: Mapping[NodeId, PlannedUpload], order: list[NodeId], line_bits_per_s: int
) -> float:
    """The earliest that a line which never idles can have carried everything."""
    latest, left = 0.0, 0.0
    for node in reversed(order):
        one = uploads[node]
        left += one.size_bytes * 8e6
        alone = one.size_bytes * 8e6 / one.bits_per_s
        latest = max(latest, one.ready_us + left / line_bits_per_s, one.ready_us + alone)
    return latest


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
    """Whether its own steps were seen, and its own line where updates are large, or forecasts of it
    were compared.
    """
    reason: str = ""
    """Why it is not believed to be as fast as it says; empty: it is."""

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


def stated_connections(spec: JobSpec) -> int:
    """Connections of each node that the job states; 0: plans decide."""
    return spec.round.connections if spec.aware.takes_as_stated("round.connections") else 0


def node_speeds(
    candidates: Iterable[NodeId],
    readings: Mapping[NodeId, NodeReading],
    *,
    size_bytes: Bytes,
    held: Mapping[NodeId, int],
    stated: int = 0,
) -> dict[NodeId, NodeSpeed]:
    """Speed and line of each candidate; empty until one node's steps were measured.

    A line that never carried enough to be measured is taken for a slow one at home; what finishes
    then say of it corrects its forecasts.

    Args:
        candidates: Nodes that are there.
        readings: Of any nodes.
        size_bytes: Of the largest thing that moves in a round.
        held: The connections that nodes were given last.
        stated: Connections of every node; 0: those that its line needs.
    """
    mine = {node: readings.get(node, NodeReading()) for node in candidates}
    usual = median_reading(mine.values())
    if usual.step_us.mean <= 0:
        return {}
    return {
        node: _known_node(
            reading,
            usual,
            stated or connection_count(reading, usual, size_bytes, held.get(node, 0)),
            needs_line=size_bytes >= _SMALL_BYTES,
        )
        for node, reading in mine.items()
    }


def believed_speed(
    known: NodeSpeed, memory: NodeMemory, moving_us: float, *, takes_ahead: bool
) -> NodeSpeed:
    """The same speed as far as it is believed: steps are timed by who takes them.

    Before an update came it is at most `UNPROVEN_TIMES` the median node's. Afterwards no step takes
    more than the newest update did for each, if nothing was lost since and no step is taken ahead
    of its round. And it takes what is left of that time when twice the moving and a moment are
    taken off, where that is twice as much as the node says.

    Args:
        known: As the node's own figures have it.
        memory: Of the node, the round before included.
        moving_us: What it is forecast to move bytes for.
        takes_ahead: Whether nodes take steps of a round before they are given it.
    """
    if not memory.proven_step_us:
        least_us = known.typical.step_us.mean / UNPROVEN_TIMES
        reason = f"taken for {UNPROVEN_TIMES} times as fast as the median node until an update came"
        return known if known.step_us >= least_us else _with_step(known, least_us, reason)
    if not memory.proven_steps:
        return known
    # What came after the update and brought none may have been slower than it was.
    is_newest = not (memory.cut_rounds or takes_ahead)
    if is_newest and known.step_us > _PROVEN_TIMES * memory.proven_step_us:
        return _with_step(known, memory.proven_step_us, f"as fast as its newest {_NOT_AS_STATED}")
    besides_us = (_MOVING_TIMES * moving_us + _MOMENT_US) / memory.proven_steps
    shown_us = memory.proven_step_us - besides_us
    if shown_us <= _STATED_TIMES * known.step_us:
        return known
    return _with_step(known, shown_us, f"as slow as its newest {_NOT_AS_STATED}")


def _with_step(known: NodeSpeed, step_us: float, reason: str) -> NodeSpeed:
    step = replace(known.reading.step_us, mean=step_us, deviation=step_us / 4)
    reading = replace(known.reading, step_us=step)
    return replace(known, reading=reading, step_us=step_us, reason=reason)


def _known_node(
    reading: NodeReading, usual: NodeReading, count: int, *, needs_line: bool
) -> NodeSpeed:
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
            reading.step_us.count
            and (not needs_line or reading.up_bits_per_s.count or reading.forecast_error.count)
        ),
    )
