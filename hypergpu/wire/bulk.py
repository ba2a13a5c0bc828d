"""Bulk transfers as both ends see them: stripes, timeouts and goodput."""

from typing import NamedTuple

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Bytes, Microseconds, Milliseconds

STRIPES_MAX = 16
STRIPE_BYTES_MIN = 10 << 10
"""A fresh TCP window carries as much at once (RFC 6928), headers and TLS included: of less, more
connections save no round trip.
"""
PIECE_BYTES = 64 << 10
"""Bytes in a chunk of a stripe or range; over a slow link a larger one would arrive late."""


class Stripe(msgspec.Struct, frozen=True):
    """The ``index``-th of ``count`` stripes."""

    index: int
    count: int

    def start(self, size_bytes: int) -> int:
        """Return its first byte in an update of ``size_bytes``."""
        return self.index * size_bytes // self.count

    def end(self, size_bytes: int) -> int:
        """Return the byte after its last one."""
        return (self.index + 1) * size_bytes // self.count


WHOLE = Stripe(0, 1)


def stripe_from_wire(index: int, count: int, size_bytes: int) -> Stripe:
    """Check the stripe that a peer names of an update of ``size_bytes``.

    Raises:
        HyperGPUError: REQUEST_INVALID, there is no such stripe, or they are too many or too small.
    """
    count = count or 1
    if index >= count:
        raise HyperGPUError(Reason.REQUEST_INVALID, f"there is no stripe {index} of {count}")
    if count > most_stripes(size_bytes):
        detail = (
            f"{count} stripes of {size_bytes} bytes: at most {STRIPES_MAX} are taken, of"
            f" {STRIPE_BYTES_MIN} bytes at least"
        )
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return Stripe(index, count)


def most_stripes(size_bytes: int) -> int:
    """Return the most stripes of an update, at least 1."""
    return max(1, min(STRIPES_MAX, size_bytes // STRIPE_BYTES_MIN))


SLOWEST_BYTES_PER_S = 8 << 10
"""Slowest usable line, shared by all connections; transfers over a slower one are given up."""
_TIMES_SLOWER = 4
"""A piece may take this many times as long as the slowest one before it."""


def transfer_timeout_s(size_bytes: int, timeout_ms: Milliseconds, *, connections: int = 1) -> float:
    """Deadline of a bulk call: its share of the slowest line, and a small call's time."""
    return size_bytes * connections / SLOWEST_BYTES_PER_S + timeout_ms / 1000


class StallTimeout:
    """Time for which one stream may stall. A piece counts only once all of it has arrived.

    The first one may take as long as over the slowest line. From then on it is known how long
    pieces take: who brought them quickly is missed soon.
    """

    def __init__(self, piece_bytes: int, timeout_ms: Milliseconds, *, connections: int = 1) -> None:
        """``connections`` share the line, which carries at most so much in one piece."""
        self._piece_bytes = piece_bytes
        self._timeout_ms = timeout_ms
        self._connections = connections
        self._slowest_s: float | None = None

    def note_piece(self, took_s: float) -> None:
        """Record a piece that took this long after the one before it."""
        self._slowest_s = max(self._slowest_s or 0.0, took_s)

    def limit_s(self, left_bytes: int | None = None) -> float:
        """Return the time limit of the next piece, given the bytes left where they are known."""
        largest = self._piece_bytes
        piece_bytes = largest if left_bytes is None else min(largest, max(0, left_bytes))
        most_s = transfer_timeout_s(piece_bytes, self._timeout_ms, connections=self._connections)
        if self._slowest_s is None:
            return most_s
        return min(most_s, self._timeout_ms / 1000 + _TIMES_SLOWER * self._slowest_s)


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
