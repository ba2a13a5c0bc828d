"""One update to the coordinator: signed, with a nonce of its own, from where the last try ended.

Over several connections it goes as a stripe on each, all under one nonce.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

from gpu_node.core.update import Update
from gpu_node.shell.link.bulk import CHUNK_BYTES, encode_submitted
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.probe.findings import Direction, Findings
from gpu_node.shell.probe.stopwatch import Stopwatch
from gpu_node.shell.state.files import Nonces
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.receipts import ReceiptKeeper
from gpu_node.shell.translate import contribution, update_header
from hypergpu.digest import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys.signature import IdentityKey
from hypergpu.statements.assignment import Assignment, Lease
from hypergpu.statements.domain import separator_of
from hypergpu.statements.signing import sign
from hypergpu.v1 import node_pb2
from hypergpu.wire.bulk import PIECE_BYTES, Stripe, most_stripes, transfer_timeout_s

_READ_BYTES = 4 * CHUNK_BYTES
_IN_FLIGHT_BYTES = 4 << 20
"""What the transport may have taken without any of it having arrived."""
Answer = TypeVar("Answer")


class Uploader:
    """Sends updates and remembers how far each got."""

    def __init__(
        self,
        places: Places,
        identity: IdentityKey,
        findings: Findings | None = None,
        receipts: ReceiptKeeper | None = None,
    ) -> None:
        self._places = places
        self._receipts = receipts or ReceiptKeeper(places, identity.node_id)
        self._findings = findings or Findings()
        self._identity = identity
        self._nonces = Nonces(places)
        self._fresh: set[Lease] = set()
        self._committed: dict[Lease, int] = {}
        self._sent_bytes = 0
        self._gained_bytes = 0
        self._stopwatch: Stopwatch | None = None
        """Of the upload under way, once it was admitted."""

    def made(self, lease: Lease) -> None:
        """An update was just made: the coordinator cannot hold any of it."""
        self._fresh.add(lease)
        self._committed.clear()

    @property
    def has_progressed(self) -> bool:
        """Whether the last attempts moved bytes that need not be sent again."""
        return self._sent_bytes > _IN_FLIGHT_BYTES or self._gained_bytes > 0

    async def send(self, calls: Calls, assignment: Assignment, update: Update) -> None:
        """Send what the coordinator does not hold yet; it is accepted when this returns.

        Raises:
            grpc.aio.AioRpcError: The call broke or was refused.
            HyperGPUError: FILE_UNUSABLE when the update is damaged on this disk, CALL_BROKEN when
                the coordinator ended the call early.
        """
        lease = assignment.lease
        self._sent_bytes = self._gained_bytes = 0
        stripes = _cut_stripes(calls.lines, update.size_bytes)
        offsets = await self._offsets(calls, lease, update, stripes)
        if offsets is None:
            await self._count(assignment)
            return
        path = self._places.update(lease.job_id, lease.round)
        _refuse_other_size(path, update)
        nonce = await asyncio.to_thread(self._nonces.take)
        header = self._signed_header(assignment, update, nonce)
        await asyncio.to_thread(self._receipts.agree, lease.job_id, assignment.terms)
        self._stopwatch = None
        sending = [
            self._send(line, _stripe_header(header, stripe, offset), path)
            for line, stripe, offset in zip(calls.lines, stripes, offsets, strict=False)
        ]
        answers = await _all_done(sending)
        if not any(answer.is_accepted for answer in answers):
            arrived = min(answer.committed_offset for answer in answers)
            detail = f"not all of {update.size_bytes} bytes arrived: {arrived} in one stretch"
            raise HyperGPUError(Reason.CALL_BROKEN, detail)
        await self._count(assignment)
        if self._stopwatch is not None:
            # Only the answer tells that everything is there; what left earlier lay in buffers.
            committed = sum(
                offset - _start(stripe, update)
                for stripe, offset in zip(stripes, offsets, strict=True)
            )
            self._stopwatch.moved(update.size_bytes - committed)
            self._stopwatch.stop()

    async def _count(self, assignment: Assignment) -> None:
        """Count the accepted update for the node's own records."""
        samples = sum(run.count for run in assignment.task.ranges)
        count = self._receipts.count_accepted
        await asyncio.to_thread(count, assignment.terms, assignment.lease.round, samples)

    def _signed_header(
        self, assignment: Assignment, update: Update, nonce: int
    ) -> node_pb2.UpdateHeader:
        signed = contribution(self._identity.node_id, assignment, update, nonce)
        separator = separator_of(assignment.terms.domain)
        signature = sign(self._identity, separator, signed)
        return update_header(assignment.lease, update, nonce=nonce, signature=signature)

    async def _send(
        self, calls: Calls, header: node_pb2.UpdateHeader, path: Path
    ) -> node_pb2.SubmitUpdateResponse:
        """Send one stripe, or the whole, over one connection."""
        stripe = Stripe(header.stripe, max(1, header.stripes))
        end = stripe.end(header.size_bytes)
        timeout_s = transfer_timeout_s(
            end - header.offset, calls.timeout_ms, connections=stripe.count
        )
        messages = self._messages(header, path, end)
        return await calls.submit(messages, timeout_s, end - header.offset)

    async def refuse_damaged(self, lease: Lease, update: Update) -> None:
        """After the coordinator found another digest: refuse what is damaged on this side.

        Raises:
            HyperGPUError: FILE_UNUSABLE.
        """
        path = self._places.update(lease.job_id, lease.round)
        if await asyncio.to_thread(digest_of_file, path) != update.digest:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is damaged on this node's disk")

    async def _offsets(
        self, calls: Calls, lease: Lease, update: Update, stripes: tuple[Stripe, ...]
    ) -> list[int] | None:
        """Where to go on in each stripe; None when nothing is left to send."""
        starts = [_start(stripe, update) for stripe in stripes]
        if lease in self._fresh:
            self._fresh.discard(lease)
            return starts
        held = await _all_done(
            [calls.query_upload(lease, update.digest, stripe) for stripe in stripes]
        )
        if any(answer.is_accepted for answer in held):
            return None
        offsets = [
            max(start, min(answer.committed_offset, stripe.end(update.size_bytes)))
            for start, answer, stripe in zip(starts, held, stripes, strict=True)
        ]
        committed = sum(offsets) - sum(starts)
        self._gained_bytes = committed - self._committed.get(lease, 0)
        self._committed = {lease: committed}
        return offsets

    async def _messages(
        self, header: node_pb2.UpdateHeader, path: Path, end: int
    ) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        offset = header.offset
        chunk_bytes = PIECE_BYTES if header.stripes > 1 else CHUNK_BYTES
        # Read while the header is judged, and each next block while one is on its way.
        ahead = loop.run_in_executor(None, _block, path, offset, end)
        try:
            yield node_pb2.SubmitUpdateRequest(header=header).SerializeToString()
            if self._stopwatch is None:
                connections = max(1, header.stripes)
                self._stopwatch = Stopwatch(self._findings, Direction.UP, connections=connections)
            while block := await ahead:
                ahead = loop.run_in_executor(None, _block, path, offset + len(block), end)
                view = memoryview(block)
                for start in range(0, len(block), chunk_bytes):
                    piece = view[start : start + chunk_bytes]
                    yield encode_submitted(offset + start, piece)
                    self._sent_bytes += piece.nbytes
                offset += len(block)
        finally:
            # A call that ended early asks for no more; what a read found out then is of no use.
            ahead.add_done_callback(lambda done: done.cancelled() or done.exception())


def _refuse_other_size(path: Path, update: Update) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as broken:
        detail = f"the update {path}: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    if size_bytes != update.size_bytes:
        detail = f"the update {path} has {size_bytes} bytes, not {update.size_bytes}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)


def _block(path: Path, offset: int, end: int) -> bytes:
    """The next bytes, none at ``end``. Opened for each, no file is left behind by a dead call."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(max(0, min(_READ_BYTES, end - offset)))


def _cut_stripes(lines: tuple[Calls, ...], size_bytes: int) -> tuple[Stripe, ...]:
    """A stripe for each connection, as far as the update is large enough."""
    count = min(len(lines), most_stripes(size_bytes))
    return tuple(Stripe(index, count) for index in range(count))


def _start(stripe: Stripe, update: Update) -> int:
    return stripe.start(update.size_bytes)


def _stripe_header(
    header: node_pb2.UpdateHeader, stripe: Stripe, offset: int
) -> node_pb2.UpdateHeader:
    """The header with which one stripe begins. An update that is not cut names none."""
    headed = node_pb2.UpdateHeader()
    headed.CopyFrom(header)
    headed.offset = offset
    if stripe.count > 1:
        headed.stripe, headed.stripes = stripe.index, stripe.count
    return headed


async def _all_done(calls: Sequence[Awaitable[Answer]]) -> list[Answer]:
    """Every answer; the first failure ends the calls that are still under way."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
