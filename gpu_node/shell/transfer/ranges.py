"""The missing ranges of one blob, handed to several connections, and the last ones twice: a loss
holds back the connection that it meets, not the blob.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from gpu_node.shell.link.coroutines import gather_or_cancel
from hypergpu.line_limits import RANGE_BYTES_MIN, transfer_timeout_s
from hypergpu.part_file import Span
from hypergpu.units import Milliseconds
from hypergpu.wire.bulk_ranges import BulkBrokenError

RANGE_BYTES_MAX = 4 << 20
"""Over several connections; one moves all that is missing in a row at once."""
_PATIENCE_S = 0.25
"""A range is moved again only after so long, about what a system waits before it sends again: the
slower of two requests is broken off, and its connection has to be opened anew.
"""


class RangeUnderWay:
    """A range, and how far the connection that is farthest has come."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.offset = span.start
        self.connections = 0
        """Connections that were ever told to move it."""
        self.handed_bytes = 0
        """Bytes of a range that is sent, as the transport took them; they may still be lost."""
        self._attempts: list[asyncio.Timeout] = []
        """Time limits of those that still do."""

    @property
    def left_bytes(self) -> int:
        """Bytes that were not moved yet."""
        return self.span.end - self.offset

    @property
    def is_under_way(self) -> bool:
        """Whether a connection moves it at this moment."""
        return bool(self._attempts)

    @asynccontextmanager
    async def attempt(self, timeout_s: float) -> AsyncIterator[None]:
        """One connection's time with the range, which ends when another one has moved it.

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


RangeMover = Callable[[RangeUnderWay, int], Awaitable[None]]
"""Moves what is left of a range over a connection, which is a number."""


class RangeQueue:
    """Hands ranges to connections."""

    def __init__(
        self, ranges: Sequence[Span], connections: int, timeout_ms: Milliseconds, *, attempts: int
    ) -> None:
        """Hand out each range as it is, to at most so many connections one after the other."""
        self.left_bytes = _size(ranges)
        """Bytes of all ranges at the start."""
        self.connections = connections
        self._timeout_ms = timeout_ms
        self._attempts_max = attempts
        self._ranges = [RangeUnderWay(span) for span in ranges]
        self._next = 0
        self._is_over = asyncio.Event()

    @classmethod
    def cut(
        cls, missing: Sequence[Span], connections: int, timeout_ms: Milliseconds
    ) -> "RangeQueue":
        """Cut what is missing for as many connections as it is worth, at most so many."""
        worth = max(1, min(connections, _size(missing) // RANGE_BYTES_MIN))
        return cls(_cut(missing, worth), worth, timeout_ms, attempts=2)

    @classmethod
    def whole(
        cls, missing: Sequence[Span], connections: int, timeout_ms: Milliseconds
    ) -> "RangeQueue":
        """Move each range as a whole, and by one connection only: it may be all there is."""
        worth = max(1, min(connections, len(missing)))
        return cls(missing, worth, timeout_ms, attempts=1)

    async def run(self, move: RangeMover) -> None:
        """Move all of them. A connection that breaks ends the others too.

        Raises:
            TimeoutError: A range took too long.
            BulkBrokenError: A connection broke.
        """
        if self._ranges:
            lanes = range(self.connections)
            await gather_or_cancel([self._serve(move, lane) for lane in lanes])

    async def _serve(self, move: RangeMover, lane: int) -> None:
        """Move range after range over one connection."""
        while (chosen_range := await self._take()) is not None:
            left_bytes = chosen_range.left_bytes
            chosen_range.connections += 1
            timeout_s = transfer_timeout_s(
                left_bytes, self._timeout_ms, connections=self.connections
            )
            try:
                async with chosen_range.attempt(timeout_s):
                    await move(chosen_range, lane)
            except (TimeoutError, BulkBrokenError):
                # The other connection of the two may have been first, or may yet be.
                if chosen_range.left_bytes and not chosen_range.is_under_way:
                    raise
            if not any(each.left_bytes for each in self._ranges):
                self._is_over.set()

    async def _take(self) -> RangeUnderWay | None:
        """The next range; without one, a moment later, the range that is least far: again."""
        if self._next < len(self._ranges):
            self._next += 1
            return self._ranges[self._next - 1]
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._is_over.wait()
        slow = [each for each in self._ranges if each.left_bytes and self._may_try(each)]
        return max(slow, key=lambda each: each.left_bytes - each.handed_bytes, default=None)

    def _may_try(self, chosen: RangeUnderWay) -> bool:
        return chosen.connections < self._attempts_max


def _size(spans: Sequence[Span]) -> int:
    return sum(span.end - span.start for span in spans)


def _cut(spans: Sequence[Span], connections: int) -> Sequence[Span]:
    if connections == 1:
        return spans
    each = -(-_size(spans) // connections)
    step = min(RANGE_BYTES_MAX, max(RANGE_BYTES_MIN, each))
    return [
        Span(start, min(start + step, span.end))
        for span in spans
        for start in range(span.start, span.end, step)
    ]
