"""How long bytes take: from the first of them to the last, or with the round trip taken off."""

import time

from gpu_node.shell.probe.findings import Direction, Findings, Transfer
from hypergpu.units import Bytes, Microseconds

SMALLEST_BYTES = 16 << 10
"""A smaller transfer says nothing of the rate: it fits into the first window."""
_STREAM_BYTES = 256 << 10
"""After the first piece: enough for the time from the first to the last to say something."""


class Stopwatch:
    """Times one transfer, over one connection or several at once. Starts when it is made."""

    def __init__(self, findings: Findings, direction: Direction, *, connections: int = 1) -> None:
        self._findings = findings
        self._direction = direction
        self._connections = connections
        self._start_us = self._last_us = _now_us()
        self._first_us = 0
        self._first_bytes = 0
        self._bytes = 0

    def moved(self, size_bytes: int) -> None:
        """Bytes are here, or known to be there."""
        self._last_us = _now_us()
        if self._bytes == 0:
            self._first_us, self._first_bytes = self._last_us, size_bytes
        self._bytes += size_bytes

    def stop(self) -> None:
        """Tell what was found, if it was enough to find anything."""
        later_bytes, later_us = self._bytes - self._first_bytes, self._last_us - self._first_us
        if later_bytes >= _STREAM_BYTES and later_us > 0:
            self._tell(later_bytes, later_us)
        elif self._bytes >= SMALLEST_BYTES:
            waited_us = self._findings.least_round_trip_us
            self._tell(self._bytes, self._last_us - self._start_us - waited_us)

    def _tell(self, size_bytes: int, took_us: int) -> None:
        took = Microseconds(max(1, took_us))
        found = Transfer(self._direction, Bytes(size_bytes), took, self._connections)
        self._findings.transferred(found)


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
