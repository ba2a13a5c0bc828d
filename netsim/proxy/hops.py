"""One direction of a node's way: bottlenecks with buffers in a row, and the clock they run on.

A callback sees the moment that was asked for, not the later one at which the loop came to it: a
loop that wakes late delays what it writes then, and nothing after it. A bottleneck's rate is read
when a parcel is served: a queue that a slow second has filled drains at the next second's rate.
"""

import asyncio
import ctypes
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator.core.network.tcp import CongestionControl, NetworkPath
from hypergpu.units import Microseconds
from netsim.link import LinkDirection

Callback = Callable[[], None]


class FlowClock(Protocol):
    """Calls back in the order of moments; a callback sees its own moment as the present."""

    now_us: Microseconds
    """Since the clock was made."""

    def at(self, due_us: int, callback: Callback) -> None:
        """Plan a callback; one in the past is called at once, after those before it."""


_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_AT_A_TIME = 500
"""Callbacks before sockets are looked at again."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Alarm:
    """One moment at which a callback is called; setting another moment forgets the first.

    Linux's timerfd, which an epoll loop waits for like for any file and which rounds nothing up,
    where ``call_at`` is half a millisecond late on average.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._spec = _TimerSpec()
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        loop.add_reader(self._file, self._ring_alarm)

    def set(self, at_us: Microseconds) -> None:
        """Ring at ``at_us`` of the monotonic clock; at once when that is past."""
        seconds, left_us = divmod(max(at_us, 1), 1_000_000)
        self._spec.value.seconds = seconds
        self._spec.value.nanoseconds = left_us * 1000
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._spec), None)

    def close(self) -> None:
        """Give the file back."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _ring_alarm(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return  # it was set to a later moment in between
        self._callback()


class LoopClock:
    """A heap of callbacks on an event loop. Time begins at 0 when it is made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._start_us = time.monotonic_ns() // 1000
        self.now_us = Microseconds(0)
        self._alarm = Alarm(loop, self._ring)
        self._set_to_us: int | None = None
        self._heap: list[tuple[int, int, Callback]] = []
        self._asked = 0

    def at(self, due_us: int, callback: Callback) -> None:
        """Plan a callback; one in the past is called at once, after those before it."""
        heapq.heappush(self._heap, (due_us, self._asked, callback))
        self._asked += 1
        if self._set_to_us is None or due_us < self._set_to_us:
            self._set_to_us = due_us
            self._alarm.set(Microseconds(self._start_us + due_us))

    def wall_us(self) -> Microseconds:
        """The present, whatever callback runs."""
        return Microseconds(time.monotonic_ns() // 1000 - self._start_us)

    def catch_up(self) -> None:
        """Do what is due, then the present is now. On an event of a socket, read before."""
        wall_us = self.wall_us()
        for _ in range(_AT_A_TIME):
            if not self._heap or self._heap[0][0] > wall_us:
                break
            due_us, _, callback = heapq.heappop(self._heap)
            self.now_us = Microseconds(due_us)
            callback()
        self.now_us = wall_us

    def close(self) -> None:
        """Forget everything that was planned."""
        self._heap.clear()
        self._alarm.close()

    def _ring(self) -> None:
        # Callbacks that plan callbacks must not set the alarm each; it is set once, below.
        self._set_to_us = -1
        try:
            self.catch_up()
        finally:
            # A callback that fails must not stop the links of all the others.
            self._set_to_us = self._heap[0][0] if self._heap else None
            if self._set_to_us is not None:
                self._alarm.set(Microseconds(self._start_us + self._set_to_us))


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
        self._queue: deque[tuple[int, Callback]] = deque()
        self._queued_bytes = 0
        self._service = 0
        """Number of the service under way; an older one's end means nothing."""
        self._service_ends_us = 0
        self._owed = 0
        self._is_serving = False
        self._is_stopped = False
        self._last_out_us = 0
        self._waiting: deque[Callback] = deque()

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

    def when_room(self, callback: Callback) -> None:
        """Do this once when something has left the buffer; who asked first goes first."""
        self._waiting.append(callback)

    def carry(self, wire_bytes: int, out: Callback) -> None:
        """Take a parcel, room or none; ``out`` is done when it comes out at the other end."""
        if not self._direction.bits_per_s and not self._queue and not self._is_stopped:
            self._propagate(out)
            return
        self._queue.append((wire_bytes, out))
        self._queued_bytes += wire_bytes
        if not self._is_serving and not self._is_stopped:
            self._serve_next()

    def _propagate(self, out: Callback) -> None:
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


PACKET_BYTES = 1_448
"""Payload of a full packet: 1,500 less IPv4, TCP and its timestamps."""
HEADER_BYTES = 52
_PARCEL_PACKETS_MAX = 45
"""About 64 KiB: large enough for a gigabit, small enough not to keep other sockets waiting."""
_PARCELS_PER_S = 1_000
"""A parcel arrives whole, so that it takes the bottleneck a millisecond at most."""


class HopPath:
    """Hops that parcels pass one after another. Shared by all connections of a node."""

    def __init__(self, hops: Sequence[Hop]) -> None:
        self.hops = tuple(hops)
        self.is_cut = False
        """Nothing crosses; what is sent meanwhile has to be sent again, or is lost."""
        self.delivered_bytes = 0
        """Bytes of streams, taken off at the end."""
        self.parcel_bytes = 0
        """Payload that travels in one piece at most, in whole packets."""
        self.delay_us = 0
        """Propagation, without queues and jitter."""
        self.update_totals()

    def update_totals(self) -> None:
        """A hop is another one now."""
        rate = self._narrowest().bits_per_s
        packets = rate // (8 * (PACKET_BYTES + HEADER_BYTES) * _PARCELS_PER_S)
        most = min(max(1, packets), _PARCEL_PACKETS_MAX) if rate else _PARCEL_PACKETS_MAX
        self.parcel_bytes = most * PACKET_BYTES
        self.delay_us = sum(hop.direction.delay_us for hop in self.hops)

    def model(self, back: "HopPath", control: CongestionControl) -> NetworkPath:
        """What the transfer model is to know of this way."""
        narrowest = self._narrowest()
        lossiest = max((hop.direction for hop in self.hops), key=lambda each: each.loss)
        arrives = 1.0
        for hop in self.hops:
            arrives *= 1 - hop.direction.loss
        return NetworkPath(
            rtt_us=Microseconds(self.delay_us + back.delay_us),
            bits_per_s=narrowest.bits_per_s,
            loss=1 - arrives,
            burst_packets=lossiest.burst_packets,
            queue_ms=narrowest.queue_ms,
            congestion_control=control,
        )

    def full_hop(self, wire_bytes: int) -> Hop | None:
        """The first hop whose buffer has no room."""
        for hop in self.hops:
            if not hop.has_room(wire_bytes):
                return hop
        return None

    def carry(self, wire_bytes: int, out: Callback, *, behind: int = 0) -> None:
        """Send a parcel through the hops behind the first ``behind``; ``out`` is its arrival."""
        if behind == len(self.hops):
            out()
            return
        self.hops[behind].carry(wire_bytes, lambda: self.carry(wire_bytes, out, behind=behind + 1))

    def _narrowest(self) -> LinkDirection:
        directions = (hop.direction for hop in self.hops)
        return min(directions, key=lambda each: each.bits_per_s or 1 << 62)


def wire_bytes(payload_bytes: int) -> int:
    """What a payload takes of a link's rate, headers included; an empty packet is a header."""
    return payload_bytes + packets(payload_bytes) * HEADER_BYTES


def packets(payload_bytes: int) -> int:
    """How many packets a payload travels in; one at least."""
    return max(1, -(-payload_bytes // PACKET_BYTES))
