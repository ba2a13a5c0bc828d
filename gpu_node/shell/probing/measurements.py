"""Measurements that wait to be reported: a bounded number, the newest of each kind."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from hypergpu.units import Bytes, Microseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.bulk import GoodputMeter, TransferredBytes, moved_whole

ROUND_TRIPS_MAX = 32
TRAINS_MAX = 8
TRANSFERS_MAX = 16
_NEWEST_ROUND_TRIPS = 10
"""The least of these round trips is that of the line without queues."""


class Measurements:
    """Filled by each measurement, emptied by each report."""

    def __init__(self, on_transfer: Callable[[], None] = lambda: None) -> None:
        """``on_transfer`` is called after each transfer."""
        self._on_transfer = on_transfer
        self._round_trips: deque[int] = deque(maxlen=ROUND_TRIPS_MAX)
        self._newest: deque[int] = deque(maxlen=_NEWEST_ROUND_TRIPS)
        self._trains: deque[node_pb2.ProbeTrain] = deque(maxlen=TRAINS_MAX)
        self._transfers: deque[node_pb2.MeasuredTransfer] = deque(maxlen=TRANSFERS_MAX)

    @property
    def least_round_trip_us(self) -> Microseconds:
        """Least of the newest round trips; 0: none is known."""
        return Microseconds(min(self._newest, default=0))

    @property
    def longest_round_trip_us(self) -> Microseconds:
        """Longest of the newest round trips; 0: none is known."""
        return Microseconds(max(self._newest, default=0))

    @property
    def has_transfers(self) -> bool:
        """Whether a transfer waits to be reported."""
        return bool(self._transfers)

    def add_round_trip(self, took_us: int) -> None:
        """Add the time that an echo took."""
        self._round_trips.append(max(1, took_us))
        self._newest.append(max(1, took_us))

    def add_train(self, train: node_pb2.ProbeTrain) -> None:
        """Add a counted train of packets."""
        self._trains.append(train)

    def add_transfer(self, transfer: node_pb2.MeasuredTransfer) -> None:
        """Add bytes that got through."""
        self._transfers.append(transfer)
        self._on_transfer()

    def take_report(
        self, *, congestion_control: str, is_probing_blocked: bool
    ) -> node_pb2.Measured:
        """The next report; its measurements are forgotten here."""
        report = node_pb2.Measured(
            round_trips_us=self._round_trips,
            trains=self._trains,
            transfers=self._transfers,
            congestion_control=congestion_control,
            is_probing_blocked=is_probing_blocked,
        )
        for reported in (self._round_trips, self._trains, self._transfers):
            reported.clear()
        return report


class TransferTimer:
    """Times one transfer, over one connection or several at once. Starts when it is made."""

    def __init__(
        self,
        measurements: Measurements,
        direction: node_pb2.Direction.ValueType,
        *,
        connections: int = 1,
    ) -> None:
        self._measurements = measurements
        self._direction = direction
        self._connections = connections
        self._meter = GoodputMeter()
        self._start_us = self._last_us = _now_us()
        self._bytes = 0

    def for_connection(self, connection: int) -> Callable[[int], None]:
        """`add_bytes` for one connection of several."""
        return partial(self.add_bytes, connection=connection)

    def add_bytes(self, size_bytes: int, *, connection: int = 0) -> None:
        """Add bytes that arrived, here or as the other side confirms."""
        self._last_us = _now_us()
        self._meter.add_piece(connection, size_bytes, self._last_us)
        self._bytes += size_bytes

    def stop(self) -> None:
        """Add the transfer to the measurements, if it was large enough to measure a line."""
        took_us = self._last_us - self._start_us
        waited_us = self._measurements.least_round_trip_us
        measured = self._meter.transfer() or moved_whole(self._bytes, took_us, waited_us)
        if measured is not None:
            self._measurements.add_transfer(self._message(measured))

    def _message(self, measured: TransferredBytes) -> node_pb2.MeasuredTransfer:
        return node_pb2.MeasuredTransfer(
            direction=self._direction,
            size_bytes=Bytes(measured.size_bytes),
            took_us=measured.took_us,
            connections=self._connections,
        )


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
