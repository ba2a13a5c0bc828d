"""Times a node's uploads as their bytes come in, whatever number of requests brings one."""

from collections.abc import Callable

from coordinator.core.network.reading import TransferDirection, TransferTime
from coordinator.shell.store.bulk.messages import BytesReceived
from hypergpu.clock import monotonic_ms
from hypergpu.goodput import GoodputMeter

_PAUSE_US = 15_000_000
"""Silence after which the rest is an upload of its own: a line that only stalls is slow."""


class UploadMeter:
    """Meter of one node. Requests that overlap bring one upload."""

    def __init__(self, report: Callable[[TransferTime], None]) -> None:
        self._report = report
        self._requests: set[int] = set()
        """Those under way."""
        self._most_requests = 0
        self._arrivals = GoodputMeter()

    def add(self, received: BytesReceived) -> None:
        """Count bytes; with the last of the last request the transfer is reported."""
        last_us = self._arrivals.last_us
        if last_us is not None and received.at_us - last_us > _PAUSE_US:
            # The end of requests whose process was killed is told by nobody.
            self._requests.clear()
            self._report_transfer()
        self._requests.add(received.request)
        self._most_requests = max(self._most_requests, len(self._requests))
        if received.size_bytes:
            self._arrivals.add_piece(received.request, received.size_bytes, received.at_us)
        if received.is_last:
            self._requests.discard(received.request)
            if not self._requests:
                self._report_transfer()

    def _report_transfer(self) -> None:
        transfer, connections = self._arrivals.transfer(), max(1, self._most_requests)
        self._arrivals, self._most_requests = GoodputMeter(), len(self._requests)
        if transfer is None:
            return
        self._report(
            TransferTime(
                at_ms=monotonic_ms(),
                direction=TransferDirection.UP,
                size_bytes=transfer.size_bytes,
                took_us=transfer.took_us,
                connections=connections,
            )
        )
