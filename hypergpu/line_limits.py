"""Time limits of bulk transfers by the slowest usable line, and the sizes of their pieces."""

from hypergpu.units import Bytes, Milliseconds

RANGE_BYTES_MIN = 10 << 10
"""A fresh TCP window carries as much at once (RFC 6928), headers and TLS included: of less, more
connections save no round trip.
"""
INLINE_BYTES_MAX = Bytes(256 << 10)
"""Largest blob that travels inside a message of a control stream."""
PIECE_BYTES = 64 << 10
"""Bytes that a slow link brings in time; a larger piece would arrive late."""
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
        most_s = self.limit_of_s(piece_bytes)
        if self._slowest_s is None:
            return most_s
        return min(most_s, self._timeout_ms / 1000 + _TIMES_SLOWER * self._slowest_s)

    def limit_of_s(self, size_bytes: int) -> float:
        """Return the time that so many bytes may take over the slowest line."""
        return transfer_timeout_s(size_bytes, self._timeout_ms, connections=self._connections)
