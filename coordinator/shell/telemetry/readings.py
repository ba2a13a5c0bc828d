"""What is known of every node, made of what nodes report and of what this process sees itself.

Readings steer plans and tables; neither weight nor pay rests on them, so a node that lies spoils
its own plan. What it says is clamped, and what it says too often is not listened to.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from coordinator.core.measure.observing import add_observation
from coordinator.core.measure.reading import (
    Direction,
    Estimate,
    Finish,
    NodeReading,
    Observation,
    Presence,
    Steps,
    Transfer,
    Verdict,
)
from coordinator.shell.clock import monotonic_ms
from coordinator.shell.identity.rate import Bucket, Rate, take_token
from coordinator.shell.telemetry.congestion_control import congestion_control_of
from coordinator.shell.telemetry.reports import observations
from coordinator.shell.telemetry.upload_meter import UploadMeter
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2

REPORTS = Rate(burst=10, interval_ms=Milliseconds(500))
"""Of one node; what comes faster is dropped."""
ABSENT_MAX = 4_096
"""Nodes that are away and remembered; the one that has been away longest makes room."""
_OWN_FIGURE_MS = 60_000
"""For so long after an upload that was measured here the node's own figures are passed over."""
_STEPS_MAX = 10_000_000
_COMPUTE_MS_MAX = 30 * 86_400_000
_SOCKETS_MS = 60_000
"""Between two looks at this process's own sockets."""


class FinishedUpdate(NamedTuple):
    """An update that is in."""

    job_id: JobId
    lease: int
    inner_steps: float
    """Counted in steps of the job's own batch."""
    compute_ms: Milliseconds
    forecast_ms: Milliseconds
    """0: nothing was forecast."""
    took_ms: Milliseconds


class Readings:
    """Times are this process's monotonic ones; `readings` tells them in a job's."""

    def __init__(self, node_port: int = 0) -> None:
        self.node_port = node_port
        """Of the listener whose sockets carry models down."""
        self._readings: dict[NodeId, NodeReading] = {}
        self._absent: dict[NodeId, None] = {}
        """In order of leaving."""
        self._done: dict[NodeId, tuple[JobId, int]] = {}
        """The newest lease whose update is in: it is told again by whoever asks twice."""
        self._uploads: dict[NodeId, UploadMeter] = {}
        self._own_upload_ms: dict[NodeId, Milliseconds] = {}
        self._buckets: dict[NodeId, Bucket] = {}
        self._congestion_control = ""
        self._looked_ms: Milliseconds | None = None
        self.dropped = 0
        """Reports that came too fast."""

    def reading(self, node: NodeId) -> NodeReading:
        """What is known of a node; nothing is also an answer."""
        return self._readings.get(node, NodeReading())

    def knows(self, node: NodeId) -> bool:
        """Whether the node was here since this process began."""
        return node in self._readings

    def all(self) -> Iterable[NodeReading]:
        """Of every node that is remembered."""
        return self._readings.values()

    def readings(self, nodes: Iterable[NodeId], now_ms: Milliseconds) -> dict[NodeId, NodeReading]:
        """Of these nodes, with the times of a clock that shows ``now_ms``, such as a job's."""
        by_ms = now_ms - monotonic_ms()
        return {node: _shift_clock(self.reading(node), by_ms) for node in nodes}

    @property
    def congestion_control(self) -> str:
        """Of this process's sockets to nodes; empty when it cannot be told."""
        now_ms = monotonic_ms()
        if self._looked_ms is None or now_ms - self._looked_ms >= _SOCKETS_MS:
            self._looked_ms = now_ms
            self._congestion_control = congestion_control_of(self.node_port)
        return self._congestion_control

    def observe(self, node: NodeId, observation: Observation) -> None:
        """One thing was observed."""
        self._readings[node] = add_observation(self.reading(node), observation)

    def record_report(self, node: NodeId, message: node_pb2.Measured) -> None:
        """A node said what it measured."""
        now_ms = monotonic_ms()
        bucket = take_token(REPORTS, self._buckets.get(node, Bucket()), now_ms)
        if bucket is None:
            self.dropped += 1
            return
        self._buckets[node] = bucket
        for observation in observations(message, now_ms, own=self.congestion_control):
            if not self._is_known_better(node, observation, now_ms):
                self.observe(node, observation)

    def _is_known_better(self, node: NodeId, observation: Observation, now_ms: int) -> bool:
        """Whether an upload was measured where its bytes arrive."""
        if not isinstance(observation, Transfer) or observation.direction is not Direction.UP:
            return False
        own_ms = self._own_upload_ms.get(node)
        return own_ms is not None and now_ms - own_ms < _OWN_FIGURE_MS

    def mark_present(self, node: NodeId) -> None:
        """The node opened its control stream, or its worker is ready."""
        self._absent.pop(node, None)
        self.observe(node, Presence(at_ms=monotonic_ms(), is_present=True))

    def mark_starting(self, node: NodeId) -> None:
        """The node is there, and its worker is still starting."""
        self.observe(node, Presence(at_ms=monotonic_ms(), is_present=True, is_starting=True))

    def mark_absent(self, node: NodeId) -> None:
        """Its stream ended; it is remembered in case it comes back."""
        self.observe(node, Presence(at_ms=monotonic_ms(), is_present=False))
        self._absent.pop(node, None)
        self._absent[node] = None
        for kept in (self._buckets, self._uploads, self._own_upload_ms):
            kept.pop(node, None)
        while len(self._absent) > ABSENT_MAX:
            self.forget(next(iter(self._absent)))

    def forget(self, node: NodeId) -> None:
        """The node does not come back."""
        for kept in (
            self._readings,
            self._absent,
            self._done,
            self._uploads,
            self._own_upload_ms,
            self._buckets,
        ):
            kept.pop(node, None)

    def upload_meter(self, node: NodeId) -> UploadMeter:
        """What measures the node's upload; stripes of one update share it."""
        return self._uploads.setdefault(
            node, UploadMeter(lambda found: self._note_upload(node, found))
        )

    def _note_upload(self, node: NodeId, transfer: Transfer) -> None:
        self._own_upload_ms[node] = transfer.at_ms
        self.observe(node, transfer)

    def record_accepted(self, node: NodeId, done: FinishedUpdate) -> None:
        """An update is in."""
        if self._done.get(node) == (done.job_id, done.lease):
            return
        self._done[node] = (done.job_id, done.lease)
        now_ms = monotonic_ms()
        self.observe(node, Verdict(at_ms=now_ms, is_accepted=True))
        if done.inner_steps > 0 and done.compute_ms > 0:
            steps = min(done.inner_steps, _STEPS_MAX)
            took_ms = Milliseconds(min(done.compute_ms, _COMPUTE_MS_MAX))
            self.observe(node, Steps(at_ms=now_ms, steps=steps, took_ms=took_ms))
        if done.forecast_ms > 0 and done.took_ms > 0:
            self.observe(node, Finish(now_ms, done.forecast_ms, done.took_ms))

    def record_rejected(self, node: NodeId) -> None:
        """An update was refused for what it held."""
        self.observe(node, Verdict(at_ms=monotonic_ms(), is_accepted=False))


def _shift_clock(reading: NodeReading, by_ms: int) -> NodeReading:
    """The same by another clock."""
    moved: dict[str, Estimate | Milliseconds] = {}
    for field in msgspec.structs.fields(reading):
        value = getattr(reading, field.name)
        if isinstance(value, Estimate):
            at_ms = Milliseconds(value.at_ms + by_ms)
            moved[field.name] = msgspec.structs.replace(value, at_ms=at_ms)
        elif field.name.endswith("_at_ms"):
            moved[field.name] = Milliseconds(value + by_ms)
    return msgspec.structs.replace(reading, **moved)
