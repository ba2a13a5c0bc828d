"""Virtual time as an agenda of callbacks, and a link on it that transfers share, max-min fair.

A transfer has a rate of its own: what its path would give it. While the rates together fit, all go
at their own. Else the slow ones still do, and the others get equal shares of the rest. Transfers of
like rates form a class with a clock that runs slower the smaller the share is, so that an event
costs the number of classes, some ten, however many transfers there are.
"""

import heapq
from collections.abc import Callable
from math import ceil, inf, log2
from operator import itemgetter

from coordinator.core.network.tcp import PACKET_HEADER_BYTES, STREAM_OVERHEAD
from hypergpu.units import Bytes, Milliseconds

AgendaCallback = Callable[[], None]


class Agenda:
    """A heap of callbacks. Nothing sleeps; the clock jumps to the next callback."""

    def __init__(self) -> None:
        self.now_ms = Milliseconds(0)
        self.done = 0
        self._heap: list[tuple[int, int, AgendaCallback]] = []
        self._asked = 0

    def after(self, wait_ms: int, callback: AgendaCallback) -> None:
        """Plan a callback ``wait_ms`` from now."""
        self.at(self.now_ms + max(0, wait_ms), callback)

    def at(self, at_ms: int, callback: AgendaCallback) -> None:
        """Plan a callback; one in the past is called now."""
        heapq.heappush(self._heap, (max(at_ms, self.now_ms), self._asked, callback))
        self._asked += 1

    def run(self, until: Callable[[], bool], limit_ms: Milliseconds) -> bool:
        """Call back until ``until`` holds; false when time or work ran out first."""
        while not until():
            if not self._heap or self._heap[0][0] > limit_ms:
                return False
            at_ms, _, callback = heapq.heappop(self._heap)
            self.now_ms = Milliseconds(at_ms)
            self.done += 1
            callback()
        return True


_CLASSES_A_DOUBLING = 1
_CLOSE_MS = 1e-6
_MOVES_A_MS = 50
"""For each so many transfers under way, one may be seen to have ended a millisecond late."""
_WIRE_BITS_A_BYTE = 8 * (1 + STREAM_OVERHEAD) * (1 + PACKET_HEADER_BYTES / 1448)


class SharedTransfer:
    """One transfer."""

    def __init__(self, callback: AgendaCallback) -> None:
        self.callback = callback
        self.bits_per_ms = 0.0
        self.kind = 0
        self.is_gone = False


class _Class:
    """Transfers of like rates."""

    def __init__(self, now_ms: int) -> None:
        self.clock_ms = 0.0
        """How far each transfer has come that has been here from the start."""
        self.looked_ms = now_ms
        self.speed = 1.0
        self.count = 0
        self.bits_per_ms = 0.0
        self.heap: list[tuple[float, int, SharedTransfer]] = []

    @property
    def mean_bits_per_ms(self) -> float:
        """Mean rate of one transfer on its own path."""
        return self.bits_per_ms / self.count

    def advance(self, now_ms: int) -> None:
        """Let the clock run to the present."""
        self.clock_ms += (now_ms - self.looked_ms) * self.speed
        self.looked_ms = now_ms

    def left_ms(self) -> float:
        """Until the first transfer is through, at the present speed."""
        while self.heap and self.heap[0][2].is_gone:
            heapq.heappop(self.heap)
        return (self.heap[0][0] - self.clock_ms) / self.speed if self.heap else inf


class SharedLink:
    """A link's one direction.

    Args:
        agenda: Virtual time.
        bits_per_s: Headers included; 0: no limit.
    """

    def __init__(self, agenda: Agenda, bits_per_s: int) -> None:
        self._agenda = agenda
        self._bits_per_ms = bits_per_s / 1000
        self._classes: dict[int, _Class] = {}
        self._begun = 0
        self._moves = 0
        self._wakes_ms = -1

    def begin(self, move: SharedTransfer, size_bytes: Bytes, own_ms: Milliseconds) -> None:
        """Begin a transfer that takes ``own_ms`` on its own path, and call back at its end."""
        if not self._bits_per_ms:
            self._agenda.after(own_ms, lambda: None if move.is_gone else move.callback())
            return
        now_ms = self._agenda.now_ms
        move.bits_per_ms = max(1, size_bytes) * _WIRE_BITS_A_BYTE / max(1, own_ms)
        move.kind = int(_CLASSES_A_DOUBLING * log2(move.bits_per_ms))
        kind = self._classes.get(move.kind)
        if kind is None:
            kind = self._classes[move.kind] = _Class(now_ms)
        kind.advance(now_ms)
        heapq.heappush(kind.heap, (kind.clock_ms + own_ms, self._begun, move))
        self._begun += 1
        self._moves += 1
        kind.count += 1
        kind.bits_per_ms += move.bits_per_ms
        self._wake_at(now_ms + self._late_ms)

    def drop(self, move: SharedTransfer) -> None:
        """Forget a transfer: it was cut off."""
        if move.is_gone:
            return
        move.is_gone = True
        if self._bits_per_ms:
            self._leave(move)
            self._wake_at(self._agenda.now_ms + self._late_ms)

    @property
    def _late_ms(self) -> int:
        """How late things may be seen to: where many transfers are under way, many at a time."""
        return self._moves // _MOVES_A_MS

    def _leave(self, move: SharedTransfer) -> None:
        kind = self._classes[move.kind]
        self._moves -= 1
        kind.count -= 1
        kind.bits_per_ms -= move.bits_per_ms
        if not kind.count:
            del self._classes[move.kind]

    def _wake_at(self, at_ms: int) -> None:
        """See to the transfers at a time, unless that is planned for an earlier one."""
        if not self._agenda.now_ms <= self._wakes_ms <= at_ms:
            self._wakes_ms = at_ms
            self._agenda.at(at_ms, lambda: self._wake(at_ms))

    def _wake(self, at_ms: int) -> None:
        """End what is through, and deal the rate out anew."""
        if at_ms != self._wakes_ms:
            return
        self._wakes_ms = -1
        ended_moves: list[tuple[int, SharedTransfer]] = []
        for kind in list(self._classes.values()):
            kind.advance(at_ms)
            while kind.left_ms() <= _CLOSE_MS:
                _, order, move = heapq.heappop(kind.heap)
                move.is_gone = True
                ended_moves.append((order, move))
                self._leave(move)
        self._share()
        soonest_ms = min((kind.left_ms() for kind in self._classes.values()), default=inf)
        if soonest_ms < inf:
            self._wake_at(at_ms + max(1, ceil(soonest_ms - _CLOSE_MS)) + self._late_ms)
        for _, move in sorted(ended_moves, key=itemgetter(0)):
            move.callback()

    def _share(self) -> None:
        """Max-min: who wants less than an equal share gets it all, the others share the rest."""
        left_bits_per_ms, moves = self._bits_per_ms, self._moves
        kinds = sorted((kind.mean_bits_per_ms, number) for number, kind in self._classes.items())
        for mean, number in kinds:
            kind = self._classes[number]
            kind.speed = min(1.0, left_bits_per_ms / moves / mean)
            left_bits_per_ms = max(_CLOSE_MS, left_bits_per_ms - kind.count * kind.speed * mean)
            moves -= kind.count
