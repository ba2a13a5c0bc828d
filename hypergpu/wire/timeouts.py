"""How long either end waits for bulk: for all of it, and for the next piece of it."""

from hypergpu.units import Milliseconds

SLOWEST_BYTES_PER_S = 8 << 10
"""Of a line, which connections may share; a transfer over a slower one is given up."""
_TIMES_SLOWER = 4
"""A piece may take so many times as long as the slowest before it."""


def transfer_timeout_s(size_bytes: int, timeout_ms: Milliseconds, *, connections: int = 1) -> float:
    """Deadline of a bulk call: its share of the slowest line, and a small call's time."""
    return size_bytes * connections / SLOWEST_BYTES_PER_S + timeout_ms / 1000


class StallTimeout:
    """How long one stream may bring nothing. A piece counts only once all of it is there.

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
        """A piece came, so long after the one before it."""
        self._slowest_s = max(self._slowest_s or 0.0, took_s)

    def limit_s(self, left_bytes: int | None = None) -> float:
        """For the next piece of a stream that is to bring so much more, if that is known."""
        largest = self._piece_bytes
        piece_bytes = largest if left_bytes is None else min(largest, max(0, left_bytes))
        most_s = transfer_timeout_s(piece_bytes, self._timeout_ms, connections=self._connections)
        if self._slowest_s is None:
            return most_s
        return min(most_s, self._timeout_ms / 1000 + _TIMES_SLOWER * self._slowest_s)
