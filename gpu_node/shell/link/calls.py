"""The calls of NodeService: messages, and how fast bulk moves."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

import grpc

from gpu_node.core.commands import AnnounceDraining, HandBack, NodeCommand
from gpu_node.core.events import (
    DrainRequested,
    JobReleased,
    NodeEvent,
    ShardCancelled,
    TrainedUpdate,
)
from gpu_node.core.session_state import Computing, Transferring, Uploading
from gpu_node.shell.worker.protocol import ShardProgress, WorkerCapabilities
from hypergpu.assignment import Assignment, Lease
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.goodput import GoodputMeter, TransferredBytes, moved_whole
from hypergpu.ids import Digest, JobId
from hypergpu.line_limits import StallTimeout, transfer_timeout_s
from hypergpu.packed_work import PackedWork
from hypergpu.phases import PhaseDurations, WorkPhase
from hypergpu.protocol import PROTOCOL, SOFTWARE, refuse_other_protocol
from hypergpu.statements import SignedReceipt
from hypergpu.units import Bytes, Microseconds, Milliseconds
from hypergpu.v1 import measurement_pb2, node_pb2, node_pb2_grpc, receipt_pb2, tensor_pb2
from hypergpu.wire.bulk import BulkClient, UpdateRequest
from hypergpu.wire.bulk_ranges import FileRange
from hypergpu.wire.messages import (
    blob_message,
    digest_message,
    hand_back_message,
    lease_message,
    lease_value,
    phase_number,
    phases_message,
    receipt_message,
)
from hypergpu.wire.packing import unpack_addresses
from hypergpu.wire.update_requests import (
    NODE_HEADER,
    OFFER_HEADER,
    PROTOCOL_HEADER,
    UpdateAnswer,
    offer_text,
)
from hypergpu.wire.work import work_message

if TYPE_CHECKING:
    from hypergpu.v1.node_pb2_grpc import NodeServiceAsyncStub


Metadata = tuple[tuple[str, str], ...]
NODE_KEY = "hypergpu-node"
"""Metadata that names the node where there is no TLS."""
ControlCall = grpc.aio.StreamStreamCall[node_pb2.ControlRequest, node_pb2.ControlResponse]

_PENDING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


class Calls:
    """One channel's calls. Each raises `grpc.aio.AioRpcError` when it breaks or is rejected."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: Metadata,
        timeout_ms: Milliseconds,
        bulk: BulkClient,
    ) -> None:
        self._channel = channel
        self.address = ""
        """``host:port`` that was dialled."""
        self.known_address = ""
        """Address by which the coordinator tells others; empty: it tells whole ones."""
        self.bulk_port = 0
        """Port that takes updates there; 0: an object store takes them."""
        self.bulk = bulk
        """Bytes of the blobs that the calls give tickets for."""
        self._metadata = metadata
        self.timeout_ms = timeout_ms
        self._timeout_s = timeout_ms / 1000
        self._stub: NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)  # type: ignore[assignment]

    async def connect(self) -> None:
        """Connect. Returns once that is done or has failed; then the next call fails."""
        state = self._channel.get_state(try_to_connect=True)
        while state in _PENDING:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    @property
    def is_connected(self) -> bool:
        """Whether the channel is connected now."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def join(self, request: node_pb2.JoinRequest) -> node_pb2.JoinResponse:
        """Trade a token for a certificate."""
        return await self._stub.Join(request, timeout=self._timeout_s, metadata=self._metadata)

    async def renew(
        self, request: node_pb2.RenewCertificateRequest
    ) -> node_pb2.RenewCertificateResponse:
        """Get a fresh certificate."""
        return await self._stub.RenewCertificate(
            request, timeout=self._timeout_s, metadata=self._metadata
        )

    def control(self) -> ControlCall:
        """Open the control stream. It has no deadline of its own: heartbeats watch over it."""
        return self._stub.Control(metadata=self._metadata)

    async def resolve_blob(
        self, digest: Digest, *, is_doubted: bool
    ) -> node_pb2.ResolveBlobResponse:
        """Ask for a ticket to fetch a blob, of which an earlier one may have been no good."""
        request = node_pb2.ResolveBlobRequest(digest=digest_message(digest), is_doubted=is_doubted)
        answer = await self._stub.ResolveBlob(
            request, timeout=self._timeout_s, metadata=self._metadata
        )
        unpack_addresses(answer.ticket, self.known_address)
        return answer

    async def offer_update(
        self, request: node_pb2.OfferUpdateRequest
    ) -> node_pb2.OfferUpdateResponse:
        """Ask for a ticket to send an update, or what is missing of it."""
        answer = await self._stub.OfferUpdate(
            request, timeout=self._timeout_s, metadata=self._metadata
        )
        unpack_addresses(answer.ticket, self.known_address)
        return answer

    async def send_update(
        self,
        offer: bytes,
        source: FileRange | None,
        stall: StallTimeout,
        on_sent: Callable[[int], None],
    ) -> UpdateAnswer:
        """Send a range of an update with its serialised offer, or ask what is missing of it.

        Raises:
            HyperGPUError: The update was refused, with the coordinator's reason.
            BulkBrokenError: The connection broke, or the port does not know this node.
            TimeoutError: The bytes got nowhere, or no answer came.
            OSError: The file cannot be read.
        """
        headers = {OFFER_HEADER: offer_text(offer), PROTOCOL_HEADER: str(PROTOCOL)}
        if node := dict(self._metadata).get(NODE_KEY):
            headers[NODE_HEADER] = node
        # All that came before may be read and synced before this answer.
        end = 0 if source is None else source.span.end
        answer_s = transfer_timeout_s(end, self.timeout_ms)
        request = UpdateRequest(self.bulk_port, headers, source, answer_s)
        return await self.bulk.send_update(request, stall, on_sent)

    async def commit_update(self, lease: Lease, digest: Digest, size_bytes: Bytes) -> None:
        """Have an update accepted of which all bytes were sent; they are read and synced first."""
        request = node_pb2.CommitUpdateRequest(
            lease=lease_message(lease), digest=digest_message(digest)
        )
        timeout_s = transfer_timeout_s(size_bytes, self.timeout_ms)
        await self._stub.CommitUpdate(request, timeout=timeout_s, metadata=self._metadata)

    async def offer_result(self, lease: Lease, blob: BlobRef) -> node_pb2.OfferResultResponse:
        """Ask for a ticket to send the blob of a result, or what is missing of it."""
        request = node_pb2.OfferResultRequest(lease=lease_message(lease), blob=blob_message(blob))
        answer = await self._stub.OfferResult(
            request, timeout=self._timeout_s, metadata=self._metadata
        )
        unpack_addresses(answer.ticket, self.known_address)
        return answer

    async def contribute(
        self,
        lease: Lease,
        result: PackedWork,
        blob: BlobRef | None = None,
        signature: bytes = b"",
        content: bytes = b"",
    ) -> None:
        """Send the result of packed work; it is accepted once this returns.

        Args:
            lease: The work's.
            result: The kind's own struct.
            blob: Blob that the result names.
            signature: Of the result's contribution; empty: the result is not signed.
            content: All of the blob; empty: it was sent before.
        """
        request = node_pb2.ContributeRequest(
            lease=lease_message(lease),
            result=work_message(result),
            blob=None if blob is None else blob_message(blob),
            signature=signature,
            content=content,
        )
        # The blob is read and synced before the answer.
        size_bytes = 0 if blob is None else blob.size_bytes
        timeout_s = transfer_timeout_s(size_bytes, self.timeout_ms)
        await self._stub.Contribute(request, timeout=timeout_s, metadata=self._metadata)

    async def close(self) -> None:
        """Close the channel; calls and bulk under way break."""
        await self.bulk.close()
        await self._channel.close()


def version_message() -> node_pb2.Version:
    """The protocol and the software of this node."""
    return node_pb2.Version(protocol=PROTOCOL, software=SOFTWARE)


def reject_other_version(theirs: node_pb2.Version) -> None:
    """Reject a coordinator of another protocol.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    who = f"the coordinator ({theirs.software})"
    refuse_other_protocol(theirs.protocol, who, there="where the coordinator runs", here="here")


def capabilities_message(
    capabilities: WorkerCapabilities, name: str, caps: node_pb2.Caps
) -> node_pb2.Capabilities:
    """The worker's capabilities, and what the owner named and limited."""
    return node_pb2.Capabilities(
        device=capabilities.device,
        device_name=capabilities.device_name,
        memory_bytes=capabilities.memory_bytes,
        worker=capabilities.kind,
        workloads=[
            node_pb2.WorkloadVersion(name=workload, version=number)
            for workload, number in sorted(capabilities.workloads.items())
        ],
        name=name,
        caps=caps,
        torch=capabilities.torch,
        lacking_operators=capabilities.lacking_operators,
        optimizers=capabilities.optimizers,
        holds_experts=True,
    )


def hello_message(
    capabilities: node_pb2.Capabilities,
    working: Iterable[Lease],
    receipts: Iterable[tuple[JobId, SignedReceipt]],
) -> node_pb2.Hello:
    """The greeting, with the newest receipt of each job."""
    return node_pb2.Hello(
        version=version_message(),
        capabilities=capabilities,
        working=[lease_message(lease) for lease in working],
        newest_receipts=[
            receipt_pb2.NewestReceipt(job_id=job_id, receipt=receipt_message(signed_receipt))
            for job_id, signed_receipt in receipts
        ],
        signs_results=True,
        signs_counts=True,
        queues_work=True,
    )


def event_in(message: node_pb2.ControlResponse, at_ms: Milliseconds) -> NodeEvent | None:
    """The event that a message of the coordinator is; None for other messages."""
    match message.WhichOneof("message"):
        case "cancel":
            lease, reason = lease_value(message.cancel.lease), message.cancel.reason
            return ShardCancelled(at_ms=at_ms, lease=lease, reason=reason)
        case "release":
            job_id, reason = JobId(message.release.job_id), message.release.reason
            return JobReleased(at_ms=at_ms, job_id=job_id, reason=reason)
        case "drain":
            reason = message.drain.reason or "the coordinator asked it to leave"
            return DrainRequested(at_ms=at_ms, reason=reason)
        case _:
            return None


def command_message(command: NodeCommand) -> node_pb2.ControlRequest | None:
    """The message that a command is; None for other commands."""
    match command:
        case HandBack(lease=lease, reason=reason, cause=cause):
            back = hand_back_message(lease_message(lease), reason, cause)
            return node_pb2.ControlRequest(hand_back=back)
        case AnnounceDraining(reason=reason):
            return node_pb2.ControlRequest(draining=node_pb2.Draining(reason=reason))
        case _:
            return None


def progress_message(progress: ShardProgress) -> node_pb2.ControlRequest:
    """Progress of a training."""
    message = node_pb2.Progress(
        lease=lease_message(progress.lease),
        steps_done=progress.steps_done,
        steps_total=progress.steps_total,
        loss=progress.loss,
        phase=node_pb2.WORK_PHASE_TRAIN,
    )
    return node_pb2.ControlRequest(progress=message)


def phase_message(work: Transferring | Computing, phase: WorkPhase) -> node_pb2.ControlRequest:
    """A phase of the work at hand that begins. Only trainings have steps."""
    assignment, update = work.assignment, work.update if isinstance(work, Uploading) else None
    steps = assignment.task.inner_steps if isinstance(assignment, Assignment) else 0
    loss = update.loss_last if update else None
    message = node_pb2.Progress(
        lease=lease_message(assignment.lease),
        steps_done=steps if update else 0,
        steps_total=steps,
        loss=math.nan if loss is None else loss,
        phase=phase_number(phase),
    )
    return node_pb2.ControlRequest(progress=message)


class ReceivedTicket(NamedTuple):
    """A ticket to fetch a blob."""

    message: tensor_pb2.Ticket = tensor_pb2.Ticket()
    renew_at_s: float = 0.0
    """Time of the event loop from which another one is asked for."""

    @classmethod
    def now(cls, message: tensor_pb2.Ticket) -> Self:
        """A ticket that has just come."""
        return cls(message, asyncio.get_running_loop().time() + message.life_ms / 2000)

    def range_at(self, offset: int) -> tensor_pb2.TicketRange:
        """The range that holds a byte."""
        for each in self.message.ranges:
            if each.start <= offset < each.end:
                return each
        raise HyperGPUError(Reason.CALL_BROKEN, f"the ticket covers no byte {offset}")


class DeliveredModel(NamedTuple):
    """How an assignment brings what the node lacks of the model."""

    ticket: ReceivedTicket = ReceivedTicket()
    content: bytes = b""
    """The blob itself, unchecked; empty: it has to be fetched."""


def update_offer(
    lease: Lease,
    update: TrainedUpdate,
    *,
    epoch: int,
    nonce: int,
    signature: bytes,
    phases: PhaseDurations | None = None,
) -> node_pb2.OfferUpdateRequest:
    """The offer of an update."""
    return node_pb2.OfferUpdateRequest(
        lease=lease_message(lease),
        digest=digest_message(update.digest),
        size_bytes=update.size_bytes,
        nonce=nonce,
        signature=signature,
        epoch=epoch,
        report=node_pb2.TrainingReport(
            inner_steps=update.inner_steps,
            samples=update.samples,
            compute_ms=update.compute_ms,
            loss_first=math.nan if update.loss_first is None else update.loss_first,
            loss_last=math.nan if update.loss_last is None else update.loss_last,
            phases=None if phases is None else phases_message(phases),
            data_samples=update.data_samples,
            memory_before_bytes=update.memory_before_bytes,
            memory_peak_bytes=update.memory_peak_bytes,
        ),
    )


ROUND_TRIPS_MAX = 32
TRAINS_MAX = 8
TRANSFERS_MAX = 16
_NEWEST_ROUND_TRIPS = 10
"""The least of these round trips is that of the line without queues."""


class Measurements:
    """Filled by each measurement, emptied by each report."""

    def __init__(self, on_transfer: Callable[[], None] = lambda: None) -> None:
        """``on_transfer`` is called after each transfer."""
        self._on_transfer = on_transfer
        self._round_trips: deque[int] = deque(maxlen=ROUND_TRIPS_MAX)
        self._newest: deque[int] = deque(maxlen=_NEWEST_ROUND_TRIPS)
        self._trains: deque[measurement_pb2.ProbeTrain] = deque(maxlen=TRAINS_MAX)
        self._transfers: deque[measurement_pb2.MeasuredTransfer] = deque(maxlen=TRANSFERS_MAX)
        self._goodput: dict[int, float] = {}

    @property
    def least_round_trip_us(self) -> Microseconds:
        """Least of the newest round trips; 0: none is known."""
        return Microseconds(min(self._newest, default=0))

    @property
    def longest_round_trip_us(self) -> Microseconds:
        """Longest of the newest round trips; 0: none is known."""
        return Microseconds(max(self._newest, default=0))

    @property
    def has_transfers(self) -> bool:
        """Whether a transfer waits to be reported."""
        return bool(self._transfers)

    def add_round_trip(self, took_us: int) -> None:
        """Add the time that an echo took."""
        self._round_trips.append(max(1, took_us))
        self._newest.append(max(1, took_us))

    def add_train(self, train: measurement_pb2.ProbeTrain) -> None:
        """Add a counted train of packets."""
        self._trains.append(train)

    def goodput_bits_per_s(self, direction: measurement_pb2.Direction.ValueType) -> float | None:
        """Goodput of the newest transfer in a direction; None: there was none."""
        return self._goodput.get(direction)

    def add_transfer(self, transfer: measurement_pb2.MeasuredTransfer) -> None:
        """Add bytes that got through."""
        self._goodput[transfer.direction] = transfer.size_bytes * 8e6 / max(1, transfer.took_us)
        self._transfers.append(transfer)
        self._on_transfer()

    def take_report(
        self, *, congestion_control: str, is_probing_blocked: bool
    ) -> measurement_pb2.Measured:
        """The next report; its measurements are forgotten here."""
        report = measurement_pb2.Measured(
            round_trips_us=self._round_trips,
            trains=self._trains,
            transfers=self._transfers,
            congestion_control=congestion_control,
            is_probing_blocked=is_probing_blocked,
        )
        for series in (self._round_trips, self._trains, self._transfers):
            series.clear()
        return report


class TransferTimer:
    """Times one transfer, over one connection or several at once. Starts when it is made."""

    def __init__(
        self,
        measurements: Measurements,
        direction: measurement_pb2.Direction.ValueType,
        *,
        connections: int = 1,
    ) -> None:
        self._measurements = measurements
        self._direction = direction
        self._connections = connections
        self._meter = GoodputMeter()
        self._start_us = self._last_us = _now_us()
        self._bytes = 0

    def add_bytes(self, size_bytes: int, *, connection: int = 0) -> None:
        """Add bytes that arrived, here or as the other side confirms."""
        self._last_us = _now_us()
        self._meter.add_piece(connection, size_bytes, self._last_us)
        self._bytes += size_bytes

    def stop(self) -> None:
        """Add the transfer to the measurements, if it was large enough to measure a line."""
        took_us = self._last_us - self._start_us
        waited_us = self._measurements.least_round_trip_us
        transfer = self._meter.transfer() or moved_whole(self._bytes, took_us, waited_us)
        if transfer is not None:
            self._measurements.add_transfer(self._message(transfer))

    def _message(self, measured: TransferredBytes) -> measurement_pb2.MeasuredTransfer:
        return measurement_pb2.MeasuredTransfer(
            direction=self._direction,
            size_bytes=Bytes(measured.size_bytes),
            took_us=measured.took_us,
            connections=self._connections,
        )


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
