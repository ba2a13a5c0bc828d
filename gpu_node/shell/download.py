"""One blob from the coordinator's store: its missing ranges, over several connections at once. Its
digest has the last word.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import aiohttp
import structlog

from gpu_node.shell.bulk import BulkBrokenError
from gpu_node.shell.cache import BlobCache
from gpu_node.shell.calls import Calls, Measurements, TransferTimer
from gpu_node.shell.control import gather_or_cancel
from gpu_node.shell.part_file import PartFile, Span
from hypergpu.crypto import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements import BlobRef
from hypergpu.streams import PIECE_BYTES, STRIPE_BYTES_MIN, StallTimeout, transfer_timeout_s
from hypergpu.v1 import node_pb2, tensor_pb2

log = structlog.get_logger()

RANGE_BYTES_MAX = 4 << 20
"""Over several connections; one fetches all that is missing in a row at once."""
_BATCH_BYTES = 1 << 20
"""Written per hop to a thread; also what a kill may cost each connection."""
_BATCH_S = 1.0
"""Time after which less is written too: over a slow line a batch takes long."""


class BlobSource(NamedTuple):
    """Where blobs come from, and over how many connections."""

    calls: Calls
    connections: int = 1


class _Ticket(NamedTuple):
    message: tensor_pb2.Ticket
    renew_at_s: float

    def range_at(self, offset: int) -> tensor_pb2.TicketRange:
        """The range that holds a byte."""
        for each in self.message.ranges:
            if each.start <= offset < each.end:
                return each
        raise HyperGPUError(Reason.CALL_BROKEN, f"the ticket covers no byte {offset}")


async def _resolve(calls: Calls, digest: Digest) -> tuple[_Ticket, int]:
    """A fresh ticket for a blob, and the blob's size."""
    answer = await calls.resolve_blob(digest)
    renew_at_s = asyncio.get_running_loop().time() + answer.ticket.life_ms / 2000
    return _Ticket(answer.ticket, renew_at_s), answer.size_bytes


async def limit_stalls(
    incoming: aiohttp.StreamReader, stall_timeout: StallTimeout, left_bytes: int
) -> AsyncGenerator[bytes]:
    """What comes, as it comes, up to so many bytes.

    Raises:
        TimeoutError: Nothing came in time.
        BulkBrokenError: It ended before.
    """
    loop = asyncio.get_running_loop()
    while left_bytes > 0:
        asked_s = loop.time()
        async with asyncio.timeout(stall_timeout.limit_s(left_bytes)):
            piece = await incoming.readany()
        if not piece:
            raise BulkBrokenError(f"{left_bytes} bytes are missing at the end")
        stall_timeout.note_piece(loop.time() - asked_s)
        left_bytes -= len(piece)
        yield piece


class _RangeUnderWay:
    """A range, and how far the connection that is farthest has come."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.offset = span.start
        self.connections = 0
        """Connections that were ever told to fetch it."""
        self._attempts: list[asyncio.Timeout] = []
        """Time limits of those that still do."""

    @property
    def left_bytes(self) -> int:
        """Bytes that nobody has yet."""
        return self.span.end - self.offset

    @asynccontextmanager
    async def attempt(self, timeout_s: float) -> AsyncIterator[None]:
        """One connection's time with the range, which ends when another one has brought it.

        Raises:
            TimeoutError: The time is over, or another one was first.
        """
        async with asyncio.timeout(timeout_s) as limit:
            self._attempts.append(limit)
            try:
                yield
            finally:
                self._attempts.remove(limit)
        for other in self._attempts:
            if not other.expired():
                other.reschedule(asyncio.get_running_loop().time())


class _RangeFetch:
    """Hands the missing ranges of one blob to connections, and the last ones twice."""

    def __init__(
        self, source: BlobSource, blob: BlobRef, part: PartFile, on_bytes: Callable[[int], None]
    ) -> None:
        self._calls = source.calls
        self._blob = blob
        self._part = part
        self._on_bytes = on_bytes
        missing = part.missing()
        left_bytes = sum(span.end - span.start for span in missing)
        self.connections = max(1, min(source.connections, left_bytes // STRIPE_BYTES_MIN))
        self._ranges = [_RangeUnderWay(span) for span in self._cut(missing, left_bytes)]
        self._next = 0
        self._ticket = _Ticket(tensor_pb2.Ticket(), 0.0)

    def _cut(self, missing: list[Span], left_bytes: int) -> list[Span]:
        if self.connections == 1:
            return missing
        each = -(-left_bytes // self.connections)
        step = min(RANGE_BYTES_MAX, max(STRIPE_BYTES_MIN, each))
        return [
            Span(start, min(start + step, span.end))
            for span in missing
            for start in range(span.start, span.end, step)
        ]

    async def run(self, timer: TransferTimer) -> None:
        """Fetch all of them. A connection that breaks ends the others too; what came is written."""
        if self._ranges:
            await self._renew_ticket()
            lanes = range(self.connections)
            await gather_or_cancel([self._serve(timer.for_connection(lane)) for lane in lanes])

    async def _serve(self, on_arrived: Callable[[int], None]) -> None:
        """Fetch range after range over one connection."""
        timeout_ms = self._calls.timeout_ms
        stall = StallTimeout(PIECE_BYTES, timeout_ms, connections=self.connections)
        while (chosen := self._take()) is not None:
            left_bytes, is_first = chosen.left_bytes, chosen.connections == 0
            chosen.connections += 1
            timeout_s = transfer_timeout_s(left_bytes, timeout_ms, connections=self.connections)
            try:
                async with chosen.attempt(timeout_s):
                    await self._fetch(chosen, stall, on_arrived)
            except (TimeoutError, BulkBrokenError):
                # The other connection of the two may have been first, or may yet be.
                if chosen.left_bytes and is_first:
                    raise

    def _take(self) -> _RangeUnderWay | None:
        """The next range; without one the range that is least far, which is asked for again."""
        if self._next < len(self._ranges):
            self._next += 1
            return self._ranges[self._next - 1]
        slow = [each for each in self._ranges if each.left_bytes and each.connections < 2]
        return max(slow, key=lambda each: each.left_bytes, default=None)

    async def _fetch(
        self, chosen: _RangeUnderWay, stall: StallTimeout, on_arrived: Callable[[int], None]
    ) -> None:
        start, end = chosen.offset, chosen.span.end
        if asyncio.get_running_loop().time() >= self._ticket.renew_at_s:
            await self._renew_ticket()
        ranged = self._ticket.range_at(start)
        batch = _Batch(self._part, start)
        opening = self._calls.bulk.open(ranged, start, end)
        try:
            async with (
                asyncio.timeout(stall.limit_s(end - start)) as answering,
                opening as incoming,
            ):
                answering.reschedule(None)
                async for piece in limit_stalls(incoming, stall, end - start):
                    batch.content += piece
                    fresh = max(0, batch.end - chosen.offset)
                    chosen.offset += fresh
                    on_arrived(fresh)
                    self._on_bytes(fresh)
                    await batch.write_if_due()
        finally:
            batch.write()

    async def _renew_ticket(self) -> None:
        self._ticket, size_bytes = await _resolve(self._calls, self._blob.digest)
        if size_bytes != self._blob.size_bytes:
            detail = f"{self._blob.digest} has {self._blob.size_bytes} bytes, not {size_bytes}"
            raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)


class _Batch:
    """Bytes in a row that came and are not written yet."""

    def __init__(self, part: PartFile, start: int) -> None:
        self.content = bytearray()
        self._part = part
        self._start = start
        self._since_s = asyncio.get_running_loop().time()

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self._start + len(self.content)

    async def write_if_due(self) -> None:
        """Write in a thread, if that is worth it."""
        now_s = asyncio.get_running_loop().time()
        if len(self.content) < _BATCH_BYTES and now_s - self._since_s < _BATCH_S:
            return
        start, content = self._start, self.content
        self._start, self.content, self._since_s = self.end, bytearray(), now_s
        await asyncio.to_thread(self._part.write, start, content)

    def write(self) -> None:
        """Write the rest, also when the connection broke: its bytes need not come again."""
        self._part.write(self._start, self.content)
        self._start, self.content = self.end, bytearray()


class Download:
    """Fetches blobs into the cache, each digest once at a time.

    Raises `grpc.aio.AioRpcError` and `BulkBrokenError` when the link breaks, `TimeoutError` when
    nothing comes, and `HyperGPUError` for what is unknown or is not what its digest says.
    """

    def __init__(self, cache: BlobCache, measurements: Measurements | None = None) -> None:
        self._cache = cache
        self._measurements = measurements or Measurements()
        # A lock lives as long as somebody waits for it or has it.
        self._locks: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()
        self.received_bytes = 0
        """All bytes received so far, by which a caller sees whether an attempt progressed."""

    async def fetch(self, source: BlobSource, blob: BlobRef) -> Path:
        """A blob's file, from the cache or from the coordinator."""
        lock = self._locks.setdefault(blob.digest, asyncio.Lock())
        async with lock:
            cached = await self._cache.find(blob)
            return cached if cached is not None else await self._fetch(source, blob)

    async def fetch_small(self, source: BlobSource, digest: Digest, limit_bytes: int) -> bytes:
        """A small blob of unknown size, whole."""
        ticket, size_bytes = await _resolve(source.calls, digest)
        content = bytearray()
        if 0 < size_bytes <= limit_bytes:
            timeout_ms = source.calls.timeout_ms
            stall = StallTimeout(PIECE_BYTES, timeout_ms)
            opening = source.calls.bulk.open(ticket.range_at(0), 0, size_bytes)
            async with asyncio.timeout(transfer_timeout_s(size_bytes, timeout_ms)):
                async with opening as incoming:
                    async for piece in limit_stalls(incoming, stall, size_bytes):
                        content += piece
        if digest_of(content) != digest:
            raise HyperGPUError(Reason.DIGEST_MISMATCH, f"{digest} came as something else")
        return bytes(content)

    async def _fetch(self, source: BlobSource, blob: BlobRef) -> Path:
        part = self._cache.part(blob.digest)
        was_resumed = part.exists()
        if await self._receive(source, blob, part) == blob.digest:
            return self._cache.admit(part, blob.digest)
        part.unlink()
        if was_resumed:
            log.warning("a partial download was damaged: starting over", digest=blob.digest)
            if await self._receive(source, blob, part) == blob.digest:
                return self._cache.admit(part, blob.digest)
            part.unlink()
        raise HyperGPUError(Reason.DIGEST_MISMATCH, f"{blob.digest} came as something else")

    async def _receive(self, source: BlobSource, blob: BlobRef, path: Path) -> Digest:
        """Fetch the missing bytes of a part file; gives the digest of the whole file."""
        self._cache.reuse(path, blob.size_bytes)
        part = PartFile(path, blob.size_bytes)
        try:
            fetch = _RangeFetch(source, blob, part, self._count)
            count = fetch.connections
            timer = TransferTimer(self._measurements, node_pb2.DIRECTION_DOWN, connections=count)
            try:
                await fetch.run(timer)
            finally:
                timer.stop()
            return await asyncio.to_thread(part.finish)
        finally:
            part.close()

    def _count(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes
