"""One blob from the coordinator: goes on where it broke off, over several connections at once. Its
digest has the last word.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO, NamedTuple
from weakref import WeakValueDictionary

import structlog

from gpu_node.shell.cache import BlobCache
from gpu_node.shell.calls import Calls, Measurements, TransferTimer
from hypergpu.crypto import RunningDigest, digest_of, running_digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements import BlobRef
from hypergpu.streams import PIECE_BYTES, STRIPE_BYTES_MIN, StallTimeout, transfer_timeout_s
from hypergpu.v1 import node_pb2
from hypergpu.wire.chunks import CHUNK_BYTES, BlobPiece


async def limit_stalls(
    pieces: AsyncGenerator[BlobPiece], stall_timeout: StallTimeout, left_bytes: int
) -> AsyncGenerator[BlobPiece]:
    """The same pieces; the stream is closed with this one.

    Args:
        pieces: Pieces of one call.
        stall_timeout: Time limit of the connection's pieces, which is learned from them.
        left_bytes: Bytes still to come.

    Raises:
        TimeoutError: The next piece did not come in time.
    """
    loop = asyncio.get_running_loop()
    async with aclosing(pieces):
        while True:
            asked_s = loop.time()
            async with asyncio.timeout(stall_timeout.limit_s(left_bytes)):
                piece = await anext(pieces, None)
            if piece is None:
                return
            stall_timeout.note_piece(loop.time() - asked_s)
            left_bytes -= piece.payload.nbytes
            yield piece


RANGE_BYTES_MAX = 4 << 20
_WINDOW_RANGES = 2
"""Ranges of a connection that may be held in memory beyond the first missing byte."""


EarlyPieces = dict[int, BlobPiece]
"""Pieces that came before their turn, by their offset."""


async def pieces_over(
    connections: tuple[Calls, ...],
    blob: BlobRef,
    offset: int,
    early: EarlyPieces,
    timer: TransferTimer,
) -> AsyncGenerator[BlobPiece, None]:
    """The pieces of a blob from ``offset`` to its end, in order.

    Each connection fetches the next range that no other has taken. Early pieces are held, at most
    eight MiB for each connection, and outlive a break: only missing bytes are fetched.

    Args:
        connections: Calls over a connection each.
        blob: The blob.
        offset: The first byte that is missing.
        early: Early pieces of the attempt before; this one leaves its own when it breaks.
        timer: Told of each piece as it comes, which may be long before it is handed on.

    Raises:
        grpc.aio.AioRpcError: A connection broke; the pieces until then are in order.
        TimeoutError: A connection was silent.
        HyperGPUError: CALL_BROKEN, a range had other bytes than it should.
    """
    fetch = _RangeFetch(blob, offset, early, connections=len(connections))
    tasks = [
        asyncio.create_task(fetch.serve(calls, timer.for_connection(number)), name="range")
        for number, calls in enumerate(connections)
    ]
    try:
        while fetch.next_offset < blob.size_bytes:
            yield await fetch.next_piece()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Lane(NamedTuple):
    """One of the connections."""

    calls: Calls
    stall_timeout: StallTimeout
    on_bytes: Callable[[int], None]


class _RangeFetch:
    """The early pieces, the ranges not yet taken, and the next offset."""

    def __init__(self, blob: BlobRef, offset: int, early: EarlyPieces, *, connections: int) -> None:
        self.next_offset = offset
        self._blob = blob
        self._connections = connections
        left = blob.size_bytes - offset
        each = -(-left // connections)
        self._range_bytes = min(RANGE_BYTES_MAX, max(STRIPE_BYTES_MIN, each))
        self._window_bytes = _WINDOW_RANGES * connections * self._range_bytes
        self._early = early
        self._ranges = iter([*self._missing_ranges()])
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    def _missing_ranges(self) -> Iterator[tuple[int, int]]:
        """Start and end of each range to fetch, around the early pieces."""
        at, size_bytes = self.next_offset, self._blob.size_bytes
        for start in (*sorted(each for each in self._early if each >= at), size_bytes):
            while at < start:
                end = min(start, at + self._range_bytes)
                yield at, end
                at = end
            if start < size_bytes:
                at = start + self._early[start].payload.nbytes

    async def next_piece(self) -> BlobPiece:
        """The next piece in order. A connection's error is raised once no piece is left."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.next_offset in self._early or self._failure)
            piece = self._early.pop(self.next_offset, None)
            if piece is None:
                assert self._failure is not None  # noqa: S101 - waited for one or the other
                raise self._failure
            self.next_offset += piece.payload.nbytes
            self._changed.notify_all()
            return piece

    async def serve(self, calls: Calls, on_bytes: Callable[[int], None]) -> None:
        """Fetch range after range over one connection."""
        stall = StallTimeout(PIECE_BYTES, calls.timeout_ms, connections=self._connections)
        lane = _Lane(calls, stall, on_bytes)
        try:
            for start, end in self._ranges:
                await self._wait_for_window(start)
                await self._fetch_range(lane, start, end)
        except Exception as broken:  # noqa: BLE001 - raised where the bytes are waited for
            async with self._changed:
                self._failure = self._failure or broken
                self._changed.notify_all()

    async def _wait_for_window(self, start: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: start < self.next_offset + self._window_bytes)

    async def _fetch_range(self, lane: _Lane, start: int, end: int) -> None:
        calls, whole = lane.calls, end - start
        timeout_s = transfer_timeout_s(whole, calls.timeout_ms, connections=self._connections)
        call = calls.fetch(self._blob.digest, start, timeout_s, end=end)
        at = start
        async with aclosing(limit_stalls(call, lane.stall_timeout, whole)) as pieces:
            async for piece in pieces:
                if piece.offset != at or not 0 < piece.payload.nbytes <= end - at:
                    detail = f"bytes {piece.offset} on came, {at} to {end} were asked for"
                    raise HyperGPUError(Reason.CALL_BROKEN, detail)
                at += piece.payload.nbytes
                lane.on_bytes(piece.payload.nbytes)
                async with self._changed:
                    self._early[piece.offset] = piece
                    self._changed.notify_all()
        if at < end:
            raise HyperGPUError(Reason.CALL_BROKEN, f"bytes {start} to {end} ended at {at}")


def connections_worth(connections: tuple[Calls, ...], left_bytes: int) -> tuple[Calls, ...]:
    """As many connections as so many bytes are worth."""
    return connections[: max(1, left_bytes // STRIPE_BYTES_MIN)]


log = structlog.get_logger()

_BATCH_BYTES = 2 << 20
"""Hashed and written per hop to a thread, while the next bytes come."""


class Download:
    """Fetches blobs into the cache, each digest once at a time.

    Calls raise `grpc.aio.AioRpcError` when the link breaks, `TimeoutError` when nothing comes, and
    `HyperGPUError` for what is unknown or is not what its digest says.
    """

    def __init__(self, cache: BlobCache, measurements: Measurements | None = None) -> None:
        self._cache = cache
        self._measurements = measurements or Measurements()
        # A lock lives as long as somebody waits for it or has it.
        self._locks: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()
        self._early: tuple[Digest, EarlyPieces] = (Digest(""), {})
        """Early pieces of the newest blob over several connections, kept should one break."""
        self.received_bytes = 0
        """All bytes received so far, by which a caller sees whether an attempt progressed."""

    async def fetch(self, calls: Calls, blob: BlobRef) -> Path:
        """A blob's file, from the cache or from the coordinator."""
        lock = self._locks.setdefault(blob.digest, asyncio.Lock())
        async with lock:
            cached = await self._cache.find(blob)
            return cached if cached is not None else await self._fetch(calls, blob)

    async def fetch_small(self, calls: Calls, digest: Digest, limit_bytes: int) -> bytes:
        """A small blob of unknown size, whole."""
        content = bytearray()
        timeout_s = transfer_timeout_s(limit_bytes, calls.timeout_ms)
        async with aclosing(calls.fetch(digest, 0, timeout_s)) as pieces:
            async for piece in pieces:
                content += piece.payload
                if len(content) > limit_bytes:
                    break
        if digest_of(content) != digest:
            raise HyperGPUError(Reason.DIGEST_MISMATCH, f"{digest} came as something else")
        return bytes(content)

    async def _fetch(self, calls: Calls, blob: BlobRef) -> Path:
        part = self._cache.part(blob.digest)
        was_resumed = part.exists() or self._early[0] == blob.digest
        if await self._receive(calls, blob, part) == blob.digest:
            if self._early[0] == blob.digest:
                self._early = (Digest(""), {})
            return self._cache.admit(part, blob.digest)
        part.unlink()
        if was_resumed:
            log.warning("a partial download was damaged: starting over", digest=blob.digest)
            if await self._receive(calls, blob, part) == blob.digest:
                return self._cache.admit(part, blob.digest)
            part.unlink()
        raise HyperGPUError(Reason.DIGEST_MISMATCH, f"{blob.digest} came as something else")

    async def _receive(self, calls: Calls, blob: BlobRef, part: Path) -> Digest:
        """Fetch the missing bytes of a part file; gives the digest of the whole file."""
        is_reused = self._cache.reuse(part, blob.size_bytes)
        with part.open("r+b" if is_reused else "ab", buffering=0) as file:
            running = RunningDigest()
            if not is_reused:
                running = await asyncio.to_thread(running_digest_of_file, part)
            try:
                if running.size_bytes < blob.size_bytes:
                    await self._append(calls, blob, _PartFile(file, running))
            finally:
                # Another blob's bytes may follow. After a kill the digest shows them.
                file.truncate(running.size_bytes)
        if running.size_bytes != blob.size_bytes:
            detail = f"{blob.digest} has {blob.size_bytes} bytes, {running.size_bytes} came"
            if running.size_bytes < blob.size_bytes:
                raise HyperGPUError(Reason.CALL_BROKEN, detail)
        return running.digest()

    async def _append(self, calls: Calls, blob: BlobRef, part: "_PartFile") -> None:
        offset = part.running.size_bytes
        connections = connections_worth(calls.connections, blob.size_bytes - offset)
        direction, count = node_pb2.DIRECTION_DOWN, len(connections)
        timer = TransferTimer(self._measurements, direction, connections=count)
        incoming = self._incoming(connections, blob, offset, timer)
        try:
            async with aclosing(incoming) as pieces:
                async for piece in pieces:
                    await part.take(piece, blob)
                    self.received_bytes += piece.payload.nbytes
        finally:
            timer.stop()
            await part.finish()

    def _incoming(
        self, connections: tuple[Calls, ...], blob: BlobRef, offset: int, timer: TransferTimer
    ) -> AsyncGenerator[BlobPiece]:
        digest, early = self._early
        if digest != blob.digest:
            if len(connections) == 1:
                return _time_pieces(_pieces(connections[0], blob, offset), timer)
            early = {}
            self._early = (blob.digest, early)
        return pieces_over(connections, blob, offset, early, timer)


def _pieces(calls: Calls, blob: BlobRef, offset: int) -> AsyncGenerator[BlobPiece]:
    """All missing bytes, over one connection."""
    left_bytes = blob.size_bytes - offset
    timeout_s = transfer_timeout_s(left_bytes, calls.timeout_ms)
    stall = StallTimeout(CHUNK_BYTES, calls.timeout_ms)
    return limit_stalls(calls.fetch(blob.digest, offset, timeout_s), stall, left_bytes)


async def _time_pieces(
    pieces: AsyncGenerator[BlobPiece], timer: TransferTimer
) -> AsyncGenerator[BlobPiece]:
    async with aclosing(pieces):
        async for piece in pieces:
            timer.add_bytes(piece.payload.nbytes)
            yield piece


class _PartFile:
    """A part file and the digest of its bytes. Receiving and writing overlap."""

    def __init__(self, file: BinaryIO, running: RunningDigest) -> None:
        self.running = running
        self._file = file
        self._next_offset = int(running.size_bytes)
        self._batch: list[BlobPiece] = []
        self._batch_bytes = 0
        self._writing: asyncio.Future[None] | None = None

    async def take(self, piece: BlobPiece, blob: BlobRef) -> None:
        """Add the next piece."""
        if piece.offset != self._next_offset:
            detail = f"byte {piece.offset} came, {self._next_offset} is next"
            raise HyperGPUError(Reason.CALL_BROKEN, detail)
        self._next_offset += piece.payload.nbytes
        if self._next_offset > blob.size_bytes:
            detail = f"{blob.digest} is longer than its {blob.size_bytes} bytes"
            raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
        self._batch.append(piece)
        self._batch_bytes += piece.payload.nbytes
        if self._batch_bytes >= _BATCH_BYTES:
            await self._flush()

    async def finish(self) -> None:
        """Write the last batch, also when the stream broke: its bytes need not come again."""
        await self._flush()
        if self._writing is not None:
            await asyncio.wait([self._writing])
            self._writing.result()

    async def _flush(self) -> None:
        if self._writing is not None:
            # A cancelled wait must not leave a thread writing behind the next attempt's back.
            await asyncio.shield(self._writing)
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, batch))

    def _write(self, batch: list[BlobPiece]) -> None:
        for piece in batch:
            view = piece.payload
            while view.nbytes:
                view = view[self._file.write(view) :]
            self.running.update(piece.payload)
