"""Measures a node's upload where it arrives: from its first bytes to its last, over all streams."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.core.measure.reading import TransferDirection, TransferTime
from hypergpu.process.clock import monotonic_ms, monotonic_us
from hypergpu.wire.bulk import GoodputMeter

_PAUSE_US = 15_000_000
"""Silence after which the rest is an upload of its own: a line that only stalls is slow."""
AddBytes = Callable[[int], None]
"""Counts so many bytes that arrived."""


class UploadMeter:
    """Meter of one node. Streams that overlap are stripes of one upload."""

    def __init__(
        self, report: Callable[[TransferTime], None], clock_us: Callable[[], int] = monotonic_us
    ) -> None:
        self._report = report
        self._clock_us = clock_us
        self._numbers = itertools.count()
        self._open_streams = 0
        self._most_streams = 0
        self._arrivals = GoodputMeter()

    @contextmanager
    def stream(self) -> Iterator[AddBytes]:
        """One stream of the upload; the last that ends reports the transfer."""
        number = next(self._numbers)
        self._open_streams += 1
        self._most_streams = max(self._most_streams, self._open_streams)
        try:
            yield lambda size_bytes: self._add_piece(number, size_bytes)
        finally:
            self._open_streams -= 1
            if self._open_streams == 0:
                self._report_transfer()

    def _add_piece(self, stream: int, size_bytes: int) -> None:
        now_us, last_us = self._clock_us(), self._arrivals.last_us
        if last_us is not None and now_us - last_us > _PAUSE_US:
            self._report_transfer()
        self._arrivals.add_piece(stream, size_bytes, now_us)

    def _report_transfer(self) -> None:
        found, connections = self._arrivals.transfer(), max(1, self._most_streams)
        self._arrivals, self._most_streams = GoodputMeter(), self._open_streams
        if found is None:
            return
        self._report(
            TransferTime(
                at_ms=monotonic_ms(),
                direction=TransferDirection.UP,
                size_bytes=found.size_bytes,
                took_us=found.took_us,
                connections=connections,
            )
        )
