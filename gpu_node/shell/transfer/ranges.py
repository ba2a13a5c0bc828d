"""A blob's missing bytes in ranges, over several connections at once, handed on in order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from gpu_node.shell.link.bulk import Piece
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.probe.stopwatch import Stopwatch
from gpu_node.shell.transfer.patient import patiently
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.wire.bulk import PIECE_BYTES, STRIPE_BYTES_MIN, StallTimeout, transfer_timeout_s

RANGE_BYTES_MAX = 4 << 20
_WINDOW_RANGES = 2
"""Ranges a connection that may be ahead of the first missing byte: what is held in memory."""


Early = dict[int, Piece]
"""Pieces by where they begin that came before their turn."""


async def pieces_over(
    lines: tuple[Calls, ...], blob: BlobRef, offset: int, early: Early, stopwatch: Stopwatch
) -> AsyncGenerator[Piece, None]:
    """The pieces of a blob from ``offset`` to its end, in order.

    Each connection fetches the next range that nobody has taken. What comes early is held, at most
    eight MiB for each connection, and outlives a break: only what is missing is asked for.

    Args:
        lines: A connection each.
        blob: What is wanted.
        offset: The first byte that is missing.
        early: What an attempt before left, and this one leaves when it breaks.
        stopwatch: Hears of each piece as it comes: what is handed on waited for what is before it.

    Raises:
        grpc.aio.AioRpcError: A connection broke; what was handed on until then is in order.
        TimeoutError: A connection was silent.
        HyperGPUError: CALL_BROKEN, a range was not what was asked for.
    """
    fetch = _Fetch(blob, offset, early, connections=len(lines))
    async with _working(fetch, lines, stopwatch):
        while fetch.next_offset < blob.size_bytes:
            yield await fetch.following()


@asynccontextmanager
async def _working(
    fetch: "_Fetch", lines: tuple[Calls, ...], stopwatch: Stopwatch
) -> AsyncIterator[None]:
    lanes = [
        _Lane(calls, StallTimeout(PIECE_BYTES, calls.timeout_ms, connections=len(lines)), moved)
        for calls, moved in zip(lines, map(stopwatch.by, range(len(lines))), strict=True)
    ]
    tasks = [asyncio.create_task(fetch.serve(lane), name="range") for lane in lanes]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Lane(NamedTuple):
    """One of the connections."""

    calls: Calls
    patience: StallTimeout
    moved: Callable[[int], None]
    """Hears of bytes as they come."""


class _Fetch:
    """What is held, what was taken, and what comes next."""

    def __init__(self, blob: BlobRef, offset: int, early: Early, *, connections: int) -> None:
        self.next_offset = offset
        self._blob = blob
        self._connections = connections
        left = blob.size_bytes - offset
        each = -(-left // connections)
        self._range_bytes = min(RANGE_BYTES_MAX, max(STRIPE_BYTES_MIN, each))
        self._window_bytes = _WINDOW_RANGES * connections * self._range_bytes
        self._held = early
        self._ranges = iter([*self._missing()])
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    def _missing(self) -> Iterator[tuple[int, int]]:
        """What is to be asked for, from byte to byte, around what is here already."""
        at, size_bytes = self.next_offset, self._blob.size_bytes
        for start in (*sorted(each for each in self._held if each >= at), size_bytes):
            while at < start:
                end = min(start, at + self._range_bytes)
                yield at, end
                at = end
            if start < size_bytes:
                at = start + self._held[start].payload.nbytes

    async def following(self) -> Piece:
        """The next piece in order; what broke a connection is raised once nothing is left."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.next_offset in self._held or self._failure)
            piece = self._held.pop(self.next_offset, None)
            if piece is None:
                assert self._failure is not None  # noqa: S101 - waited for one or the other
                raise self._failure
            self.next_offset += piece.payload.nbytes
            self._changed.notify_all()
            return piece

    async def serve(self, lane: _Lane) -> None:
        """Fetch range after range over one connection."""
        try:
            for start, end in self._ranges:
                await self._within_window(start)
                await self._range(lane, start, end)
        except Exception as broken:  # noqa: BLE001 - whoever waits for the bytes raises it
            async with self._changed:
                self._failure = self._failure or broken
                self._changed.notify_all()

    async def _within_window(self, start: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: start < self.next_offset + self._window_bytes)

    async def _range(self, lane: _Lane, start: int, end: int) -> None:
        calls, whole = lane.calls, end - start
        timeout_s = transfer_timeout_s(whole, calls.timeout_ms, connections=self._connections)
        call = calls.fetch(self._blob.digest, start, timeout_s, end=end)
        at = start
        async with aclosing(patiently(call, lane.patience, whole)) as pieces:
            async for piece in pieces:
                if piece.offset != at or not 0 < piece.payload.nbytes <= end - at:
                    detail = f"bytes {piece.offset} on came, {at} to {end} were asked for"
                    raise HyperGPUError(Reason.CALL_BROKEN, detail)
                at += piece.payload.nbytes
                lane.moved(piece.payload.nbytes)
                async with self._changed:
                    self._held[piece.offset] = piece
                    self._changed.notify_all()
        if at < end:
            raise HyperGPUError(Reason.CALL_BROKEN, f"bytes {start} to {end} ended at {at}")


def ranges_of(lines: tuple[Calls, ...], left_bytes: int) -> tuple[Calls, ...]:
    """As many connections as so many bytes are worth."""
    return lines[: max(1, left_bytes // STRIPE_BYTES_MIN)]
