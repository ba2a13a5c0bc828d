"""Follows a coordinator with one token: levels by asking, journals by watching, across restarts."""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from dashboard_api.core.alerts import Surroundings, standing_alerts
from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.wall_clock import Anchor, WallClock, journal_distance_ms
from dashboard_api.shell.accounts import payments_state
from dashboard_api.shell.feed import Feed
from dashboard_api.shell.recorder import JobClocks
from hypergpu.clock import unix_ms
from hypergpu.errors import Reason
from hypergpu.journal.events import RoundRecordedEvent
from hypergpu.user.client import (
    ENDED,
    AsyncCoordinator,
    ConnectionTarget,
    HyperGPUError,
    JobEvent,
    JobView,
    NodeLevelsView,
    NodeView,
    RemoteFailureError,
)

JOBS_EVERY_S = 1.0
NODES_EVERY_S = 10.0
"""Lists of nodes; what changes between is told as it changes."""
LEDGER_EVERY_S = 10.0
ALERTS_EVERY_S = 2.0
RETRY_MOST_S = 5.0
NODES_AT_ONCE = 25
NODES_PAUSE_S = 0.025
"""Readings of a thousand nodes take a second this way, and no delta is large."""


Failure = (HyperGPUError, RemoteFailureError)
TOKEN_ENDED = frozenset({Reason.TOKEN_INVALID, Reason.TOKEN_REVOKED, Reason.TOKEN_EXPIRED})
Ask = Callable[[AsyncCoordinator], Awaitable[None]]


def node_pieces(nodes: Sequence[NodeView]) -> Iterator[Sequence[NodeView]]:
    """The nodes, a few at a time."""
    for at in range(0, len(nodes), NODES_AT_ONCE):
        yield nodes[at : at + NODES_AT_ONCE]


class _TokenRefusedError(Exception):
    """Ends a follower whose token the coordinator refuses."""


class Follower:
    """Keeps one feed up to date until it is stopped.

    Args:
        target: The coordinator, and as whom it is called.
        recorder: Has the jobs' clocks, and gets everything that is to be kept.
        data_dir: The coordinator's folder if it is on this machine, for the free space of its disk.
        ends_refused: Whether it ends once the coordinator refuses its token; else it asks on.
    """

    def __init__(
        self,
        target: ConnectionTarget,
        recorder: JobClocks,
        data_dir: Path | None = None,
        *,
        ends_refused: bool = False,
    ) -> None:
        self.target = target
        self.feed = Feed(FeedProjection(target.address))
        self.coordinator: AsyncCoordinator | None = None
        self._recorder = recorder
        self._data_dir = data_dir
        self._ends_refused = ends_refused
        self._clocks: dict[str, WallClock] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.has_answered = asyncio.Event()
        """Set once the coordinator has told its jobs, or refused the token."""

    @property
    def projection(self) -> FeedProjection:
        """State of the feed."""
        return self.feed.projection

    async def run(self) -> None:
        """Follow until cancelled, or until the token is refused where that ends it."""
        try:
            await self._connect()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._repeat(JOBS_EVERY_S, self._ask_jobs))
                tasks.create_task(self._repeat(NODES_EVERY_S, self._ask_nodes))
                tasks.create_task(self._repeat(RETRY_MOST_S, self._watch_telemetry))
                tasks.create_task(self._repeat(LEDGER_EVERY_S, self._ask_ledgers))
                tasks.create_task(self._repeat(ALERTS_EVERY_S, self._judge))
        except* _TokenRefusedError:
            pass
        finally:
            for watcher in self._watchers.values():
                watcher.cancel()
            self.feed.close()
            if self.coordinator is not None:
                await self.coordinator.close()

    async def _connect(self) -> None:
        while self.coordinator is None:
            try:
                self.coordinator = await AsyncCoordinator.open(self.target)
            except Failure as failure:
                self._tell_away(failure)
                await asyncio.sleep(JOBS_EVERY_S)

    async def _repeat(self, every_s: float, ask: Ask) -> None:
        wait_s = every_s
        while True:
            try:
                assert self.coordinator is not None  # noqa: S101 - _connect has opened it
                await ask(self.coordinator)
                wait_s = every_s
            except Failure as failure:
                self._tell_away(failure)
                if self._ends_refused and self.feed.refusal is not None:
                    raise _TokenRefusedError from failure
                wait_s = min(RETRY_MOST_S, max(wait_s, JOBS_EVERY_S) * 1.5)
            await asyncio.sleep(wait_s)

    def _tell_away(self, failure: Exception) -> None:
        if isinstance(failure, HyperGPUError) and failure.reason in TOKEN_ENDED:
            self.feed.refuse(failure)
            self.has_answered.set()
        reason = failure.detail if isinstance(failure, Failure) else str(failure)
        self.projection.take_reachability(reason, unix_ms(), is_reachable=False)
        self.feed.publish()

    async def _ask_jobs(self, coordinator: AsyncCoordinator) -> None:
        jobs = await coordinator.jobs()
        now_ms = unix_ms()
        for job in jobs:
            await self._follow_job(coordinator, job, now_ms)
        self.projection.take_reachability("", now_ms, is_reachable=True)
        self.projection.take_jobs(jobs)
        self.feed.publish()
        for gone_job in set(self._watchers) - {job.id for job in jobs}:
            self._watchers.pop(gone_job).cancel()
        self.feed.refusal = None
        self.has_answered.set()

    async def take_jobs_told(self, jobs: Sequence[JobView]) -> None:
        """Take summaries that no coordinator was asked for."""
        self.projection.take_jobs(jobs)
        self.feed.publish()
        self.has_answered.set()

    async def _follow_job(self, coordinator: AsyncCoordinator, job: JobView, now_ms: int) -> None:
        if job.id not in self._clocks:
            self._clocks[job.id] = await self._recorder.clock(job.id)
        is_known = self._clocks[job.id].has_anchor
        if job.phase not in ENDED:
            anchor = self._clocks[job.id].note(job.at_ms, now_ms)
            if anchor is not None:
                await self._recorder.keep_anchor(job.id, anchor)
        elif not is_known:
            await self._place_ended(coordinator, job, now_ms)
        if job.id not in self._watchers:
            watcher = asyncio.create_task(self._watch(coordinator, job.id))
            self._watchers[job.id] = watcher

    async def _place_ended(self, coordinator: AsyncCoordinator, job: JobView, now_ms: int) -> None:
        """Find out when a job was that ended before this server first saw it."""
        events = []
        async for update in coordinator.read_events(job.id):
            if isinstance(update.content, RoundRecordedEvent):
                break
            events.append(update)
        distance_ms = journal_distance_ms(events)
        anchor = Anchor(0, now_ms - job.at_ms if distance_ms is None else distance_ms)
        self._clocks[job.id].take(anchor)
        await self._recorder.keep_anchor(job.id, anchor)

    async def _watch(self, coordinator: AsyncCoordinator, job_id: str) -> None:
        wait_s = 0.1
        while True:
            with contextlib.suppress(*Failure):
                next_sequence = self.projection.memory(job_id).next_sequence
                async for event in coordinator.read_events(job_id, next_sequence):
                    wait_s = 0.1
                    await self._take_event(job_id, event)
                state = self.projection.state["jobs"].get(job_id)
                if state is None or state["ended_at_ms"] is not None:
                    return
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MOST_S, wait_s * 2)

    async def _take_event(self, job_id: str, event: JobEvent) -> None:
        at_ms = self._clocks[job_id].unix_ms(event.at_ms)
        line = self.projection.take_event(job_id, event, at_ms)
        self._recorder.take_event(self.projection, job_id, event, line)
        self.feed.publish()
        if event.sequence % 256 == 0:
            # A long journal is folded piece by piece: clients are served between the pieces.
            await asyncio.sleep(0)

    async def _watch_telemetry(self, coordinator: AsyncCoordinator) -> None:
        try:
            async for levels in coordinator.watch_telemetry():
                known_nodes = self.projection.state["nodes"]
                if any(each.id not in known_nodes for each in levels):
                    await self._ask_nodes(coordinator)
                await self.take_levels(levels)
        finally:
            self.projection.forget_levels()

    async def take_levels(self, levels: Sequence[NodeLevelsView]) -> None:
        """Take what changed about some nodes; clients are served before the next ones are taken."""
        self.projection.take_levels(levels, unix_ms())
        self.feed.publish()
        await asyncio.sleep(NODES_PAUSE_S)

    async def _ask_nodes(self, coordinator: AsyncCoordinator) -> None:
        await self.take_nodes(await coordinator.nodes())

    async def take_nodes(self, nodes: Sequence[NodeView]) -> None:
        """Take the readings of all nodes, piece by piece: clients are served between the pieces."""
        now_ms = unix_ms()
        self.projection.drop_nodes_but([node.id for node in nodes])
        for piece in node_pieces(nodes):
            self.projection.take_readings(piece, now_ms)
            self.feed.publish()
            await asyncio.sleep(NODES_PAUSE_S)

    async def _ask_ledgers(self, coordinator: AsyncCoordinator) -> None:
        for job_id, job in list(self.projection.state["jobs"].items()):
            if job["unit_price"] == "0":
                continue
            payments, decimals = payments_state(await coordinator.ledger(job_id))
            if job_id in self.projection.state["jobs"]:
                self.projection.take_payments(job_id, payments, decimals)
        self.feed.publish()

    async def _judge(self, _coordinator: AsyncCoordinator) -> None:
        state = self.projection.state
        self._recorder.take_nodes(state["nodes"], unix_ms())
        times_by_job = {job: self.projection.memory(job).moved_at_ms for job in state["jobs"]}
        around = Surroundings(
            now_ms=unix_ms(),
            moved_at_ms={job: at_ms for job, at_ms in times_by_job.items() if at_ms},
            disk_free_bytes=self._disk_free_bytes(),
        )
        self.projection.take_alerts(standing_alerts(state, around))
        self.feed.publish()

    def _disk_free_bytes(self) -> int | None:
        if self._data_dir is None:
            return None
        try:
            return shutil.disk_usage(self._data_dir).free
        except OSError:
            return None
