"""Readings of nodes' lines and speeds as this process sees them. They steer plans and tables, and
neither weight nor pay rests on them.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from coordinator.core.network.known_speed import SpeedSource
from coordinator.core.network.observations import add_observation
from coordinator.core.network.progress import (
    LEAST_MS,
    LeaseProgress,
    ProgressClock,
    advance_clock,
)
from coordinator.core.network.reading import (
    Estimate,
    Finish,
    NodeReading,
    Observation,
    Presence,
    StepTime,
    TransferDirection,
    TransferTime,
)
from coordinator.shell.nodes.fleet_speeds import FleetSpeeds
from coordinator.shell.nodes.upload_meter import UploadMeter
from coordinator.shell.translate import observations
from hypergpu.clock import monotonic_ms
from hypergpu.ids import JobId, NodeId
from hypergpu.rates import Rate, RateLimiter
from hypergpu.units import Milliseconds
from hypergpu.v1 import measurement_pb2
from hypergpu.wire.tcp_counters import congestion_control_on

REPORTS = Rate(burst=10, interval_ms=Milliseconds(500))
"""Limit per node."""
ABSENT_MAX = 4_096
"""Absent nodes that are remembered; the one that has been away longest makes room."""
_OWN_FIGURE_MS = 60_000
"""Time after an upload measured here during which the node's own figures for uploads are ignored.
"""
_STEPS_MAX = 10_000_000
_COMPUTE_MS_MAX = 30 * 86_400_000
_SEEN_SHARE = 0.8
"""Certain part of the time between two messages."""
_SOCKETS_MS = 60_000
"""Time between two reads of this process's own sockets."""


class FinishedUpdate(NamedTuple):
    """An accepted update with its timings."""

    job_id: JobId
    lease: int
    inner_steps: float
    """Counted in steps of the job's own batch."""
    compute_ms: Milliseconds
    forecast_ms: Milliseconds
    """0: nothing was forecast."""
    took_ms: Milliseconds
    source: SpeedSource | None = None
    """What its speed is of; None: nobody knows, and it is not kept."""


class _NodeTelemetry:
    """State of one node."""

    def __init__(self) -> None:
        self.reading = NodeReading()
        self.source: SpeedSource | None = None
        """What the time of a step in the reading is of."""
        self.newest_update: tuple[JobId, int] | None = None
        """Job and lease of the newest accepted update, which a node may submit again."""
        self.clock: ProgressClock | None = None
        """Its clock under the newest lease that it said something of."""
        self.uploads: UploadMeter | None = None
        self.upload_ms: Milliseconds | None = None
        """Time of the newest upload measured here."""


class Readings:
    """Readings of all nodes. Times are this process's monotonic ones, unless stated otherwise."""

    def __init__(self, node_port: int = 0, speeds: FleetSpeeds | None = None) -> None:
        self.node_port = node_port
        """Port of the nodes' listener: its sockets take the routes that models take."""
        self.speeds = speeds or FleetSpeeds()
        self._nodes: dict[NodeId, _NodeTelemetry] = {}
        self._reports = RateLimiter(REPORTS)
        self._absent: dict[NodeId, None] = {}
        """Nodes in order of leaving."""
        self._congestion_control = ""
        self._sockets_ms: Milliseconds | None = None
        self.dropped = 0
        """Reports beyond the rate."""

    def reading(self, node: NodeId) -> NodeReading:
        """The node's reading; an empty one for an unknown node."""
        node_state = self._nodes.get(node)
        return NodeReading() if node_state is None else node_state.reading

    def knows(self, node: NodeId) -> bool:
        """Whether the node was here since this process began."""
        return node in self._nodes

    def by_node(self) -> dict[NodeId, NodeReading]:
        """Readings by node, of every one that is remembered."""
        return {node: node_state.reading for node, node_state in self._nodes.items()}

    def all(self) -> Iterable[NodeReading]:
        """Readings of every node that is remembered."""
        return [node_state.reading for node_state in self._nodes.values()]

    def readings(
        self,
        nodes: Iterable[NodeId],
        now_ms: Milliseconds,
        sources: Mapping[NodeId, SpeedSource] | None = None,
    ) -> dict[NodeId, NodeReading]:
        """Readings of these nodes, in times of a clock that shows ``now_ms``, such as a job's.

        Args:
            nodes: Any.
            now_ms: Time of that clock.
            sources: Work whose speeds are asked for; of nodes without one it is that of their
                newest.
        """
        by_ms, sources = now_ms - monotonic_ms(), sources or {}
        return {
            node: _shift_clock(self._reading_of(node, sources.get(node)), by_ms) for node in nodes
        }

    def _reading_of(self, node: NodeId, source: SpeedSource | None) -> NodeReading:
        """The node's reading, with the time of a step of one source."""
        node_state, reading = self._nodes.get(node), self.reading(node)
        if source is None or (node_state is not None and node_state.source == source):
            return reading
        step_us = self.speeds.recall(node, source)
        return msgspec.structs.replace(reading, step_us=step_us, steps_most=0.0)

    def _time_steps(self, node: NodeId, steps: StepTime, source: SpeedSource | None) -> None:
        """Add steps that were timed, and remember what is then known of their source."""
        node_state = self._node(node)
        node_state.reading = self._reading_of(node, source)
        node_state.source = source
        self.observe(node, steps)
        if source is not None:
            self.speeds.record(node, source, node_state.reading.step_us)

    @property
    def congestion_control(self) -> str:
        """Congestion control of this process's sockets to nodes; empty when it is unknown."""
        now_ms = monotonic_ms()
        if self._sockets_ms is None or now_ms - self._sockets_ms >= _SOCKETS_MS:
            self._sockets_ms = now_ms
            self._congestion_control = congestion_control_on(self.node_port)
        return self._congestion_control

    def observe(self, node: NodeId, observation: Observation) -> None:
        """Add one observation to the node's reading."""
        node_state = self._node(node)
        node_state.reading = add_observation(node_state.reading, observation)

    def record_report(self, node: NodeId, message: measurement_pb2.Measured) -> None:
        """Add a node's report of its own measurements."""
        now_ms, node_state = monotonic_ms(), self._node(node)
        if not self._reports.take(node, now_ms):
            self.dropped += 1
            return
        has_own = (
            node_state.upload_ms is not None and now_ms - node_state.upload_ms < _OWN_FIGURE_MS
        )
        for observation in observations(message, now_ms, own=self.congestion_control):
            if not (has_own and _is_upload(observation)):
                self.observe(node, observation)

    def mark_present(self, node: NodeId) -> None:
        """The node opened its control stream, or its worker is ready."""
        self._absent.pop(node, None)
        self.observe(node, Presence(at_ms=monotonic_ms(), is_present=True))

    def mark_starting(self, node: NodeId) -> None:
        """The node is present, and its worker is still starting."""
        self.observe(node, Presence(at_ms=monotonic_ms(), is_present=True, is_starting=True))

    def mark_absent(self, node: NodeId) -> None:
        """The node's stream ended; its reading is kept in case it comes back."""
        self.observe(node, Presence(at_ms=monotonic_ms(), is_present=False))
        node_state = self._nodes[node]
        node_state.uploads = node_state.upload_ms = None
        self._reports.forget(node)
        self._absent.pop(node, None)
        self._absent[node] = None
        while len(self._absent) > ABSENT_MAX:
            self.forget(next(iter(self._absent)))

    def forget(self, node: NodeId) -> None:
        """The node does not come back."""
        self._nodes.pop(node, None)
        self._absent.pop(node, None)

    def upload_meter(self, node: NodeId) -> UploadMeter:
        """Meter of the node's upload; requests that bring one update share it."""
        node_state = self._node(node)
        if node_state.uploads is None:
            node_state.uploads = UploadMeter(lambda transfer: self.record_upload(node, transfer))
        return node_state.uploads

    def record_upload(self, node: NodeId, transfer: TransferTime) -> None:
        """Add an upload that was measured here."""
        self._node(node).upload_ms = transfer.at_ms
        self.observe(node, transfer)

    def record_accepted(self, node: NodeId, update: FinishedUpdate) -> None:
        """Add the timings of an accepted update, once."""
        node_state = self._node(node)
        if node_state.newest_update == (update.job_id, update.lease):
            return
        node_state.newest_update = (update.job_id, update.lease)
        now_ms = monotonic_ms()
        if update.inner_steps > 0:
            steps = min(update.inner_steps, _STEPS_MAX)
            # Who states no time would never be measured, and so never compared with a slower node.
            # And whoever said how far it was cannot have computed for less time than that took.
            stated_ms = max(1, update.compute_ms, _seen_ms(node_state.clock, update))
            took_ms = Milliseconds(min(stated_ms, _COMPUTE_MS_MAX))
            self._time_steps(node, StepTime(now_ms, steps, took_ms), update.source)
        if update.forecast_ms > 0 and update.took_ms > 0:
            self.observe(node, Finish(now_ms, update.forecast_ms, update.took_ms))

    def record_progress(
        self, node: NodeId, progress: LeaseProgress, source: SpeedSource | None = None
    ) -> None:
        """Add what the node says of the work that it was given, and so does under that lease.

        Args:
            node: Which says it.
            progress: What it says.
            source: What its speed is of; None: nobody knows, and it is not kept.
        """
        node_state = self._node(node)
        node_state.clock, step_time = advance_clock(node_state.clock, progress)
        if step_time is not None:
            self._time_steps(node, step_time, source)

    def _node(self, node: NodeId) -> _NodeTelemetry:
        return self._nodes.setdefault(node, _NodeTelemetry())


def _seen_ms(clock: ProgressClock | None, update: FinishedUpdate) -> Milliseconds:
    """How long the node was at the update's steps, by its own progress and this process's clock."""
    if clock is None or (clock.first.job_id, clock.first.lease) != (update.job_id, update.lease):
        return Milliseconds(0)
    # The first message may have been quick, and the last one slow.
    return Milliseconds(max(0, int(_SEEN_SHARE * clock.took_ms) - LEAST_MS))


def _is_upload(observation: Observation) -> bool:
    return isinstance(observation, TransferTime) and observation.direction is TransferDirection.UP


def _shift_clock(reading: NodeReading, by_ms: int) -> NodeReading:
    """The same reading in times of another clock."""
    moved_fields: dict[str, Estimate | Milliseconds] = {}
    for field in msgspec.structs.fields(reading):
        value = getattr(reading, field.name)
        if isinstance(value, Estimate):
            at_ms = Milliseconds(value.at_ms + by_ms)
            moved_fields[field.name] = msgspec.structs.replace(value, at_ms=at_ms)
        elif field.name.endswith("_at_ms"):
            moved_fields[field.name] = Milliseconds(value + by_ms)
    return msgspec.structs.replace(reading, **moved_fields)
