"""An upload measured where it arrives: from its first bytes to its last, over all its streams."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.core.measure.reading import Direction, Transfer
from coordinator.shell.clock import monotonic_ms, monotonic_us
from hypergpu.wire.bulk import GoodputMeter

_PAUSE_US = 15_000_000
"""Silence after which the rest is an upload of its own: a line that only stalls is slow."""
Arrived = Callable[[int], None]
"""Hears of so many bytes as they come."""


class UploadMeter:
    """Of one node. Streams that overlap are stripes of one upload."""

    def __init__(
        self, report: Callable[[Transfer], None], clock_us: Callable[[], int] = monotonic_us
    ) -> None:
        self._report = report
        self._clock_us = clock_us
        self._numbers = itertools.count()
        self._streams = 0
        self._widest = 0
        self._arrivals = GoodputMeter()

    @contextmanager
    def stream(self) -> Iterator[Arrived]:
        """One stream of the upload; the last that ends tells the figure."""
        number = next(self._numbers)
        self._streams += 1
        self._widest = max(self._widest, self._streams)
        try:
            yield lambda size_bytes: self._note_arrival(number, size_bytes)
        finally:
            self._streams -= 1
            if self._streams == 0:
                self._tell()

    def _note_arrival(self, stream: int, size_bytes: int) -> None:
        now_us, last_us = self._clock_us(), self._arrivals.last_us
        if last_us is not None and now_us - last_us > _PAUSE_US:
            self._tell()
        self._arrivals.add_piece(stream, size_bytes, now_us)

    def _tell(self) -> None:
        found, connections = self._arrivals.transferred(), max(1, self._widest)
        self._arrivals, self._widest = GoodputMeter(), self._streams
        if found is not None:
            self._report(
                Transfer(
                    at_ms=monotonic_ms(),
                    direction=Direction.UP,
                    size_bytes=found.size_bytes,
                    took_us=found.took_us,
                    connections=connections,
                )
            )
