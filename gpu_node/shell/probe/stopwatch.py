"""How long bytes take: from the first of them to the last, or with the round trip taken off."""

import time
from collections.abc import Callable
from functools import partial

from gpu_node.shell.probe.findings import Direction, Findings, Transfer
from hypergpu.wire.bulk import GoodputMeter, moved_whole


class Stopwatch:
    """Times one transfer, over one connection or several at once. Starts when it is made."""

    def __init__(self, findings: Findings, direction: Direction, *, connections: int = 1) -> None:
        self._findings = findings
        self._direction = direction
        self._connections = connections
        self._arrivals = GoodputMeter()
        self._start_us = self._last_us = _now_us()
        self._bytes = 0

    def by(self, connection: int) -> Callable[[int], None]:
        """`moved` for one connection of several."""
        return partial(self.moved, connection=connection)

    def moved(self, size_bytes: int, *, connection: int = 0) -> None:
        """Bytes are here, or known to be there."""
        self._last_us = _now_us()
        self._arrivals.add_piece(connection, size_bytes, self._last_us)
        self._bytes += size_bytes

    def stop(self) -> None:
        """Tell what was found, if it was enough to find anything."""
        took_us, waited_us = self._last_us - self._start_us, self._findings.least_round_trip_us
        found = self._arrivals.transfer() or moved_whole(self._bytes, took_us, waited_us)
        if found is not None:
            told = Transfer(self._direction, found.size_bytes, found.took_us, self._connections)
            self._findings.transferred(told)


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
