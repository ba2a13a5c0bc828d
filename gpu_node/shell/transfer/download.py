"""One blob from the coordinator: goes on where it broke off, and its digest has the last word."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import structlog

from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.chunks import CHUNK_BYTES, BlobPiece
from gpu_node.shell.probing.measurements import Measurements, TransferTimer
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.pieces import limit_stalls
from gpu_node.shell.transfer.ranges import EarlyPieces, connections_worth, pieces_over
from hypergpu.digest import RunningDigest, digest_of, running_digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements.assignment import BlobRef
from hypergpu.v1 import node_pb2
from hypergpu.wire.bulk import StallTimeout, transfer_timeout_s

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
