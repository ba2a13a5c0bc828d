"""The control stream: opens it when told, keeps it alive, and turns what it says into events."""

import asyncio

import grpc
import structlog

from gpu_node.core.events import (
    Connected,
    DrainRequested,
    Event,
    JobReleased,
    LinkLost,
    LinkRefused,
    ShardAssigned,
    ShardCancelled,
)
from gpu_node.shell.link.access import Access
from gpu_node.shell.link.beside import beside
from gpu_node.shell.link.calls import Calls, ControlCall
from gpu_node.shell.link.dial import AGAIN_MIN_S, AGAIN_TRIPS, first_settled
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.link.lines import Lines
from gpu_node.shell.link.refusals import refusal_in, why
from gpu_node.shell.probe.prober import Prober
from gpu_node.shell.translate import refuse_other_version, version_message
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.process.clock import monotonic_ms
from hypergpu.statements.assignment import Lease
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2, receipt_pb2
from hypergpu.wire.assignment import assignment_value, lease_message, lease_value
from hypergpu.wire.statements import receipt_message, receipt_value, terms_value

log = structlog.get_logger()

SILENT_INTERVALS = 3
"""A coordinator that echoes none of so many heartbeats is gone."""
ROUND_TRIP = "a heartbeat came back"
"""Log line of level debug, with ``taken_us``; only the newest heartbeat is timed."""
_FAREWELL_S = 2.0
_WELCOME_MIN_S = 4.5
_WELCOME_TRIPS = 30
"""A welcome takes one or two; lines change while a node is away."""
RENEWAL_RETRY_S = 60.0
_LASTING = frozenset(
    {
        Reason.VERSION_MISMATCH,
        Reason.NODE_REVOKED,
        Reason.NODE_UNKNOWN,
        Reason.ROLE_FORBIDDEN,
        Reason.SIGNATURE_INVALID,
        Reason.NODE_NOT_JOINED,
        Reason.FILE_UNUSABLE,
        Reason.AUTHORITY_MISMATCH,
    }
)


class ControlLink:
    """At most one control stream at a time, and the channel that bulk calls share with it."""

    def __init__(
        self,
        access: Access,
        capabilities: node_pb2.Capabilities,
        event_queue: EventQueue,
        *,
        timeout_ms: Milliseconds,
        renewal_retry_s: float = RENEWAL_RETRY_S,
        prober: Prober | None = None,
    ) -> None:
        self._access = access
        self._capabilities = capabilities
        self._is_starting = False
        self._report = event_queue.event
        self._inspect = event_queue.inspect
        self._timeout_ms = timeout_ms
        self._renewal_retry_s = renewal_retry_s
        self._outbox: asyncio.Queue[node_pb2.ControlRequest | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._beat_at_s: dict[int, float] = {}
        self.prober = prober or Prober()
        """Measures the line; it learns from transfers too."""
        self.receipts = access.receipts()
        """Receipts that the coordinator signed for this node."""
        self.calls: Calls | None = None
        """For bulk calls; None while there is no link."""
        self.lines = Lines(lambda: access.calls(timeout_ms))
        """Further connections, for as long as there is a link."""

    def open(self, working: tuple[Lease, ...]) -> None:
        """Dial; what comes of it is reported. An earlier stream ends."""
        before, self._outbox = self._task, asyncio.Queue()
        self._task = asyncio.create_task(self._serve(before, working), name="control")
        self._task.add_done_callback(self._inspect)

    def send(self, message: node_pb2.ControlRequest) -> None:
        """Say something, if anybody listens."""
        if message.HasField("progress"):
            self.prober.stir()
        if self.calls is not None:
            self._outbox.put_nowait(message)

    def offer(self, capabilities: node_pb2.Capabilities) -> None:
        """The node can do something else than it said: the next stream's hello tells."""
        self._capabilities, self._is_starting = capabilities, False
        self._outbox.put_nowait(None)

    def worker_starts(self) -> None:
        """Work would wait for the worker: a hello says so until it is ready."""
        self._is_starting = True

    def worker_is_ready(self) -> None:
        """It no longer would."""
        self._is_starting = False
        self.send(node_pb2.ControlRequest(worker_ready=node_pb2.WorkerReady()))

    async def close(self) -> None:
        """Say what is left to say, end the stream in good order and close the channel."""
        if self._task is None:
            return
        self._outbox.put_nowait(None)
        if self.calls is not None:
            await asyncio.wait([self._task], timeout=_FAREWELL_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _serve(self, before: "asyncio.Task[None] | None", working: tuple[Lease, ...]) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        try:
            await asyncio.to_thread(self._access.make_way)
            calls = await self._dial()
        except HyperGPUError as refused:
            self._report(LinkRefused(at_ms=monotonic_ms(), reason=why(refused)))
            return
        except TimeoutError as broken:
            self._report(self._ending(broken))
            return
        try:
            event = await self._conversation(calls, working)
        finally:
            self.calls = None
            await self.lines.close()
            await calls.close()
        self._report(event)

    async def _conversation(self, calls: Calls, working: tuple[Lease, ...]) -> Event:
        """Hold the stream until it ends; gives what its end means."""
        try:
            call = calls.control()
            was_starting = self._is_starting
            interval_ms = await self._greet(call, working)
            self.calls = calls
            if was_starting and not self._is_starting:
                self.worker_is_ready()
            self.receipts.note_answer()
            self._report(Connected(at_ms=monotonic_ms()))
            async with beside(
                self._write(call),
                self._beat(interval_ms),
                self._keep_certificate(calls),
                *self.prober.begin(self.send),
            ):
                await self._listen(call, interval_ms)
        except (grpc.aio.AioRpcError, HyperGPUError, TimeoutError) as broken:
            return self._ending(broken)
        return LinkLost(at_ms=monotonic_ms(), reason="the coordinator ended the stream")

    def _ending(self, broken: Exception) -> Event:
        at_ms = monotonic_ms()
        if self.calls is None:
            self.receipts.warn_of_silence()
        refused = broken if isinstance(broken, HyperGPUError) else None
        if isinstance(broken, grpc.aio.AioRpcError):
            refused = refusal_in(broken)
        if refused is not None and refused.reason in _LASTING:
            return LinkRefused(at_ms=at_ms, reason=why(refused))
        if refused is None and (reason := self._access.out_of_date()):
            return LinkRefused(at_ms=at_ms, reason=reason)
        is_silent = isinstance(broken, TimeoutError)
        return LinkLost(
            at_ms=at_ms, reason="the coordinator is silent" if is_silent else why(broken)
        )

    async def _greet(self, call: ControlCall, working: tuple[Lease, ...]) -> int:
        hello = node_pb2.Hello(
            version=version_message(),
            capabilities=self._capabilities,
            working=[lease_message(lease) for lease in working],
            is_starting=self._is_starting,
            newest_receipts=[
                receipt_pb2.NewestReceipt(job_id=job_id, receipt=receipt_message(signed))
                for job_id, signed in self.receipts.newest()
            ],
        )
        async with asyncio.timeout(self._patience_s()):
            await call.write(node_pb2.ControlRequest(hello=hello))
            answer = await call.read()
        if not isinstance(answer, node_pb2.ControlResponse) or not answer.HasField("welcome"):
            raise HyperGPUError(Reason.CALL_BROKEN, "the control stream began without a welcome")
        refuse_other_version(answer.welcome.version)
        self.prober.welcomed(answer.welcome, self._access.dialled)
        return max(1, answer.welcome.heartbeat_interval_ms)

    async def _dial(self) -> Calls:
        """Calls over a channel that knows how it stands."""
        timeout_s, longest_s = self._timeout_ms / 1000, self._longest_trip_s
        again_s = max(AGAIN_MIN_S, AGAIN_TRIPS * longest_s) if longest_s else timeout_s
        return await first_settled(
            lambda: self._access.calls(self._timeout_ms), again_s=again_s, timeout_s=timeout_s
        )

    @property
    def _longest_trip_s(self) -> float:
        """Of the newest round trips; 0: none is known."""
        return self.prober.findings.longest_round_trip_us / 1e6

    def _patience_s(self) -> float:
        """How long to wait for a welcome over a connection that has come about."""
        timeout_s, longest_s = self._timeout_ms / 1000, self._longest_trip_s
        if not longest_s:
            return timeout_s
        return min(timeout_s, max(_WELCOME_MIN_S, _WELCOME_TRIPS * longest_s))

    async def _listen(self, call: ControlCall, interval_ms: int) -> None:
        while True:
            async with asyncio.timeout(SILENT_INTERVALS * interval_ms / 1000):
                message = await call.read()
            if not isinstance(message, node_pb2.ControlResponse):
                return
            if message.HasField("receipts"):
                await self._keep_receipts(message.receipts)
            else:
                self._hear(message)

    async def _keep_receipts(self, message: receipt_pb2.Receipts) -> None:
        """Keep receipts; one that is wrong is reported, and stops no work."""
        try:
            found = [receipt_value(each, self.receipts.node) for each in message.receipts]
            terms = terms_value(message.terms) if message.HasField("terms") else None
            await asyncio.to_thread(self.receipts.take, JobId(message.job_id), found, terms)
        except (HyperGPUError, OSError, ValueError) as broken:
            log.warning("receipts were not kept", job_id=message.job_id[:80], reason=str(broken))

    def _hear(self, message: node_pb2.ControlResponse) -> None:
        at_ms = monotonic_ms()
        match message.WhichOneof("message"):
            case "assignment":
                self._take_assignment(message.assignment, at_ms)
            case "cancel":
                lease = lease_value(message.cancel.lease)
                self._report(ShardCancelled(at_ms=at_ms, lease=lease, reason=message.cancel.reason))
            case "release":
                released = message.release
                job_id = JobId(released.job_id)
                self._report(JobReleased(at_ms=at_ms, job_id=job_id, reason=released.reason))
            case "drain":
                reason = message.drain.reason or "the coordinator asked it to leave"
                self._report(DrainRequested(at_ms=at_ms, reason=reason))
            case _:
                self._heard_of_line(message)

    def _heard_of_line(self, message: node_pb2.ControlResponse) -> None:
        match message.WhichOneof("message"):
            case "heartbeat_echo":
                self._note_echo(message.heartbeat_echo.sequence)
            case "round_trip_echo":
                self.prober.echoed(message.round_trip_echo.sequence)
            case "welcome":
                # The stream lasts longer than the token that came with its greeting.
                self.prober.welcomed(message.welcome, self._access.dialled)
            case _:
                pass

    def _note_echo(self, sequence: int) -> None:
        sent_at_s = self._beat_at_s.pop(sequence, None)
        if sent_at_s is not None:
            taken_us = round((asyncio.get_running_loop().time() - sent_at_s) * 1e6)
            self.prober.findings.round_trip(taken_us)
            log.debug(ROUND_TRIP, sequence=sequence, taken_us=taken_us)

    def _take_assignment(self, message: node_pb2.Assignment, at_ms: Milliseconds) -> None:
        self.prober.stir()
        try:
            assignment = assignment_value(message)
        except HyperGPUError as refused:
            self._hand_back(message.lease, refused.detail)
        else:
            if changed := self.receipts.changed_terms(assignment.lease.job_id, assignment.terms):
                self._hand_back(message.lease, changed)
            else:
                self._report(ShardAssigned(at_ms=at_ms, assignment=assignment))

    def _hand_back(self, lease: node_pb2.Lease, reason: str) -> None:
        log.warning("an assignment is not taken", reason=reason)
        back = node_pb2.HandBack(lease=lease, reason=reason)
        self.send(node_pb2.ControlRequest(hand_back=back))

    async def _write(self, call: ControlCall) -> None:
        outbox = self._outbox
        try:
            while (message := await outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except asyncio.InvalidStateError:
            return  # the call is over, and who reads from it learns why

    async def _beat(self, interval_ms: int) -> None:
        sequence = 0
        while True:
            sequence += 1
            self._beat_at_s = {sequence: asyncio.get_running_loop().time()}
            beat = node_pb2.Heartbeat(sequence=sequence)
            self.send(node_pb2.ControlRequest(heartbeat=beat))
            await asyncio.sleep(interval_ms / 1000)

    async def _keep_certificate(self, calls: Calls) -> None:
        while True:
            try:
                if (due_s := self._access.renewal_due_s()) is None:
                    return
                await asyncio.sleep(due_s)
                await self._access.renew(calls)
            except (grpc.aio.AioRpcError, OSError, HyperGPUError) as broken:
                # There is a third of its life left for a full disk to be noticed in.
                log.warning("the certificate was not renewed", reason=why(broken))
                await asyncio.sleep(self._renewal_retry_s)
