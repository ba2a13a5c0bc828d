"""The missing bytes of a blob in ranges, over several connections at once, handed on in order."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import NamedTuple

from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.chunks import BlobPiece
from gpu_node.shell.probing.measurements import TransferTimer
from gpu_node.shell.transfer.pieces import limit_stalls
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.wire.bulk import PIECE_BYTES, STRIPE_BYTES_MIN, StallTimeout, transfer_timeout_s

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
