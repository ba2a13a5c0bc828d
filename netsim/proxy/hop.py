"""One bottleneck with its buffer, and the wire behind it. Pure but for the clock it is given.

The rate is read when a parcel is served, not when it comes: a queue that a slow second has filled
drains at the next second's rate.
"""

from collections import deque
from collections.abc import Callable

from netsim.link import LinkDirection
from netsim.proxy.clock import Deed, FlowClock

QUEUE_BYTES_MIN = 3_000
"""Two packets: with fewer nothing could follow anything."""
_UNLIMITED_BYTES = 4 << 20
"""Buffer of a hop without a rate, which only queues while it stands still."""

Delay = Callable[[int], int]
"""What a parcel that leaves the bottleneck at a moment takes from there, jitter included."""


class Hop:
    """Takes parcels in, gives them out later and in order."""

    def __init__(
        self, direction: LinkDirection, delay: Delay, clock: FlowClock, *, room_bytes: int = 0
    ) -> None:
        self._clock = clock
        self._direction = direction
        self._delay = delay
        self._room_bytes = room_bytes or usual_room_bytes(direction)
        self._queue: deque[tuple[int, Deed]] = deque()
        self._queued_bytes = 0
        self._service = 0
        """Number of the service under way; an older one's end means nothing."""
        self._service_ends_us = 0
        self._owed = 0
        self._is_serving = False
        self._is_stopped = False
        self._last_out_us = 0
        self._waiting: deque[Deed] = deque()

    @property
    def direction(self) -> LinkDirection:
        """What it is now."""
        return self._direction

    def change(self, direction: LinkDirection, delay: Delay) -> None:
        """Carry on with other numbers; what is queued stays and is served as they say.

        The buffer stays as large as it was: memory does not shrink with the rate.
        """
        left_bits = 0
        if self._is_serving:
            left_us = max(0, self._service_ends_us - self._clock.now_us)
            left_bits = -(-left_us * self._direction.bits_per_s // 1_000_000)
        self._direction = direction
        self._delay = delay
        self._owed = 0
        if self._is_serving:
            self._serve(left_bits)

    def replace(self, direction: LinkDirection, delay: Delay) -> None:
        """Be another link, with its own buffer."""
        self._room_bytes = usual_room_bytes(direction)
        self.change(direction, delay)

    def stop(self) -> None:
        """Serve nothing until `resume`. What is on the wire still arrives."""
        self._is_stopped = True
        self._is_serving = False
        self._service += 1

    def resume(self) -> None:
        """Serve again."""
        self._is_stopped = False
        if not self._is_serving:
            self._serve_next()

    def has_room(self, wire_bytes: int) -> bool:
        """Whether the buffer takes so much more. An empty one takes anything."""
        return not self._queue or self._queued_bytes + wire_bytes <= self._room_bytes

    def when_room(self, deed: Deed) -> None:
        """Do this once when something has left the buffer; who asked first goes first."""
        self._waiting.append(deed)

    def carry(self, wire_bytes: int, out: Deed) -> None:
        """Take a parcel, room or none; ``out`` is done when it comes out at the other end."""
        if not self._direction.bits_per_s and not self._queue and not self._is_stopped:
            self._propagate(out)
            return
        self._queue.append((wire_bytes, out))
        self._queued_bytes += wire_bytes
        if not self._is_serving and not self._is_stopped:
            self._serve_next()

    def _propagate(self, out: Deed) -> None:
        now_us = self._clock.now_us
        # A change of the link may shorten the delay; even then nothing overtakes.
        self._last_out_us = max(self._last_out_us, now_us + self._delay(now_us))
        self._clock.at(self._last_out_us, out)

    def _serve_next(self) -> None:
        if self._queue:
            self._serve(self._queue[0][0] * 8)

    def _serve(self, bits: int) -> None:
        rate = self._direction.bits_per_s
        self._service += 1
        self._is_serving = True
        number = self._service
        self._service_ends_us = self._clock.now_us
        if rate:
            # Fractions of a microsecond are carried over: 2 us parcels would be 30 % off.
            whole = bits * 1_000_000 + self._owed
            self._service_ends_us += whole // rate
            self._owed = whole % rate
        self._clock.at(self._service_ends_us, lambda: self._finish_service(number))

    def _finish_service(self, number: int) -> None:
        if number != self._service:
            return
        self._is_serving = False
        wire_bytes, out = self._queue.popleft()
        self._queued_bytes -= wire_bytes
        self._propagate(out)
        self._serve_next()
        for _ in range(len(self._waiting)):
            if not self.has_room(QUEUE_BYTES_MIN):
                break
            self._waiting.popleft()()


def usual_room_bytes(direction: LinkDirection) -> int:
    """How much may wait before a bottleneck: ``queue_ms`` at its rate."""
    rate = direction.bits_per_s
    return max(QUEUE_BYTES_MIN, rate * direction.queue_ms // 8_000) if rate else _UNLIMITED_BYTES
