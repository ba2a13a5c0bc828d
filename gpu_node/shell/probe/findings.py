"""What was measured and not yet reported: a bounded heap of it, the newest of each kind."""

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from hypergpu.units import Bytes, Microseconds
from hypergpu.v1 import node_pb2

ROUND_TRIPS_MAX = 32
TRAINS_MAX = 8
TRANSFERS_MAX = 16
_LEAST_OF = 10
"""Round trips whose least one is the line without queues."""


class Direction(Enum):
    """As this node sees it."""

    UP = node_pb2.DIRECTION_UP
    DOWN = node_pb2.DIRECTION_DOWN


class TrainCount(NamedTuple):
    """What became of a train of packets."""

    sent: int
    lost: int
    bursts: int
    """Runs of losses in a row."""


class Transfer(NamedTuple):
    """Bytes that got through."""

    direction: Direction
    size_bytes: Bytes
    took_us: Microseconds
    connections: int


class Findings:
    """Filled by whoever measures, emptied by each report."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        """``notify`` hears of each transfer."""
        self._notify = notify
        self._round_trips: deque[int] = deque(maxlen=ROUND_TRIPS_MAX)
        self._newest: deque[int] = deque(maxlen=_LEAST_OF)
        self._trains: deque[TrainCount] = deque(maxlen=TRAINS_MAX)
        self._transfers: deque[Transfer] = deque(maxlen=TRANSFERS_MAX)

    @property
    def least_round_trip_us(self) -> Microseconds:
        """Of the newest; 0: not known."""
        return Microseconds(min(self._newest, default=0))

    @property
    def longest_round_trip_us(self) -> Microseconds:
        """Of the newest; 0: not known."""
        return Microseconds(max(self._newest, default=0))

    @property
    def has_transfers(self) -> bool:
        """Whether a transfer waits to be reported."""
        return bool(self._transfers)

    def round_trip(self, took_us: int) -> None:
        """Something that was said came back."""
        self._round_trips.append(max(1, took_us))
        self._newest.append(max(1, took_us))

    def train(self, count: TrainCount) -> None:
        """A train was counted."""
        self._trains.append(count)

    def transferred(self, transfer: Transfer) -> None:
        """Bytes got through."""
        self._transfers.append(transfer)
        self._notify()

    def take(self, *, congestion_control: str, is_probing_blocked: bool) -> node_pb2.Measured:
        """The next report; what is in it is forgotten here."""
        message = node_pb2.Measured(
            round_trips_us=self._round_trips,
            trains=[
                node_pb2.ProbeTrain(sent=each.sent, lost=each.lost, bursts=each.bursts)
                for each in self._trains
            ],
            transfers=[
                node_pb2.MeasuredTransfer(
                    direction=each.direction.value,
                    size_bytes=each.size_bytes,
                    took_us=each.took_us,
                    connections=each.connections,
                )
                for each in self._transfers
            ],
            congestion_control=congestion_control,
            is_probing_blocked=is_probing_blocked,
        )
        for kept in (self._round_trips, self._trains, self._transfers):
            kept.clear()
        return message
