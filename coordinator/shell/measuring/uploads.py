"""An upload measured where it arrives: from its first bytes to its last, over all its streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.core.measure.reading import Direction, Transfer
from coordinator.shell.clock import monotonic_ms, monotonic_us
from hypergpu.units import Bytes, Microseconds

_PAUSE_US = 2_000_000
"""Silence after which the rest is an upload of its own: the line was not what it waited for."""


class UploadMeter:
    """Of one node. Streams that overlap are stripes of one upload."""

    def __init__(self, report: Callable[[Transfer], None]) -> None:
        self._report = report
        self._streams = 0
        self._widest = 0
        self._first_us = self._last_us = Microseconds(0)
        self._bytes = -1
        """After the first that came, which only start the clock; -1: it has not started."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """One stream of the upload; the last that ends tells the figure."""
        self._streams += 1
        self._widest = max(self._widest, self._streams)
        try:
            yield
        finally:
            self._streams -= 1
            if self._streams == 0:
                self._tell()

    def arrived(self, size_bytes: int) -> None:
        """Bytes came in."""
        now_us = monotonic_us()
        if self._bytes >= 0 and now_us - self._last_us > _PAUSE_US:
            self._tell()
        if self._bytes < 0:
            self._first_us, self._bytes = now_us, 0
        else:
            self._bytes += size_bytes
        self._last_us = now_us

    def _tell(self) -> None:
        size_bytes, took_us = self._bytes, self._last_us - self._first_us
        connections = max(1, self._widest)
        self._bytes, self._widest = -1, self._streams
        if size_bytes > 0 and took_us > 0:
            self._report(
                Transfer(
                    at_ms=monotonic_ms(),
                    direction=Direction.UP,
                    size_bytes=Bytes(size_bytes),
                    took_us=Microseconds(took_us),
                    connections=connections,
                )
            )
