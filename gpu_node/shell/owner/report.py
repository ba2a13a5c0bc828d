"""The node's report on itself: a small file that commands on this machine read.

It is replaced a few times a second at most, whatever happens, and never waits for a disk. A report
that cannot be written is lost, and the work goes on.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import structlog

from gpu_node.config import NodeSettings
from gpu_node.core import commands, events, session_state
from gpu_node.core.activity import (
    NodeActivity,
    advance_activity,
    judgement_reports,
    setback_reports,
    work_report,
)
from gpu_node.core.commands import Departure
from gpu_node.core.idle_reasons import idle_reasons
from gpu_node.core.limits import OwnerLimits
from gpu_node.core.session_state import NodeSession, SessionStep
from gpu_node.shell.folder.state import StatePaths, load_coordinator
from gpu_node.shell.link.control import CoordinatorStream
from gpu_node.shell.transfer.transfers import TransferTasks
from hypergpu.clock import monotonic_ms, unix_ms
from hypergpu.durable import PRIVATE
from hypergpu.errors import HyperGPUError
from hypergpu.node_report import (
    DRAINING,
    FAILED,
    RUNNING,
    UNHEALTHY,
    WITHHELD,
    LimitsReport,
    LinkReport,
    NodeReport,
)
from hypergpu.units import Bytes
from hypergpu.v1 import measurement_pb2

log = structlog.get_logger()

_LEAST_S = 0.3
"""Time between two reports at least."""
_IDLE_S = 5.0
"""The same without work: what waits for other nodes is no event. `REPORT_EVERY_MS` is the promise.
"""
_WORKING_S = 1.0
"""Time between two reports at most while there is work: bytes on their way are no events."""


class Reporter:
    """Reports of one daemon. Entered, it writes them; left, it writes how the daemon ended.

    Args:
        paths: The node's folder.
        settings: The node's.
        stream: The control stream, which knows the line and the receipts.
        transfers: The transfers, which know how far they are.
        log_file: The log; None: it goes to standard error.
    """

    def __init__(
        self,
        paths: StatePaths,
        settings: NodeSettings,
        stream: CoordinatorStream,
        transfers: TransferTasks,
        *,
        log_file: Path | None = None,
    ) -> None:
        self.owner_limits = OwnerLimits()
        """Limits of the owner, by which kinds of work are done."""
        self._paths = paths
        self._limits = LimitsReport(
            worker_threads=settings.worker_threads,
            worker_memory_bytes=settings.worker_memory_bytes,
            worker_step_floor_ms=settings.worker_step_floor_ms,
            cache_bytes=settings.cache_bytes,
            drain_limit_ms=settings.drain_limit_ms,
        )
        self._stream = stream
        self._transfers = transfers
        node = stream.receipts.node
        self._page = f"{settings.page.rstrip('/')}/#/mine/{node}" if settings.page else None
        self._log = None if log_file is None else str(log_file)
        self._started_at_ms = unix_ms()
        self._session = NodeSession(node=node)
        self._activity = NodeActivity()
        self._departure: tuple[str, str] | None = None
        self._has_changed = asyncio.Event()
        self._is_over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    def advance(self, before: NodeSession, event: events.NodeEvent, step: SessionStep) -> None:
        """Note a step of the session; it is reported soon."""
        self._activity = advance_activity(self._activity, before, event, step)
        self._session = step.session
        for command in step.commands:
            if isinstance(command, commands.Leave):
                self._departure = command.departure.value, command.reason
        self._has_changed.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._write_often(), name="report")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(raised, asyncio.CancelledError):
            self._departure = Departure.DRAINED.value, "it was stopped before it had begun"
        elif raised is not None or self._departure is None:
            detail = raised.detail if isinstance(raised, HyperGPUError) else repr(raised)
            self._departure = FAILED, detail
        self._is_over.set()
        self._has_changed.set()
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._write, self._report())

    async def _write_often(self) -> None:
        while not self._is_over.is_set():
            self._has_changed.clear()
            await asyncio.to_thread(self._write, self._report())
            is_working = self._session.current is not None
            longest_s = _WORKING_S if is_working else _IDLE_S
            await _wait(self._has_changed, longest_s)
            await _wait(self._is_over, _LEAST_S)

    def write(self) -> None:
        """Write a report before the daemon runs. Blocks."""
        self._write(self._report())

    def _write(self, report: NodeReport) -> None:
        """Add what only disks and locks tell, and replace the file. Blocks."""
        path = self._paths.report
        beside = path.with_name(f".{path.name}.new")
        link = msgspec.structs.replace(report.link, coordinator=self._coordinator())
        earnings = self._stream.receipts.earnings()
        report = msgspec.structs.replace(report, link=link, earned=earnings)
        try:
            content = msgspec.json.encode(report)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(beside, flags, PRIVATE), "wb") as file:
                file.write(content)
            beside.replace(path)
        except OSError as error:
            if not self._is_failing:
                log.warning("no reports for hypergpu status", reason=str(error))
            self._is_failing = True
        else:
            self._is_failing = False

    def _report(self) -> NodeReport:
        session, activity = self._session, self._activity
        now_ms = unix_ms()
        offset_ms = now_ms - monotonic_ms()
        state, why = self._state()
        capabilities = self._stream.capabilities
        moved_bytes = Bytes(max(0, self._transfers.moved_bytes))
        return NodeReport(
            node=session.node,
            name=capabilities.name,
            state=state,
            reason=why,
            process_id=os.getpid(),
            started_at_ms=self._started_at_ms,
            at_ms=now_ms,
            device=capabilities.device_name or capabilities.device,
            link=self._link(offset_ms),
            work=work_report(session, activity, offset_ms, moved_bytes=moved_bytes),
            totals=activity.totals,
            setbacks=setback_reports(activity, offset_ms),
            judgements=judgement_reports(activity, offset_ms),
            limits=msgspec.structs.replace(self._limits, kinds=self.owner_limits.kinds),
            idle=self._idle_reasons(),
            sandbox=capabilities.sandbox,
            state_dir=str(self._paths.root),
            log=self._log,
            page=self._page,
        )

    def _idle_reasons(self) -> tuple[str, ...]:
        if self._session.current is not None or not self._session.is_connected:
            return ()
        return idle_reasons(self._stream.waiting_work, self.owner_limits)

    def _state(self) -> tuple[str, str]:
        if self._departure is not None and self._is_over.is_set():
            return self._departure
        if self._session.drain:
            return DRAINING, self._session.drain
        if self._session.unhealthy:
            return UNHEALTHY, self._session.unhealthy
        if self._session.withheld:
            return WITHHELD, self._session.withheld
        return RUNNING, ""

    def _link(self, offset_ms: int) -> LinkReport:
        link, measurements = self._session.link, self._stream.prober.measurements
        is_waiting = link.phase in (
            session_state.LinkPhase.WAITING,
            session_state.LinkPhase.JOIN_WAITING,
        )
        return LinkReport(
            state=link.phase.value,
            since_ms=link.since_ms + offset_ms if link.since_ms else self._started_at_ms,
            reason=link.reason,
            retry_at_ms=link.retry_at_ms + offset_ms if is_waiting else None,
            round_trip_us=measurements.least_round_trip_us or None,
            longest_round_trip_us=measurements.longest_round_trip_us or None,
            up_bits_per_s=measurements.goodput_bits_per_s(measurement_pb2.DIRECTION_UP),
            down_bits_per_s=measurements.goodput_bits_per_s(measurement_pb2.DIRECTION_DOWN),
        )

    def _coordinator(self) -> str | None:
        with suppress(HyperGPUError, OSError):
            if (coordinator := load_coordinator(self._paths)) is not None:
                return coordinator.address
        return None


async def _wait(event: asyncio.Event, longest_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await event.wait()
