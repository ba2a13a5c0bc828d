"""The control stream: opens it when told, keeps it alive, and turns its messages into events."""

import asyncio
import contextlib
import math
from collections.abc import Callable

import grpc
import msgspec
import structlog

from gpu_node.core.events import (
    Connected,
    LinkLost,
    LinkRejected,
    NodeEvent,
    ShardAssigned,
    WorkAssigned,
)
from gpu_node.core.idle_reasons import KINDS_MOST, WaitingWork
from gpu_node.core.link import ToldPace, is_paced
from gpu_node.shell.folder.receipts import ReceiptKeeper
from gpu_node.shell.link.access import Access
from gpu_node.shell.link.calls import (
    Calls,
    ControlCall,
    DeliveredModel,
    ReceivedTicket,
    event_in,
    hello_message,
    reject_other_version,
)
from gpu_node.shell.link.channel import DIAL_MS_MAX, describe_error, rejection_in
from gpu_node.shell.link.coroutines import run_alongside
from gpu_node.shell.link.dialling import AGAIN_MIN_S, AGAIN_TRIPS, dial_first
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.link.probing import Prober
from hypergpu.assignment import FailureCause, Lease
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2, receipt_pb2, work_pb2
from hypergpu.wire.messages import assignment_value, hand_back_message, receipt_value, terms_value
from hypergpu.wire.outbox import MessageOutbox
from hypergpu.wire.packing import MessageUnpacker
from hypergpu.wire.work import work_assignment_value

log = structlog.get_logger()

SILENT_INTERVALS = 3
"""A coordinator that echoes none of so many heartbeats is gone."""
ROUND_TRIP = "a heartbeat came back"
"""Log line of level debug, with ``taken_us``; only the newest heartbeat is timed."""
_SIGNS_OF_LIFE = frozenset({"heartbeat", "round_trip_probe"})
"""Messages that go before all that waits: hidden states of a ring may be large."""
_FAREWELL_S = 2.0
_NEXT_S = 1.5
"""Time until the next coordinator is dialled beside one that does not answer."""
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


class HeartbeatInterval:
    """Time between two heartbeats, which may change while it is waited for."""

    def __init__(self) -> None:
        self.seconds = math.inf
        """Infinite before the first greeting."""
        self._has_changed = asyncio.Event()

    def set(self, seconds: float) -> None:
        """Change it; whoever waits goes on at once if it differs, as it may have passed already."""
        if seconds != self.seconds:
            self.seconds = seconds
            self._has_changed.set()

    async def wait(self) -> None:
        """Wait for it."""
        self._has_changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                await self._has_changed.wait()


class CoordinatorStream:
    """At most one control stream at a time, and the channel that bulk calls share with it."""

    def __init__(
        self,
        access: Access,
        receipts: ReceiptKeeper,
        event_queue: EventQueue,
        *,
        prober: Prober | None = None,
        renewal_retry_s: float = RENEWAL_RETRY_S,
    ) -> None:
        self._access = access
        self._is_starting = False
        self._report = event_queue.put
        self._check_task = event_queue.check_task
        self._renewal_retry_s = renewal_retry_s
        self._outbox: MessageOutbox[node_pb2.ControlRequest] = MessageOutbox()
        self._task: asyncio.Task[None] | None = None
        self._interval = HeartbeatInterval()
        self._pace = ToldPace()
        self._beat_at_s: dict[int, float] = {}
        self.capabilities = node_pb2.Capabilities()
        """Capabilities that the next hello names."""
        self.prober = prober or Prober()
        """Measures the line; transfers are measured too."""
        self.receipts = receipts
        """Receipts that the coordinator signed for this node."""
        self.waiting_work: tuple[WaitingWork, ...] = ()
        """Work of which the coordinator says that the node gets none."""
        self.calls: Calls | None = None
        """Bulk calls; None while there is no link."""
        self.upload_rate = access.upload_rate
        """The owner's limit, which updates and outputs of work share."""
        self._delivery: tuple[Lease, DeliveredModel] | None = None
        self.take_call: Callable[[work_pb2.WorkCall], None] = lambda _: None
        """Takes a call to the work at hand."""
        self.take_count: Callable[[work_pb2.WorkCount], None] = lambda _: None
        """Takes a count of what the node gave, to be signed."""

    def open(self, working: tuple[Lease, ...]) -> None:
        """Dial; the outcome is reported. An earlier stream ends."""
        before, self._outbox = self._task, MessageOutbox()
        self._task = asyncio.create_task(self._serve(before, working), name="control")
        self._task.add_done_callback(self._check_task)

    def send(self, message: node_pb2.ControlRequest) -> None:
        """Send a message, if there is a link."""
        if message.HasField("progress"):
            self.prober.note_work()
        if self.calls is not None:
            is_sign = message.WhichOneof("message") in _SIGNS_OF_LIFE
            self._outbox.put(message, goes_first=is_sign)

    def offer(self, capabilities: node_pb2.Capabilities) -> None:
        """Change the capabilities: a fresh stream's hello names them."""
        self.capabilities, self._is_starting = capabilities, False
        self._outbox.end()

    def take_delivery(self, lease: Lease) -> DeliveredModel:
        """What came with an assignment, once; later an expired ticket.

        The next attempt asks for a fresh one, whatever was wrong with the first.
        """
        delivery, self._delivery = self._delivery, None
        return delivery[1] if delivery is not None and delivery[0] == lease else DeliveredModel()

    def note_worker_starting(self) -> None:
        """Note that work would wait for the worker: a hello says so until it is ready."""
        self._is_starting = True

    def note_worker_ready(self) -> None:
        """Note that work would no longer wait."""
        self._is_starting = False
        self.send(node_pb2.ControlRequest(worker_ready=node_pb2.WorkerReady()))

    async def close(self) -> None:
        """Send the remaining messages, end the stream in good order and close the channel."""
        if self._task is None:
            return
        self._outbox.end()
        if self.calls is not None:
            await asyncio.wait([self._task], timeout=_FAREWELL_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _serve(self, before: "asyncio.Task[None] | None", working: tuple[Lease, ...]) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        try:
            await self._access.prepare_route()
            calls = await self._dial()
        except HyperGPUError as error:
            self._report(LinkRejected(at_ms=monotonic_ms(), reason=describe_error(error)))
            return
        except TimeoutError as timeout:
            self._report(self._end_event(timeout))
            return
        try:
            event = await self._run_stream(calls, working)
        finally:
            self.calls = None
            await calls.close()
        self._report(event)

    async def _run_stream(self, calls: Calls, working: tuple[Lease, ...]) -> NodeEvent:
        """Run the stream until it ends; gives the event of its end."""
        try:
            call = calls.control()
            was_starting = self._is_starting
            await self._greet(call, working, calls)
            self.calls = calls
            if was_starting and not self._is_starting:
                self.note_worker_ready()
            self.receipts.note_answer()
            self._report(Connected(at_ms=monotonic_ms()))
            async with run_alongside(
                self._write(call),
                self._beat(),
                self._renew_certificate(calls),
                *self.prober.begin(self.send, self._heartbeat_ms),
            ):
                await self._listen(call)
        except (grpc.aio.AioRpcError, HyperGPUError, TimeoutError) as error:
            return self._end_event(error)
        return self._link_lost("the coordinator ended the stream")

    def _end_event(self, broken: Exception) -> NodeEvent:
        at_ms = monotonic_ms()
        if self.calls is None:
            self.receipts.warn_of_silence()
        rejection = rejection_in(broken)
        if rejection is not None and rejection.reason in _LASTING:
            return LinkRejected(at_ms=at_ms, reason=describe_error(rejection))
        if rejection is None and (reason := self._access.expiry_reason()):
            return LinkRejected(at_ms=at_ms, reason=reason)
        if isinstance(broken, TimeoutError):
            event = self._link_lost("the coordinator is silent")
            return msgspec.structs.replace(event, is_silent=True)
        return self._link_lost(
            describe_error(broken), 0 if rejection is None else rejection.wait_ms
        )

    def _link_lost(self, reason: str, wait_ms: int = 0) -> LinkLost:
        return LinkLost(
            at_ms=monotonic_ms(),
            reason=reason,
            wait_ms=Milliseconds(wait_ms),
            heartbeat_ms=self._heartbeat_ms,
        )

    async def _greet(self, call: ControlCall, working: tuple[Lease, ...], calls: Calls) -> None:
        hello = hello_message(self.capabilities, working, self.receipts.newest())
        hello.is_starting, hello.unpacks, hello.takes_blobs = self._is_starting, True, True
        async with asyncio.timeout(self._welcome_timeout_s()):
            await call.write(node_pb2.ControlRequest(hello=hello))
            answer = await call.read()
        if not isinstance(answer, node_pb2.ControlResponse) or not answer.HasField("welcome"):
            raise HyperGPUError(Reason.CALL_BROKEN, "the control stream began without a welcome")
        reject_other_version(answer.welcome.version)
        calls.known_address = answer.welcome.known_address
        calls.bulk_port = answer.welcome.bulk_port
        self._take_welcome(answer.welcome, calls.address)

    def _take_welcome(self, welcome: node_pb2.Welcome, address: str) -> None:
        """Take in a welcome. It comes again: a stream outlives its token and its pace."""
        self._access.note_welcome(address, tuple(welcome.coordinators))
        self.prober.set_target(welcome, self._access.coordinator_address)
        interval_ms = Milliseconds(max(1, welcome.heartbeat_interval_ms))
        self._pace = self._pace.after_greeting(interval_ms, monotonic_ms())
        self._interval.set(interval_ms / 1000)

    async def _dial(self) -> Calls:
        """Calls over a channel that is connected, or knows that it cannot be."""
        timeout_s, longest_s = self._timeout_s, self._longest_trip_s
        again_s = max(AGAIN_MIN_S, AGAIN_TRIPS * longest_s) if longest_s else timeout_s
        if self._is_paced:
            again_s = timeout_s
        targets = self._access.coordinators
        if targets > 1:
            # One that stands still accepts a connection and says nothing.
            again_s = min(again_s, _NEXT_S)
        return await dial_first(
            self._access.open_calls, again_s=again_s, timeout_s=timeout_s, targets=targets
        )

    @property
    def _timeout_s(self) -> float:
        """Time limit of a dial and of a welcome. Where thousands may dial at once it is long: who
        gives up a handshake that waits for its turn begins another, and with enough of those none
        ends in time.
        """
        least_s = DIAL_MS_MAX / 1000 if self._is_paced else 0.0
        return max(least_s, self._access.timeout_s)

    @property
    def _is_paced(self) -> bool:
        return is_paced(self._heartbeat_ms)

    @property
    def _heartbeat_ms(self) -> Milliseconds:
        """Interval of heartbeats to dial by; 0: none is known."""
        return self._pace.longest_ms

    @property
    def _longest_trip_s(self) -> float:
        """Longest of the newest round trips; 0: none is known."""
        return self.prober.measurements.longest_round_trip_us / 1e6

    def _welcome_timeout_s(self) -> float:
        """Time limit of a welcome over an open connection."""
        timeout_s, longest_s = self._timeout_s, self._longest_trip_s
        if not longest_s or self._is_paced:
            return timeout_s
        interval_s = self._heartbeat_ms / 1000
        return min(timeout_s, max(_WELCOME_MIN_S, _WELCOME_TRIPS * longest_s, interval_s))

    async def _listen(self, call: ControlCall) -> None:
        unpacker = MessageUnpacker()
        while True:
            async with asyncio.timeout(SILENT_INTERVALS * self._interval.seconds):
                message = await call.read()
            if not isinstance(message, node_pb2.ControlResponse):
                return
            content = message.blob
            message = unpacker.unpack(message)
            if message.HasField("receipts"):
                await self._keep_receipts(message.receipts)
            elif message.HasField("waiting_kinds"):
                kinds = message.waiting_kinds.kinds[:KINDS_MOST]
                self.waiting_work = tuple(WaitingWork(each.kind, each.reason) for each in kinds)
            else:
                self._dispatch(message, content)

    async def _keep_receipts(self, message: receipt_pb2.Receipts) -> None:
        """Keep receipts; one that is wrong is reported, and stops no work."""
        try:
            receipts = [receipt_value(each, self.receipts.node) for each in message.receipts]
            terms = terms_value(message.terms) if message.HasField("terms") else None
            await asyncio.to_thread(self.receipts.take, JobId(message.job_id), receipts, terms)
        except (HyperGPUError, OSError, ValueError) as error:
            log.warning("receipts were not kept", job_id=message.job_id[:80], reason=str(error))

    def _dispatch(self, message: node_pb2.ControlResponse, content: bytes) -> None:
        match message.WhichOneof("message"):
            case "assignment":
                self._take_assignment(message.assignment, content)
            case "work_assignment":
                self._take_work(message.work_assignment)
            case "work_call" | "work_count":
                self._take_call(message)
            case "heartbeat_echo" | "round_trip_echo":
                self._take_echo(message)
            case "welcome":
                if self.calls is not None:
                    self._take_welcome(message.welcome, self.calls.address)
            case _:
                if (event := event_in(message, monotonic_ms())) is not None:
                    self._report(event)

    def _take_call(self, message: node_pb2.ControlResponse) -> None:
        if message.HasField("work_call"):
            self.take_call(message.work_call)
        else:
            self.take_count(message.work_count)

    def _take_echo(self, message: node_pb2.ControlResponse) -> None:
        if message.HasField("heartbeat_echo"):
            self._note_echo(message.heartbeat_echo.sequence)
        else:
            self.prober.note_echo(message.round_trip_echo.sequence)

    def _note_echo(self, sequence: int) -> None:
        sent_at_s = self._beat_at_s.pop(sequence, None)
        if sent_at_s is not None:
            taken_us = round((asyncio.get_running_loop().time() - sent_at_s) * 1e6)
            self.prober.measurements.add_round_trip(taken_us)
            log.debug(ROUND_TRIP, sequence=sequence, taken_us=taken_us)

    def _take_assignment(self, message: node_pb2.Assignment, content: bytes) -> None:
        self.prober.note_work()
        try:
            assignment = assignment_value(message)
        except HyperGPUError as error:
            self._hand_back(message.lease, error.detail)
            return
        lease, terms = assignment.lease, assignment.terms
        if reason := self.receipts.changed_terms(lease.job_id, terms):
            self._hand_back(message.lease, reason)
        else:
            ticket = ReceivedTicket.now(message.model_ticket)
            self._delivery = lease, DeliveredModel(ticket, content)
            self._report(ShardAssigned(at_ms=monotonic_ms(), assignment=assignment))

    def _take_work(self, message: node_pb2.WorkAssignment) -> None:
        self.prober.note_work()
        try:
            assignment = work_assignment_value(message)
        except HyperGPUError as error:
            self._hand_back(message.lease, error.detail)
            return
        job_id, terms = assignment.lease.job_id, assignment.terms
        if terms is not None and (reason := self.receipts.changed_terms(job_id, terms)):
            self._hand_back(message.lease, reason)
        else:
            self._report(WorkAssigned(at_ms=monotonic_ms(), assignment=assignment))

    def _hand_back(self, lease: node_pb2.Lease, reason: str) -> None:
        log.warning("an assignment is not taken", reason=reason)
        back = hand_back_message(lease, reason, FailureCause.OTHER)
        self.send(node_pb2.ControlRequest(hand_back=back))

    async def _write(self, call: ControlCall) -> None:
        outbox = self._outbox
        try:
            while (message := await outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except asyncio.InvalidStateError:
            return  # the call is over, and its reader learns why

    async def _beat(self) -> None:
        sequence = 0
        while True:
            sequence += 1
            self._beat_at_s = {sequence: asyncio.get_running_loop().time()}
            beat = node_pb2.Heartbeat(sequence=sequence)
            self.send(node_pb2.ControlRequest(heartbeat=beat))
            await self._interval.wait()

    async def _renew_certificate(self, calls: Calls) -> None:
        while True:
            try:
                if (due_s := self._access.renewal_due_s()) is None:
                    return
                await asyncio.sleep(due_s)
                await self._access.renew(calls)
            except (grpc.aio.AioRpcError, OSError, HyperGPUError) as error:
                # There is a third of its life left for a full disk to be noticed in.
                log.warning("the certificate was not renewed", reason=describe_error(error))
                await asyncio.sleep(self._renewal_retry_s)
