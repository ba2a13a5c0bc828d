"""One stream over one hop each way on a clock that never waits."""

import heapq
import random

from coordinator.core.network.tcp import CongestionControl
from coordinator.core.network.transfer_forecast import Window
from hypergpu.units import Microseconds
from netsim.link import LinkDirection
from netsim.proxy.hops import Callback, Hop, HopPath
from netsim.proxy.stream import ProxyStream, StreamEnd

STEPS_MAX = 1_000_000


class InstantClock:
    """Deeds are done as fast as they can be, in the order of their moments."""

    def __init__(self) -> None:
        self.now_us = Microseconds(0)
        self._heap: list[tuple[int, int, Callback]] = []
        self._asked = 0

    def at(self, due_us: int, callback: Callback) -> None:
        heapq.heappush(self._heap, (max(due_us, self.now_us), self._asked, callback))
        self._asked += 1

    def run(self, until_us: int | None = None) -> None:
        """Do everything that is due until then; everything there is without a limit."""
        for _ in range(STEPS_MAX):
            if not self._heap or (until_us is not None and self._heap[0][0] > until_us):
                break
            due_us, _, callback = heapq.heappop(self._heap)
            self.now_us = Microseconds(due_us)
            callback()
        if until_us is not None:
            self.now_us = Microseconds(until_us)


def direction(delay_ms: int = 50, mbit_s: float = 0, *, loss: float = 0) -> LinkDirection:
    return LinkDirection(
        delay_us=Microseconds(delay_ms * 1000), bits_per_s=round(mbit_s * 1e6), loss=loss
    )


def hop(asked: LinkDirection, clock: InstantClock) -> Hop:
    return Hop(asked, lambda _now_us: asked.delay_us, clock)


class OneStream:
    """A stream, the program that writes to it and the one that reads from it."""

    def __init__(
        self,
        asked: LinkDirection,
        *,
        control: CongestionControl = CongestionControl.CUBIC,
        seed: int = 1,
    ) -> None:
        self.clock = InstantClock()
        self.there = HopPath((hop(asked, self.clock),))
        self.back = HopPath((hop(direction(asked.delay_us // 1000), self.clock),))
        dice = random.Random(seed)
        self.stream = ProxyStream(
            self.there,
            self.back,
            new_window=lambda: Window(self.there.model(self.back, control), dice.random),
            clock=self.clock,
            ends=self,
        )
        self.arrived = bytearray()
        self.arrivals: list[tuple[int, int]] = []
        self.marks: list[StreamEnd] = []
        self.is_reading = True
        self._unwritten = bytearray()

    def write(self, payload: bytes) -> None:
        """Hand over as much as is taken, and the rest when there is room."""
        self._unwritten += payload
        self.resume_reading()

    def seconds_for(self, size_bytes: int) -> float:
        """Open, write so much, and see when the last byte arrives."""
        self.stream.open()
        self.write(bytes(size_bytes))
        self.clock.run()
        assert len(self.arrived) == size_bytes
        return self.arrivals[-1][0] / 1e6

    def deliver(self, payload: memoryview, due_us: int) -> None:
        self.arrived += payload
        self.arrivals.append((self.clock.now_us, len(payload)))
        if self.is_reading:
            self.stream.note_written(len(payload))

    def end_stream(self, end: StreamEnd) -> None:
        self.marks.append(end)

    def resume_reading(self) -> None:
        while self._unwritten and not self.stream.is_full:
            piece = bytes(self._unwritten[: 64 << 10])
            del self._unwritten[: len(piece)]
            self.stream.feed(piece)
