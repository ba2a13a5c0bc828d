"""Keeps in the history what the feed's state lets go of, in batches, off the event loop."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import structlog

from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.series import SeriesPoint
from dashboard_api.core.state import EventLine
from dashboard_api.core.wall_clock import Anchor, WallClock
from dashboard_api.shell.history import HistoryStore, JobBatch
from hypergpu.journal.events import (
    EvaluationReadyEvent,
    RoundMeasuredEvent,
    RoundRecordedEvent,
)
from hypergpu.journal.public_event import PublicEvent
from hypergpu.user.client import JobEvent

WRITE_EVERY_S = 0.5
NODE_POINT_MS = 10_000
"""Readings of nodes are kept at this distance."""
NODES_AT_ONCE = 100
"""Nodes whose readings are kept at one time: the others' turns come after it."""
ROUND_SERIES = (
    *("loss", "samples", "samples_per_s", "bytes_up", "bytes_down"),
    *("duration_ms", "forecast_error"),
)
NODE_SERIES = (
    *("rtt_us", "rtt_spread_us", "loss", "up_bits_per_s", "down_bits_per_s", "step_us"),
    *("updates_accepted", "updates_rejected", "inner_steps", "health_value"),
)
EVALUATION_SERIES = {"metric": "metric", "held_out_loss": "loss"}
METRIC_PREFIX = "metric/"
"""Before the name of a further metric: the name of its series."""
_log = structlog.get_logger(__name__)


class JobClocks:
    """Clocks of jobs, and no more: for a view that may see a part of what the server's own sees."""

    def __init__(self, history: HistoryStore) -> None:
        self.history = history

    async def clock(self, job_id: str) -> WallClock:
        """Clock of a job as far as it is known, before its first event is taken."""
        return WallClock(await asyncio.to_thread(self.history.anchors, job_id))

    async def keep_anchor(self, job_id: str, anchor: Anchor) -> None:
        """Keep a new distance of a job's clock."""
        await asyncio.to_thread(self.history.add_anchor, job_id, anchor)

    def take_event(
        self, projection: FeedProjection, job_id: str, event: JobEvent, line: EventLine
    ) -> None:
        """Let an event go: the server's own view has it."""

    def take_nodes(self, nodes: dict[str, Any], at_ms: int) -> None:
        """Let readings go: the server's own view has them."""


class HistoryRecorder(JobClocks):
    """Collects what is new in the server's own view and writes it twice a second."""

    def __init__(self, history: HistoryStore) -> None:
        super().__init__(history)
        self._next: dict[str, int] = {}
        """The first sequence number that was not taken yet, by job."""
        self._moved: dict[str, int] = {}
        self._batches: dict[str, JobBatch] = {}
        self._nodes: dict[str, list[SeriesPoint]] = {}
        self._node_index: dict[str, int] = {}

    async def clock(self, job_id: str) -> WallClock:
        """Clock of a job as far as it is known, before its first event is taken."""
        self._next.setdefault(job_id, await asyncio.to_thread(self.history.next_sequence, job_id))
        return await super().clock(job_id)

    def take_event(
        self, projection: FeedProjection, job_id: str, event: JobEvent, line: EventLine
    ) -> None:
        """Keep an event that the projection has just folded, once."""
        moved_bytes = self._moved.get(job_id, 0)
        content = event.content
        if isinstance(content, RoundRecordedEvent):
            moved_bytes += content.bytes_up + (content.bytes_down or 0)
            self._moved[job_id] = moved_bytes
        if event.sequence < self._next.get(job_id, 0):
            return
        self._next[job_id] = event.sequence + 1
        batch = self._batches.setdefault(job_id, JobBatch(0))
        batch.next_sequence = event.sequence + 1
        batch.events.append(line)
        batch.points += _points(event.content, line.at_ms, moved_bytes)
        if isinstance(content, RoundRecordedEvent | RoundMeasuredEvent):
            rounds = projection.state["jobs"][job_id]["rounds_by_number"]
            number = content.round
            if (state := rounds.get(str(number))) is not None:
                batch.rounds[number] = msgspec.json.encode(state)
                if isinstance(content, RoundRecordedEvent):
                    share = _accepted_share(state["lanes"].values())
                    batch.points.append(
                        SeriesPoint(
                            "accepted_share", number, line.at_ms, share, moved_bytes, number
                        )
                    )

    def take_nodes(self, nodes: dict[str, Any], at_ms: int) -> None:
        """Keep the nodes' readings: every ten seconds, more seldom where there are many nodes."""
        index = at_ms // NODE_POINT_MS
        turns = 1 + len(nodes) // NODES_AT_ONCE
        for place, (node_id, node) in enumerate(nodes.items()):
            if self._node_index.get(node_id) == index or (place + index) % turns:
                continue
            self._node_index[node_id] = index
            self._nodes.setdefault(node_id, []).extend(
                SeriesPoint(name, index, at_ms, float(node[name]))
                for name in NODE_SERIES
                if node[name] is not None
            )

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write everything that was taken."""
        batches, self._batches = self._batches, {}
        nodes, self._nodes = self._nodes, {}
        if batches or nodes:
            try:
                await asyncio.to_thread(self._write, batches, nodes)
            except Exception as error:  # noqa: BLE001 - the page must outlive a full disk
                _log.warning("the history was not written", error=repr(error))

    def _write(self, batches: dict[str, JobBatch], nodes: dict[str, list[SeriesPoint]]) -> None:
        for job_id, batch in batches.items():
            self.history.write_job(job_id, batch)
        scopes = {f"node/{node_id}": points for node_id, points in nodes.items()}
        self.history.add_readings(scopes)


def _points(event: PublicEvent | None, at_ms: int, moved_bytes: int) -> list[SeriesPoint]:
    """Points of the series that an event adds to."""
    named_values: dict[str, float | None]
    match event:
        case RoundRecordedEvent(round=number):
            named_values = {name: getattr(event, name) for name in ROUND_SERIES}
        case EvaluationReadyEvent(round=number):
            named_values = {
                name: getattr(event, field) for name, field in EVALUATION_SERIES.items()
            }
            named_values |= {
                f"{METRIC_PREFIX}{name}": value for name, value in event.metrics.items()
            }
        case _:
            return []
    return [
        SeriesPoint(name, number, at_ms, float(value), moved_bytes, number)
        for name, value in named_values.items()
        if value is not None
    ]


def _accepted_share(lanes: Iterable[dict[str, Any]]) -> float:
    """Share of the planned updates that were accepted, in [0, 1]."""
    results = [lane["result"] for lane in lanes if lane["result"] != "resting"]
    return results.count("accepted") / max(1, len(results))
