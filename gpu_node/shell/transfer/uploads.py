"""Sends updates: by requests that each bear the signed offer, of which the last one is answered
once the update is accepted; to an object store by tickets, between offer and commit.

Each attempt's offer is signed and has a nonce of its own. Where the epoch has closed that it is
signed for, it is signed again for the one that is open.
"""

import asyncio
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from gpu_node.core.commands import SendUpdate
from gpu_node.core.events import TrainedUpdate
from gpu_node.core.phases import PhaseClock
from gpu_node.shell.folder.receipts import ReceiptKeeper
from gpu_node.shell.folder.state import NonceCounter, StatePaths
from gpu_node.shell.link.calls import Calls, Measurements, TransferTimer, update_offer
from gpu_node.shell.transfer.ranges import RangeQueue, RangeUnderWay
from gpu_node.shell.transfer.results import ResultSigning
from gpu_node.shell.transfer.update_statement import contribution
from hypergpu.assignment import LEASE_ROUNDS_MOST, Assignment, Lease
from hypergpu.clock import monotonic_ms
from hypergpu.crypto import IdentityKey, sign
from hypergpu.digests import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger_terms import separator_of
from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import Span
from hypergpu.v1 import measurement_pb2, node_pb2, tensor_pb2
from hypergpu.wire.bulk_ranges import BulkBrokenError, FileRange
from hypergpu.wire.update_requests import UpdateAnswer

_IN_FLIGHT_BYTES = 4 << 20
"""Bytes that the transport may have taken without any of them having arrived."""
_OVERTAKEN = frozenset({Reason.OFFSET_MISMATCH, Reason.NONCE_REPLAYED})
"""Refusals of a range whose upload has ended meanwhile: it is asked for."""


class Uploader:
    """Sends updates and remembers how far each got."""

    def __init__(
        self,
        paths: StatePaths,
        identity: IdentityKey,
        measurements: Measurements | None = None,
        receipts: ReceiptKeeper | None = None,
        phases: PhaseClock | None = None,
    ) -> None:
        self._paths = paths
        self._phases = phases or PhaseClock()
        self._receipts = receipts or ReceiptKeeper(paths, identity.node_id)
        self._measurements = measurements or Measurements()
        self._identity = identity
        self.result_signing = ResultSigning(identity, self._receipts)
        self._nonces = NonceCounter(paths)
        self._committed: tuple[Lease, int] | None = None
        """Bytes that the coordinator said to hold of an update."""
        self._later_epoch: tuple[Lease, int] | None = None
        """The epoch that work is signed for, where the one that it was given out in is closed."""
        self._begun: Lease | None = None
        """Lease of the update that was begun last."""
        self._sent_bytes = 0
        self._gained_bytes = 0

    @property
    def has_progressed(self) -> bool:
        """Whether the last attempts moved bytes that need not be sent again."""
        return self._sent_bytes > _IN_FLIGHT_BYTES or self._gained_bytes > 0

    @property
    def moved_bytes(self) -> int:
        """Bytes of the update under way that were sent, in earlier attempts too."""
        committed_bytes = self._committed[1] if self._committed else 0
        return committed_bytes + self._sent_bytes

    async def send(self, calls: Calls, assignment: Assignment, update: TrainedUpdate) -> None:
        """Send the bytes that the coordinator lacks; the update is accepted when this returns.

        Raises:
            grpc.aio.AioRpcError: A call broke or was rejected.
            BulkBrokenError: The bytes broke off.
            TimeoutError: They got nowhere.
            HyperGPUError: FILE_UNUSABLE when the update is damaged on this disk.
        """
        self._sent_bytes = self._gained_bytes = 0
        path = self._paths.update(assignment.lease.job_id, assignment.lease.round)
        check_size(path, update)
        await asyncio.to_thread(self._receipts.agree, assignment.lease.job_id, assignment.terms)
        command = SendUpdate(assignment, update)
        if calls.bulk_port:
            await self._send_requests(calls, command, path)
        else:
            await self._send_by_tickets(calls, command, path)
        await self._count_accepted(assignment)

    async def _send_requests(self, calls: Calls, command: SendUpdate, path: Path) -> None:
        """Send an update in requests that bear its offer, of which the last one is the commit."""
        lease, update = command.assignment.lease, command.update
        requests = UpdateSending(self, calls, command, path)
        # What an earlier attempt or daemon began is asked for; an asking request may commit it.
        is_begun = self._begun == lease or not self._phases.has_trained(lease)
        self._begun = lease
        missing_spans: Sequence[Span] = (Span(0, update.size_bytes),)
        if is_begun:
            missing_spans = await requests.ask()
            if requests.is_accepted:
                return
        queue = RangeQueue.cut(missing_spans, command.assignment.connections, calls.timeout_ms)
        self._note_committed(lease, update.size_bytes - queue.left_bytes)
        timer = self._timer(queue.connections)
        requests.connections = queue.connections
        await queue.run(requests.move)
        timer.add_bytes(queue.left_bytes)
        timer.stop()
        if not requests.is_accepted:
            raise BulkBrokenError("bytes of the update are missing, though all were sent")

    async def _send_by_tickets(self, calls: Calls, command: SendUpdate, path: Path) -> None:
        """Offer an update, send what is missing to an object store, and commit it."""
        assignment, update = command.assignment, command.update
        offer = await self.offer(calls, assignment, update)
        if offer.is_accepted:
            return
        missing_spans = [Span(each.start, each.end) for each in offer.ticket.ranges]
        is_whole = any(each.is_whole for each in offer.ticket.ranges)
        queue = RangeQueue.whole if is_whole else RangeQueue.cut
        ranges = queue(missing_spans, assignment.connections, calls.timeout_ms)
        self._note_committed(assignment.lease, update.size_bytes - ranges.left_bytes)
        timer = self._timer(ranges.connections)
        sender = _Sending(self, calls, command, path, ranges.connections)
        sender.take(offer.ticket)
        await ranges.run(sender.move)
        timer.add_bytes(ranges.left_bytes)
        timer.stop()
        await calls.commit_update(assignment.lease, update.digest, update.size_bytes)

    async def offer(
        self, calls: Calls, assignment: Assignment, update: TrainedUpdate
    ) -> node_pb2.OfferUpdateResponse:
        """Offer an update under a fresh nonce, and again where another epoch is open.

        Raises:
            HyperGPUError: REQUEST_INVALID, the coordinator names an epoch that the work cannot be
                billed in.
        """
        while True:
            request = await self.fresh_offer(assignment, update)
            answer = await calls.offer_update(request)
            if not answer.HasField("open_epoch"):
                return answer
            self.take_epoch(assignment, request.epoch, answer.open_epoch)

    async def fresh_offer(
        self, assignment: Assignment, update: TrainedUpdate
    ) -> node_pb2.OfferUpdateRequest:
        """An offer under a fresh nonce, signed for the epoch that is open as far as is known."""
        work = replace(assignment, epoch=self._epoch(assignment))
        nonce = await asyncio.to_thread(self._nonces.take)
        return self._signed_offer(work, update, nonce)

    def take_epoch(self, assignment: Assignment, signed: int, asked: int) -> None:
        """Sign the work for another epoch from now on.

        Raises:
            HyperGPUError: REQUEST_INVALID, the work cannot be billed in it.
        """
        # Terms and task stay those of the assignment: nothing but the epoch is taken over.
        check_epoch(assignment, signed, asked)
        self._later_epoch = (assignment.lease, asked)

    def _epoch(self, assignment: Assignment) -> int:
        """The epoch to sign for."""
        if self._later_epoch is not None and self._later_epoch[0] == assignment.lease:
            return self._later_epoch[1]
        return assignment.epoch

    def count_sent(self, size_bytes: int) -> None:
        """Count bytes that the transport took."""
        self._sent_bytes += size_bytes

    def _note_committed(self, lease: Lease, committed_bytes: int) -> None:
        if self._committed is not None and self._committed[0] == lease:
            self._gained_bytes = committed_bytes - self._committed[1]
        self._committed = (lease, committed_bytes)

    def _timer(self, connections: int) -> TransferTimer:
        return TransferTimer(
            self._measurements, measurement_pb2.DIRECTION_UP, connections=connections
        )

    async def _count_accepted(self, assignment: Assignment) -> None:
        """Count the accepted update for the node's own records."""
        count, round_number = self._receipts.count_accepted, assignment.lease.round
        await asyncio.to_thread(count, assignment.terms, round_number, assignment.task.samples)

    def _signed_offer(
        self, assignment: Assignment, update: TrainedUpdate, nonce: int
    ) -> node_pb2.OfferUpdateRequest:
        statement = contribution(self._identity.node_id, assignment, update, nonce)
        separator = separator_of(assignment.terms.domain)
        signature = sign(self._identity, separator, statement)
        lease = assignment.lease
        phases = self._phases.durations(lease, monotonic_ms())
        return update_offer(
            lease,
            update,
            epoch=assignment.epoch,
            nonce=nonce,
            signature=signature,
            phases=phases,
        )

    async def check_undamaged(self, lease: Lease, update: TrainedUpdate) -> None:
        """Check an update in which the coordinator found another digest than its own.

        Raises:
            HyperGPUError: FILE_UNUSABLE, it is damaged on this disk.
        """
        path = self._paths.update(lease.job_id, lease.round)
        if await asyncio.to_thread(digest_of_file, path) != update.digest:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is damaged on this node's disk")


class UpdateSending:
    """Requests of one attempt to send an update, which bear the same offer over any connections."""

    def __init__(self, uploader: Uploader, calls: Calls, command: SendUpdate, path: Path) -> None:
        self._uploader = uploader
        self._calls = calls
        self._command = command
        self._path = path
        self._signing = asyncio.Lock()
        self._offer: node_pb2.OfferUpdateRequest | None = None
        self.connections = 1
        self.is_accepted = False
        """Whether an answer said that the update is accepted and durable."""

    async def ask(self) -> Sequence[Span]:
        """The ranges of the update that are missing; none where it is accepted."""
        answer = await self._send(None, lambda _: None)
        return answer.missing

    async def move(self, chosen: RangeUnderWay, _connection: int) -> None:
        """Send a range, whole: how much of it has come is not known before its answer."""

        def count(size_bytes: int) -> None:
            chosen.handed_bytes += size_bytes
            self._uploader.count_sent(size_bytes)

        try:
            await self._send(FileRange(self._path, chosen.span), count)
        except HyperGPUError as error:
            if error.reason not in _OVERTAKEN:
                raise
            # Another connection may have brought the range, and with it the end of the upload.
            raise BulkBrokenError(f"{error.reason.name}: {error.detail}") from error
        chosen.offset = chosen.span.end

    async def _send(self, source: FileRange | None, on_sent: Callable[[int], None]) -> UpdateAnswer:
        while True:
            offer = await self._signed_offer()
            stall = StallTimeout(PIECE_BYTES, self._calls.timeout_ms, connections=self.connections)
            answer = await self._calls.send_update(
                offer.SerializeToString(), source, stall, on_sent
            )
            if answer.open_epoch is None:
                self.is_accepted = self.is_accepted or answer.is_accepted
                return answer
            if offer is self._offer:
                # Other connections were told as well, and take the new offer.
                assignment = self._command.assignment
                self._uploader.take_epoch(assignment, offer.epoch, answer.open_epoch)
                self._offer = None

    async def _signed_offer(self) -> node_pb2.OfferUpdateRequest:
        async with self._signing:
            if self._offer is None:
                work = self._command
                self._offer = await self._uploader.fresh_offer(work.assignment, work.update)
            return self._offer


class _Sending:
    """The ranges of one update on their way; its ticket is renewed by offering it again."""

    def __init__(
        self,
        uploader: Uploader,
        calls: Calls,
        command: SendUpdate,
        path: Path,
        connections: int,
    ) -> None:
        self._uploader = uploader
        self._calls = calls
        self._command = command
        self._path = path
        self._connections = connections
        self._renewing = asyncio.Lock()
        self._ticket = tensor_pb2.Ticket()
        self._renew_at_s = 0.0

    def take(self, ticket: tensor_pb2.Ticket) -> None:
        """Send with this ticket from now on."""
        self._ticket = ticket
        self._renew_at_s = asyncio.get_running_loop().time() + ticket.life_ms / 2000

    async def move(self, chosen: RangeUnderWay, _connection: int) -> None:
        """Send a range, whole: how much of it has come is not known before its answer."""
        ticket_range = await self._range_in(chosen.span)
        if ticket_range is None:
            chosen.offset = chosen.span.end
            return
        stall = StallTimeout(PIECE_BYTES, self._calls.timeout_ms, connections=self._connections)

        def count(size_bytes: int) -> None:
            chosen.handed_bytes += size_bytes
            self._uploader.count_sent(size_bytes)

        await self._calls.bulk.send(ticket_range, FileRange(self._path, chosen.span), stall, count)
        chosen.offset = chosen.span.end

    async def _range_in(self, span: Span) -> tensor_pb2.TicketRange | None:
        """What a fresh ticket says is missing of a range; None when all of it has come."""
        async with self._renewing:
            if asyncio.get_running_loop().time() >= self._renew_at_s:
                work = self._command
                offer = await self._uploader.offer(self._calls, work.assignment, work.update)
                self.take(offer.ticket)
        missing_ranges = self._ticket.ranges
        return next((e for e in missing_ranges if e.start < span.end and e.end > span.start), None)


def check_epoch(assignment: Assignment, signed: int, asked: int) -> None:
    """Check an epoch that the coordinator wants work to be signed for, in place of ``signed``.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is not later, or no round of the lease can be in it.
    """
    # An epoch has a round or more.
    last = assignment.epoch + LEASE_ROUNDS_MOST
    if not signed < asked <= last:
        detail = (
            f"the coordinator wants work of epoch {assignment.epoch} signed for epoch {asked}:"
            f" it can be of {signed + 1} to {last}"
        )
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)


def check_size(path: Path, update: TrainedUpdate) -> None:
    """Check that an update lies where the worker was to write it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it does not, or is no file, or has another size.
    """
    try:
        file_stat = path.lstat()
    except OSError as error:
        detail = f"the update {path}: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    if not stat.S_ISREG(file_stat.st_mode):
        # The worker writes it, and might point it at another file of this node.
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"the update {path} is no file")
    size_bytes = file_stat.st_size
    if size_bytes != update.size_bytes:
        detail = f"the update {path} has {size_bytes} bytes, not {update.size_bytes}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)
