"""When a transfer says something of a line's rate, and what; both ends go by it."""

from typing import NamedTuple

from hypergpu.units import Bytes, Microseconds

SMALLEST_BYTES = 16 << 10
"""A smaller transfer fits into the first window, whatever the line."""
STREAM_BYTES_MIN = 256 << 10
"""Beyond the first pieces: less may have lain in buffers, whatever the line."""
STREAM_US_MIN = 50_000
"""From the first piece to the last: in less, one turn of a busy process finds them all there."""
SHORTEST_US = 1_000
"""Beside the round trip: in less, clocks and schedulers are what is measured."""
_OF_ROUND_TRIP = 8
"""No round trip is known better than by such a share of it."""


class TransferredBytes(NamedTuple):
    """Bytes and the time that the line took for them."""

    size_bytes: Bytes
    took_us: Microseconds


class GoodputMeter:
    """One transfer where it arrives, over one stream or several that share the line.

    What each stream brings first was on its way, beside the others', before the clock started: only
    what comes after it counts.
    """

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._first_us = self._last_us = 0
        self._bytes = 0

    @property
    def last_us(self) -> int | None:
        """When something last came, if anything did."""
        return self._last_us if self._begun else None

    def add_piece(self, stream: int, size_bytes: int, now_us: int) -> None:
        """A piece came."""
        if not self._begun:
            self._first_us = now_us
        if stream in self._begun:
            self._bytes += size_bytes
        self._begun.add(stream)
        self._last_us = now_us

    def transferred(self) -> TransferredBytes | None:
        """From the first piece to the last; None when it was too little or too soon over."""
        took_us = self._last_us - self._first_us
        if self._bytes < STREAM_BYTES_MIN or took_us < STREAM_US_MIN:
            return None
        return TransferredBytes(Bytes(self._bytes), Microseconds(took_us))


def moved_whole(size_bytes: int, took_us: int, round_trip_us: int) -> TransferredBytes | None:
    """All of a transfer, its round trip taken off; None when too little is left to say anything."""
    left_us = took_us - round_trip_us
    if size_bytes < SMALLEST_BYTES or left_us < max(SHORTEST_US, round_trip_us // _OF_ROUND_TRIP):
        return None
    return TransferredBytes(Bytes(size_bytes), Microseconds(left_us))
