"""A node's control stream through a gateway: its messages folded on the way up, and what a
coordinator says passed down with the gateway's own address for probes.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import structlog
from google.protobuf.message import DecodeError

from coordinator.core.hub.folding import (
    FoldingStep,
    Handling,
    NodeFolding,
    WorkMark,
    fold_other,
    fold_progress,
    fold_report,
    has_due,
    take_due,
)
from coordinator.core.hub.heartbeats import StreamPace, UsualPace
from coordinator.shell.gateway.counts import GatewayCounts
from coordinator.shell.gateway.tickets import PortRewriter
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.probe_tokens import RENEWAL_MS
from coordinator.shell.translate import ROUND_TRIPS_MAX, TRAINS_MAX, TRANSFERS_MAX
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.v1 import measurement_pb2, node_pb2
from hypergpu.wire.packing import MessagePacker, MessageUnpacker

_FAREWELL_S = 5.0
GREETING_MS_MAX = Milliseconds(90_000)
"""How long a greeting of the coordinator is waited for; nodes of thousands wait as long."""


log = structlog.get_logger()


class CoordinatorGoneError(Exception):
    """This gateway speaks to another coordinator now, and has closed its channels to this one."""


class SessionParts(NamedTuple):
    """What all sessions of a gateway share."""

    counts: GatewayCounts
    echo: ProbeEcho
    ports: PortRewriter
    count_message: Callable[[NodeId], None]
    """Raises where a node sends too many."""
    lost_after_ms: Callable[[], int]
    """The coordinator's: silence after which a node counts as lost."""


class GatewaySession:
    """One stream. Down is a gRPC context of this gateway's server, up a call to a coordinator."""

    def __init__(self, node: NodeId, context: Any, call: Any, parts: SessionParts) -> None:
        self.node = node
        self.heard_ms = monotonic_ms()
        self.pace = StreamPace.begin(UsualPace(lost_after_ms=parts.lost_after_ms()))
        """How often heartbeats come; a greeting changes it."""
        self.passed = 0
        """Messages of the node that went on to the coordinator."""
        self.job = ""
        """Job that the node said last that it works for; empty: it has not."""
        self.round_trip_us = 0
        """The newest that the node measured; 0: none."""
        self._context = context
        self._call = call
        self._parts = parts
        self._folding = NodeFolding()
        self._progress = b""
        """Newest progress that is held."""
        self._report = measurement_pb2.Measured()
        """Measurements that are held, merged."""
        self._down, self._up = asyncio.Lock(), asyncio.Lock()
        self._welcome: node_pb2.Welcome | None = None
        self._renewal_ms = 0
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, hello: bytes) -> None:
        """Pass messages on, first the hello, until either side ends.

        Raises:
            CoordinatorGoneError: The channel to the coordinator was closed.
            grpc.aio.AioRpcError: The coordinator ended its side with this.
            HyperGPUError: The node is silent or said something wrong, or this gateway stops.
        """
        node_task = asyncio.create_task(self._hear_node(hello))
        coordinator_task = asyncio.create_task(self._hear_coordinator())
        tasks = (node_task, coordinator_task)
        try:
            await asyncio.wait((*tasks, self._ending), return_when=asyncio.FIRST_COMPLETED)
            if node_task.done() and not coordinator_task.done() and node_task.exception() is None:
                await asyncio.wait((coordinator_task, self._ending), timeout=_FAREWELL_S)
            for each in (self._ending, coordinator_task, node_task):
                if each.cancelled():
                    raise CoordinatorGoneError
                if each.done():
                    each.result()
        finally:
            for task in tasks:
                task.cancel()
            self._call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, refusal: HyperGPUError) -> None:
        """End the stream with an error."""
        if not self._ending.done():
            self._ending.set_exception(refusal)

    def is_due(self, now_ms: int) -> bool:
        """Whether `flush` has something to do."""
        is_renewal_due = self._welcome is not None and now_ms >= self._renewal_ms
        return is_renewal_due or has_due(self._folding, Milliseconds(now_ms))

    @property
    def silence_limit_ms(self) -> Milliseconds:
        """Silence after which the node counts as lost. Before its greeting it has no more to say:
        the coordinator has to answer, however many others dial.
        """
        if self._welcome is None:
            return GREETING_MS_MAX
        return self.pace.silence_limit_ms(monotonic_ms())

    async def flush(self) -> None:
        """Let go on what was held long enough, and renew the node's probe token."""
        due = take_due(self._folding, monotonic_ms())
        self._folding = due.state
        try:
            if due.has_progress:
                await self._pass_up(self._take_progress())
            if due.has_report:
                await self._pass_up(self._take_report())
            if self._welcome is not None and monotonic_ms() >= self._renewal_ms:
                await self._greet(self._welcome)
        except Exception as error:  # noqa: BLE001  the stream is ending, and its readers say why
            log.debug("a message came too late", node=self.node, reason=str(error))

    async def _hear_node(self, hello: bytes) -> None:
        # A call that is over refuses what is written, and its reader learns why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await self._pass_up(hello)
            while (raw := await self._context.read()) is not grpc.aio.EOF:
                self.heard_ms = monotonic_ms()
                self._parts.count_message(self.node)
                await self._hear(raw, _parse(raw))
            async with self._up:
                await self._call.done_writing()

    async def _hear(self, raw: bytes, message: node_pb2.ControlRequest) -> None:
        match message.WhichOneof("message"):
            case "heartbeat":
                echo = node_pb2.HeartbeatEcho(sequence=message.heartbeat.sequence)
                await self._answer(node_pb2.ControlResponse(heartbeat_echo=echo))
                if self._welcome is not None and self.pace.is_outdated(self._parts.counts.sessions):
                    await self._greet(self._welcome)
            case "round_trip_probe":
                back = measurement_pb2.RoundTripEcho(sequence=message.round_trip_probe.sequence)
                await self._answer(node_pb2.ControlResponse(round_trip_echo=back))
            case "progress":
                self.pace = self.pace.after_work(monotonic_ms())
                await self._hear_progress(raw, message.progress)
            case "measured":
                await self._hear_report(message.measured)
            case _:
                step = fold_other(self._folding)
                before = self._take_progress() if self._folding.holds_progress else b""
                self._folding = step.state
                if before:
                    await self._pass_up(before)
                await self._pass_up(raw)

    async def _answer(self, message: node_pb2.ControlResponse) -> None:
        self._parts.counts.answered += 1
        await self._pass_down(message.SerializeToString())

    async def _hear_progress(self, raw: bytes, progress: node_pb2.Progress) -> None:
        self.job = progress.lease.job_id
        mark = WorkMark(progress.lease.job_id, progress.lease.number, progress.phase)
        self._parts.counts.folded += bool(self._progress)
        self._progress = raw
        step = fold_progress(self._folding, mark, monotonic_ms())
        if self._takes(step):
            await self._pass_up(self._take_progress())

    async def _hear_report(self, report: measurement_pb2.Measured) -> None:
        self._parts.counts.folded += self._folding.holds_report
        self._report = merged_report(self._report, report)
        if report.round_trips_us:
            self.round_trip_us = report.round_trips_us[-1]
        step = fold_report(self._folding, len(report.transfers), monotonic_ms())
        if self._takes(step):
            await self._pass_up(self._take_report())

    def _takes(self, step: FoldingStep) -> bool:
        """Take the state of a step; whether its message goes on."""
        self._folding = step.state
        return step.handling is not Handling.HOLD

    def _take_progress(self) -> bytes:
        progress, self._progress = self._progress, b""
        return progress

    def _take_report(self) -> bytes:
        report, self._report = self._report, measurement_pb2.Measured()
        return node_pb2.ControlRequest(measured=report).SerializeToString()

    async def _pass_up(self, raw: bytes) -> None:
        self._parts.counts.passed += 1
        self.passed += 1
        async with self._up:
            await self._call.write(raw)

    async def _pass_down(self, raw: bytes) -> None:
        async with self._down:
            await self._context.write(raw)

    async def _hear_coordinator(self) -> None:
        unpacker, packer = MessageUnpacker(), MessagePacker()
        while (raw := await self._call.read()) is not grpc.aio.EOF:
            came = node_pb2.ControlResponse.FromString(raw)
            message = unpacker.unpack(came)
            match message.WhichOneof("message"):
                case "welcome":
                    await self._greet(message.welcome)
                    continue
                case "assignment":
                    self.pace = self.pace.after_work(monotonic_ms())
                    self._parts.ports.ticket(message.assignment.model_ticket)
                case _:
                    pass
            # A coordinator packs where the node unpacks.
            own = message
            if came.HasField("packed"):
                own = packer.pack(message)
                own.blob = came.blob
            await self._pass_down(own.SerializeToString())

    async def _greet(self, welcome: node_pb2.Welcome) -> None:
        """Pass a welcome on; said again, it renews the node's probe token and its pace."""
        self._renewal_ms = monotonic_ms() + RENEWAL_MS
        if self._welcome is None:
            usual = UsualPace(max(1, welcome.heartbeat_interval_ms), self._parts.lost_after_ms())
            self.pace = StreamPace.begin(usual)
        self._welcome = welcome
        self.pace = self.pace.with_streams(self._parts.counts.sessions)
        self._parts.counts.heartbeats = self.pace.told.reason
        # Made anew: whatever else a coordinator says of addresses is not for nodes of a gateway.
        own = node_pb2.Welcome(
            version=welcome.version,
            heartbeat_interval_ms=self.pace.told.interval_ms,
            probe_port=self._parts.echo.port,
            probe_token=self._parts.echo.token(self.node),
            known_address=welcome.known_address,
            bulk_port=self._parts.ports.bulk_port(welcome.bulk_port),
        )
        await self._pass_down(node_pb2.ControlResponse(welcome=own).SerializeToString())


def _parse(raw: bytes) -> node_pb2.ControlRequest:
    try:
        return node_pb2.ControlRequest.FromString(raw)
    except DecodeError:
        raise HyperGPUError(Reason.REQUEST_INVALID, "the bytes are no ControlRequest") from None


def merged_report(
    held: measurement_pb2.Measured, report: measurement_pb2.Measured
) -> measurement_pb2.Measured:
    """Both reports as one: all measurements that a coordinator would read, and the newest state."""
    trips = [*held.round_trips_us, *report.round_trips_us]
    trains = [*held.trains, *report.trains]
    transfers = [*held.transfers, *report.transfers]
    return measurement_pb2.Measured(
        round_trips_us=trips[-ROUND_TRIPS_MAX:],
        trains=trains[-TRAINS_MAX:],
        transfers=transfers[-TRANSFERS_MAX:],
        congestion_control=report.congestion_control,
        is_probing_blocked=report.is_probing_blocked,
    )
