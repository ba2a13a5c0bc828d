"""Goodput of one transfer, measured where its bytes arrive; one too small to measure gives none."""

from typing import NamedTuple

from hypergpu.units import Bytes, Microseconds

SMALLEST_BYTES = 16 << 10
"""Smallest transfer that measures a line; less fits into the first TCP window."""
STREAM_BYTES_MIN = 256 << 10
"""Least bytes after the first pieces; less may have waited in buffers."""
STREAM_US_MIN = 50_000
"""Least time from first to last piece; in less, a busy process may find all of them at once."""
SHORTEST_US = 1_000
"""Least time besides the round trip; less measures clocks and schedulers."""
_OF_ROUND_TRIP = 8
"""Round trips are known to an eighth of their value."""


class TransferredBytes(NamedTuple):
    """Bytes of a transfer, and the time the line took for them."""

    size_bytes: Bytes
    took_us: Microseconds


class GoodputMeter:
    """Measures one transfer at its receiver, over one stream or several that share the line.

    What each stream brings first was on its way, beside the others', before the clock started: only
    what comes after it counts.
    """

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._first_us = self._last_us = 0
        self._bytes = 0

    @property
    def last_us(self) -> int | None:
        """Arrival of the latest piece; None before the first."""
        return self._last_us if self._begun else None

    def add_piece(self, stream: int, size_bytes: int, now_us: int) -> None:
        """Count a piece that arrived."""
        if not self._begun:
            self._first_us = now_us
        if stream in self._begun:
            self._bytes += size_bytes
        self._begun.add(stream)
        self._last_us = now_us

    def transfer(self) -> TransferredBytes | None:
        """Return bytes and time from first to last piece; None when either is too small."""
        took_us = self._last_us - self._first_us
        if self._bytes < STREAM_BYTES_MIN or took_us < STREAM_US_MIN:
            return None
        return TransferredBytes(Bytes(self._bytes), Microseconds(took_us))


def moved_whole(size_bytes: int, took_us: int, round_trip_us: int) -> TransferredBytes | None:
    """Return a whole transfer without its round trip; None when it was too small to measure."""
    left_us = took_us - round_trip_us
    if size_bytes < SMALLEST_BYTES or left_us < max(SHORTEST_US, round_trip_us // _OF_ROUND_TRIP):
        return None
    return TransferredBytes(Bytes(size_bytes), Microseconds(left_us))
