"""Virtual time: deeds in order of time. Ties are broken by the order of planning."""

import heapq
from collections.abc import Callable

from hypergpu.units import Milliseconds

Deed = Callable[[], None]


class Agenda:
    """A heap of deeds. Nothing sleeps; the clock jumps to the next deed."""

    def __init__(self) -> None:
        self.now_ms = Milliseconds(0)
        self.done = 0
        self._heap: list[tuple[int, int, Deed]] = []
        self._asked = 0

    def after(self, wait_ms: int, deed: Deed) -> None:
        """Plan a deed ``wait_ms`` from now."""
        self.at(self.now_ms + max(0, wait_ms), deed)

    def at(self, at_ms: int, deed: Deed) -> None:
        """Plan a deed; one in the past happens now."""
        heapq.heappush(self._heap, (max(at_ms, self.now_ms), self._asked, deed))
        self._asked += 1

    def run(self, until: Callable[[], bool], limit_ms: Milliseconds) -> bool:
        """Do deeds until ``until`` holds; false when time or work ran out first."""
        while not until():
            if not self._heap or self._heap[0][0] > limit_ms:
                return False
            at_ms, _, deed = heapq.heappop(self._heap)
            self.now_ms = Milliseconds(at_ms)
            self.done += 1
            deed()
        return True
