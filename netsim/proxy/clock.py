"""The time that links run on: deeds are done in their order, each at the moment that was asked for.

A deed sees that moment, not the later one at which the loop came to it: a loop that wakes late
delays what it writes then, and nothing after it.
"""

import asyncio
import heapq
import time

from hypergpu.units import Microseconds
from netsim.proxy.alarm import Alarm
from netsim.proxy.flow.clock import Deed

_AT_A_TIME = 500
"""Deeds before sockets are looked at again."""


class LoopClock:
    """A heap of deeds on an event loop. Time begins at 0 when it is made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._start_us = time.monotonic_ns() // 1000
        self.now_us = Microseconds(0)
        self._alarm = Alarm(loop, self._ring)
        self._set_to_us: int | None = None
        self._heap: list[tuple[int, int, Deed]] = []
        self._asked = 0

    def at(self, due_us: int, deed: Deed) -> None:
        """Plan a deed; one in the past is done at once, after those before it."""
        heapq.heappush(self._heap, (due_us, self._asked, deed))
        self._asked += 1
        if self._set_to_us is None or due_us < self._set_to_us:
            self._set_to_us = due_us
            self._alarm.set(Microseconds(self._start_us + due_us))

    def wall_us(self) -> Microseconds:
        """The present, whatever deed is being done."""
        return Microseconds(time.monotonic_ns() // 1000 - self._start_us)

    def catch_up(self) -> None:
        """Do what is due, then the present is now: what a socket's event begins with."""
        wall_us = self.wall_us()
        for _ in range(_AT_A_TIME):
            if not self._heap or self._heap[0][0] > wall_us:
                break
            due_us, _, deed = heapq.heappop(self._heap)
            self.now_us = Microseconds(due_us)
            deed()
        self.now_us = wall_us

    def close(self) -> None:
        """Forget everything that was planned."""
        self._heap.clear()
        self._alarm.close()

    def _ring(self) -> None:
        # Deeds that plan deeds must not set the alarm each; it is set once, below.
        self._set_to_us = -1
        try:
            self.catch_up()
        finally:
            # A deed that fails must not stop the links of all the others.
            self._set_to_us = self._heap[0][0] if self._heap else None
            if self._set_to_us is not None:
                self._alarm.set(Microseconds(self._start_us + self._set_to_us))
