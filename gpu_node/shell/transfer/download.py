"""One blob from the coordinator's store: its missing ranges, over several connections at once. Its
digest has the last word.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from gpu_node.shell.link.calls import (
    Calls,
    DeliveredModel,
    Measurements,
    ReceivedTicket,
    TransferTimer,
)
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.ranges import RangeQueue, RangeUnderWay
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.line_limits import PIECE_BYTES, StallTimeout, transfer_timeout_s
from hypergpu.part_file import DigestingPartFile, PartFile, Span
from hypergpu.v1 import measurement_pb2
from hypergpu.wire.bulk_ranges import BulkAbsentError

log = structlog.get_logger()

_BATCH_BYTES = 1 << 20
"""Written per hop to a thread; also what a kill may cost each connection."""
_ATTEMPTS = 2
"""Downloads of a blob, of which the first may go on where an earlier one ended."""
_BATCH_S = 1.0
"""Time after which less is written too: over a slow line a batch takes long."""


class BlobSource(NamedTuple):
    """Where blobs come from, and over how many connections."""

    calls: Calls
    connections: int = 1
    deliveries: Mapping[Digest, DeliveredModel] = MappingProxyType({})
    """Tickets that need not be asked for, and blobs that need not be fetched."""

    def delivery(self, digest: Digest) -> DeliveredModel:
        """What came of a blob without being asked for; an expired ticket where nothing did."""
        return self.deliveries.get(digest, DeliveredModel())


class _Tickets:
    """Asks for tickets, and says of which blobs an earlier one was no good."""

    def __init__(self) -> None:
        self._doubted: set[Digest] = set()

    def first_ticket(self, source: BlobSource, digest: Digest) -> ReceivedTicket:
        """The ticket that came without being asked for; an expired one where there is none."""
        return ReceivedTicket() if digest in self._doubted else source.delivery(digest).ticket

    async def resolve(self, calls: Calls, digest: Digest) -> tuple[ReceivedTicket, int]:
        """A fresh ticket for a blob, and the blob's size."""
        answer = await calls.resolve_blob(digest, is_doubted=digest in self._doubted)
        self._doubted.discard(digest)
        return ReceivedTicket.now(answer.ticket), answer.size_bytes

    @asynccontextmanager
    async def doubting(self, digest: Digest) -> AsyncIterator[None]:
        """Doubt the ticket by which a store does not give the blob."""
        try:
            yield
        except BulkAbsentError:
            self.doubt(digest)
            raise

    def doubt(self, digest: Digest) -> None:
        """Take note that a ticket led to something else, or to nothing."""
        self._doubted.add(digest)


class _RangeFetch:
    """Fetches the missing ranges of one blob."""

    def __init__(
        self,
        source: BlobSource,
        tickets: _Tickets,
        blob: BlobRef,
        part: PartFile,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._calls = source.calls
        self._tickets = tickets
        self._blob = blob
        self._part = part
        self._on_bytes = on_bytes
        self._ranges = RangeQueue.cut(part.missing(), source.connections, source.calls.timeout_ms)
        self.connections = self._ranges.connections
        self._stalls = [
            StallTimeout(PIECE_BYTES, self._calls.timeout_ms, connections=self.connections)
            for _ in range(self.connections)
        ]
        self._ticket = tickets.first_ticket(source, blob.digest)

    async def run(self, timer: TransferTimer) -> None:
        """Fetch all of them. A connection that breaks ends the others too; what came is written."""
        if self._ranges.left_bytes:
            await self._renew_ticket_if_due()
            await self._ranges.run(partial(self._fetch, timer))

    async def _fetch(self, timer: TransferTimer, chosen: RangeUnderWay, connection: int) -> None:
        start, end = chosen.offset, chosen.span.end
        await self._renew_ticket_if_due()
        ticket_range = self._ticket.range_at(start)
        batch, stall = _Batch(self._part, start), self._stalls[connection]
        response = self._calls.bulk.open(ticket_range, Span(start, end), stall)
        try:
            async with self._tickets.doubting(self._blob.digest), response as pieces:
                async for piece in pieces:
                    batch.add(piece)
                    fresh = max(0, batch.end - chosen.offset)
                    chosen.offset += fresh
                    timer.add_bytes(fresh, connection=connection)
                    self._on_bytes(fresh)
                    await batch.write_if_due()
        finally:
            batch.write()

    async def _renew_ticket_if_due(self) -> None:
        if asyncio.get_running_loop().time() < self._ticket.renew_at_s:
            return
        self._ticket, size_bytes = await self._tickets.resolve(self._calls, self._blob.digest)
        if size_bytes != self._blob.size_bytes:
            detail = f"{self._blob.digest} has {self._blob.size_bytes} bytes, not {size_bytes}"
            raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)


class _Batch:
    """Pieces in a row that came and are not written yet."""

    def __init__(self, part: PartFile, start: int) -> None:
        self.end = start
        """The byte after the last one."""
        self._part = part
        self._start = start
        self._pieces: list[bytes] = []
        self._since_s = asyncio.get_running_loop().time()

    def add(self, piece: bytes) -> None:
        """Add the next piece."""
        self._pieces.append(piece)
        self.end += len(piece)

    async def write_if_due(self) -> None:
        """Write in a thread, if that is worth it."""
        now_s = asyncio.get_running_loop().time()
        if self.end - self._start < _BATCH_BYTES and now_s - self._since_s < _BATCH_S:
            return
        start, pieces = self._start, self._pieces
        self._start, self._pieces, self._since_s = self.end, [], now_s
        await asyncio.to_thread(self._part.write, start, *pieces)

    def write(self) -> None:
        """Write the rest, also when the connection broke: its bytes need not come again."""
        self._part.write(self._start, *self._pieces)
        self._start, self._pieces = self.end, []


class Download:
    """Fetches blobs into the cache, each digest once at a time.

    Raises `grpc.aio.AioRpcError` and `BulkBrokenError` when the link breaks, `TimeoutError` when
    nothing comes, and `HyperGPUError` for what is unknown or is not what its digest says.
    """

    def __init__(self, cache: BlobCache, measurements: Measurements | None = None) -> None:
        self._cache = cache
        self._measurements = measurements or Measurements()
        # A lock lives as long as somebody waits for it or has it.
        self._tickets = _Tickets()
        self._locks: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()
        self.received_bytes = 0
        """All bytes received so far, by which a caller sees whether an attempt progressed."""

    async def fetch(self, source: BlobSource, blob: BlobRef) -> Path:
        """A blob's file, from the cache or from the coordinator."""
        lock = self._locks.setdefault(blob.digest, asyncio.Lock())
        async with lock:
            path = await self._cache.find(blob) or self._store_delivered(source, blob)
            return path if path is not None else await self._fetch(source, blob)

    async def fetch_small(self, source: BlobSource, digest: Digest, limit_bytes: int) -> bytes:
        """A small blob of unknown size, whole."""
        ticket, size_bytes = await self._tickets.resolve(source.calls, digest)
        content = bytearray()
        if 0 < size_bytes <= limit_bytes:
            timeout_ms = source.calls.timeout_ms
            stall = StallTimeout(PIECE_BYTES, timeout_ms)
            response = source.calls.bulk.open(ticket.range_at(0), Span(0, size_bytes), stall)
            async with asyncio.timeout(transfer_timeout_s(size_bytes, timeout_ms)):
                async with self._tickets.doubting(digest), response as pieces:
                    async for piece in pieces:
                        content += piece
        if digest_of(content) != digest:
            self._tickets.doubt(digest)
            raise HyperGPUError(Reason.DIGEST_MISMATCH, f"{digest} came as something else")
        return bytes(content)

    def _store_delivered(self, source: BlobSource, blob: BlobRef) -> Path | None:
        """Store a blob that came with its assignment; None: it did not, or came as another one.

        Blocks for as long as it takes to write a small file, which is less than a thread's turn.
        """
        if not (content := source.delivery(blob.digest).content):
            return None
        if digest_of(content) != blob.digest:
            log.warning("a blob came with its work as something else", digest=blob.digest)
            self._tickets.doubt(blob.digest)
            return None
        part = self._cache.part(blob.digest)
        part.unlink(missing_ok=True)
        part.write_bytes(content)
        self._count(len(content))
        return self._cache.admit(part, blob.digest)

    async def _fetch(self, source: BlobSource, blob: BlobRef) -> Path:
        part = self._cache.part(blob.digest)
        for _ in range(_ATTEMPTS):
            if await self._receive(source, blob, part) == blob.digest:
                return self._cache.admit(part, blob.digest)
            # Damaged here, on its way, or where it came from.
            log.warning("a download is something else: starting over", digest=blob.digest)
            self._tickets.doubt(blob.digest)
            part.unlink()
        raise HyperGPUError(Reason.DIGEST_MISMATCH, f"{blob.digest} came as something else")

    async def _receive(self, source: BlobSource, blob: BlobRef, path: Path) -> Digest:
        """Fetch the missing bytes of a part file; gives the digest of the whole file."""
        self._cache.reuse(path, blob.size_bytes)
        part = DigestingPartFile(path, blob.size_bytes)
        try:
            fetch = _RangeFetch(source, self._tickets, blob, part, self._count)
            count = fetch.connections
            timer = TransferTimer(
                self._measurements, measurement_pb2.DIRECTION_DOWN, connections=count
            )
            try:
                await fetch.run(timer)
            finally:
                timer.stop()
            return await asyncio.to_thread(part.finish)
        finally:
            part.close()

    def _count(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes
