"""When nodes may dial that all want to at once: each that comes too early gets an appointment.

Appointments lie one interval apart, so that whoever keeps them is let in. They are kept by node:
one that comes before its time is told the same moment again.
"""

from collections import OrderedDict

from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

LATE_MS = 60_000
"""An appointment is good for so long."""
EARLY_MS = 100
"""Clocks and timers may be off by so much."""


class Appointments:
    """Appointments of one listener, in bounded memory."""

    def __init__(self, per_s: int, burst: int) -> None:
        """Let in ``burst`` at once, and ``per_s`` each second from then on."""
        self._interval_ms = 1000 / per_s
        self._burst_ms = burst * self._interval_ms
        self._next_ms = float("-inf")
        """Moment from which the next node without an appointment may come, by the rate alone."""
        self._appointments: OrderedDict[NodeId, float] = OrderedDict()
        """In the order in which they were made, which is that of their times."""

    def appointment_ms(self, node: NodeId, now_ms: Milliseconds) -> Milliseconds:
        """Time until the node may come, which is kept for it; 0: it may come now."""
        self._forget_missed(now_ms)
        appointed_ms = self._appointments.get(node)
        if appointed_ms is None:
            self._next_ms = max(self._next_ms, now_ms - self._burst_ms) + self._interval_ms
            self._appointments[node] = appointed_ms = self._next_ms
        return Milliseconds(max(0, round(appointed_ms - now_ms)))

    def wait_ms(self, node: NodeId, now_ms: Milliseconds) -> Milliseconds:
        """Let the node in, and return 0; or the time until its appointment."""
        wait_ms = self.appointment_ms(node, now_ms)
        if wait_ms > EARLY_MS:
            return wait_ms
        del self._appointments[node]
        return Milliseconds(0)

    def _forget_missed(self, now_ms: Milliseconds) -> None:
        while self._appointments:
            node, appointed_ms = next(iter(self._appointments.items()))
            if appointed_ms + LATE_MS > now_ms:
                return
            del self._appointments[node]
