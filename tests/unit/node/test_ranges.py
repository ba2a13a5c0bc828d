"""Ranges of a blob over several connections: which are moved again, and which are not."""

import asyncio
from collections import Counter

from gpu_node.shell.transfer.ranges import RangeQueue, RangeUnderWay
from hypergpu.part_file import Span
from hypergpu.units import Milliseconds

TIMEOUT_MS = Milliseconds(20_000)
BLOB = [Span(0, 100_000)]


def finish(chosen: RangeUnderWay) -> None:
    chosen.offset = chosen.span.end


async def test_ranges_that_are_not_late_are_moved_once() -> None:
    moved_spans: Counter[Span] = Counter()

    async def move(chosen: RangeUnderWay, connection: int) -> None:
        moved_spans[chosen.span] += 1
        for _ in range(connection):
            # Some connections take a little longer than others.
            await asyncio.to_thread(bool)
        finish(chosen)

    queue = RangeQueue.cut(BLOB, 4, TIMEOUT_MS)
    await queue.run(move)
    assert len(moved_spans) == 4
    assert set(moved_spans.values()) == {1}


async def test_a_range_that_is_late_is_moved_by_another_connection() -> None:
    moves: list[tuple[int, int]] = []

    async def move(chosen: RangeUnderWay, connection: int) -> None:
        moves.append((chosen.span.start, connection))
        if (chosen.span.start, connection) == (0, 0):
            await asyncio.Event().wait()
        finish(chosen)

    queue = RangeQueue.cut(BLOB, 2, TIMEOUT_MS)
    await queue.run(move)
    assert moves == [(0, 0), (50_000, 1), (0, 1)]


async def test_whole_ranges_are_moved_by_one_connection_alone() -> None:
    moved_spans: Counter[Span] = Counter()

    async def move(chosen: RangeUnderWay, _: int) -> None:
        moved_spans[chosen.span] += 1
        finish(chosen)

    parts = [Span(0, 8), Span(8, 16), Span(16, 20)]
    queue = RangeQueue.whole(parts, 16, TIMEOUT_MS)
    assert queue.connections == 3
    await queue.run(move)
    assert moved_spans == Counter(parts)
