"""One direction of one TCP connection: every byte arrives, in order; the model says when.

What a loss does to TCP is done to the bytes' times: the window that admits them shrinks, and what
was "lost" arrives late, with everything behind it. Pure but for the clock it is given.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from coordinator.core.network.transfer_forecast import Window
from netsim.proxy.hops import HEADER_BYTES, PACKET_BYTES, FlowClock, HopPath, packets, wire_bytes

UNSENT_BYTES_MAX = 256 << 10
"""Read from the sender's socket and waiting for the window: then reading stops."""
UNREAD_BYTES_MAX = 6 << 20
"""Sent and not yet taken by the receiver's socket: Linux's usual limit of a receive buffer."""
_RTO_FLOOR_US = 200_000
_BACKOFF_US_MAX = 120_000_000


class StreamEnd(Enum):
    """What ends a stream."""

    END = "end"
    RESET = "reset"


class StreamEnds(Protocol):
    """The sockets at both ends of a stream."""

    def deliver(self, payload: memoryview, due_us: int) -> None:
        """Take bytes that arrived; call `ProxyStream.note_written` when the socket has them."""

    def end_stream(self, end: StreamEnd) -> None:
        """Take the end of the stream: nothing more arrives."""

    def resume_reading(self) -> None:
        """Read the sender's socket again: the stream is no longer full."""


class _Parcel(NamedTuple):
    due_us: int
    payload: memoryview
    mark: StreamEnd | None


class ProxyStream:
    """Carries bytes from `feed` to its receiver, as a TCP connection over these ways would.

    Args:
        there: The way of the bytes.
        back: The way of their acknowledgements.
        new_window: A window for the way as it is; asked for again after an outage.
        clock: Its time.
        ends: Whom it tells.
    """

    def __init__(
        self,
        there: HopPath,
        back: HopPath,
        *,
        new_window: Callable[[], Window],
        clock: FlowClock,
        ends: StreamEnds,
    ) -> None:
        self._there = there
        self._back = back
        self._new_window = new_window
        self.window = new_window()
        self._clock = clock
        self._ends = ends
        self._is_open = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._unread_bytes = 0
        self._mark: StreamEnd | None = None
        self._is_waiting = False
        self._arrived: deque[_Parcel] = deque()
        self._last_due_us = 0
        self._outages = 0
        self._stalled_since_us: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether no more should be fed."""
        return self._unsent_bytes >= UNSENT_BYTES_MAX

    def open(self) -> None:
        """Hands are shaken: from now on bytes leave."""
        self._is_open = True
        self._send_ready()

    def feed(self, payload: bytes) -> None:
        """Take what the sender wrote."""
        self._unsent.append(memoryview(payload))
        self._unsent_bytes += len(payload)
        self._send_ready()

    def end(self) -> None:
        """The sender writes no more; what it wrote still arrives, then the end."""
        self._mark = StreamEnd.END
        self._send_ready()

    def reset(self) -> None:
        """The sender broke off: what had not left yet is lost, as it would be."""
        self._unsent.clear()
        self._unsent_bytes = 0
        self._mark = StreamEnd.RESET
        self._send_ready()

    def note_written(self, size_bytes: int) -> None:
        """The receiver's socket took bytes."""
        was_full = self._unread_bytes >= UNREAD_BYTES_MAX
        self._unread_bytes -= size_bytes
        if was_full:
            self._send_ready()

    def resume_after_cut(self) -> None:
        """Something crosses again: what was lost meanwhile goes out when its timer next rings.

        TCP tries after one timeout, then after two more, four more and so on, so the way back takes
        up to as long again as the outage.
        """
        if self._stalled_since_us is None:
            return
        timeout_us = self._there.delay_us + self._back.delay_us + _RTO_FLOOR_US
        try_us = self._stalled_since_us + timeout_us
        while try_us < self._clock.now_us:
            timeout_us = min(2 * timeout_us, _BACKOFF_US_MAX)
            try_us += timeout_us
        self._clock.at(try_us, self._resume)

    def _resume(self) -> None:
        if self._there.is_cut or self._stalled_since_us is None:
            return
        self._stalled_since_us = None
        self._outages += 1
        self.window = self._new_window()
        # What had not arrived is sent again; what had is a repetition, and nobody notices.
        self._last_due_us = self._clock.now_us + self._there.delay_us
        self._arrived = deque(parcel._replace(due_us=self._last_due_us) for parcel in self._arrived)
        self._clock.at(self._last_due_us, self._deliver)
        self._send_ready()

    def _note_stall(self) -> None:
        if self._stalled_since_us is None:
            self._stalled_since_us = self._clock.now_us

    def _send_ready(self) -> None:
        """Send what may be sent."""
        while self._is_open and not self._is_waiting and (self._unsent or self._mark):
            if self._there.is_cut:
                self._note_stall()
            if self._stalled_since_us is not None:
                return
            if not self._unsent:
                mark, self._mark = self._mark, None
                self._carry(memoryview(b""), 0, mark)
                return
            size_bytes = self._admitted_bytes()
            if not size_bytes or self._must_wait(size_bytes):
                return
            self._send(size_bytes)

    def _admitted_bytes(self) -> int:
        """What window and receiver admit; nothing when one of them has to answer first."""
        if self._unread_bytes >= UNREAD_BYTES_MAX:
            return 0
        window = self.window
        size_bytes = min(self._unsent_bytes, self._there.parcel_bytes)
        room_bytes = window.window_bytes(self._clock.now_us) - window.in_flight_bytes
        if room_bytes < size_bytes:
            # Whole packets, so that the window is no heap of crumbs.
            size_bytes = max(0, room_bytes) // PACKET_BYTES * PACKET_BYTES
        # A parcel ends with the packet that is lost: what is before it arrives in time.
        return min(size_bytes, max(PACKET_BYTES, window.next_loss_bytes))

    def _must_wait(self, size_bytes: int) -> bool:
        full = self._there.full_hop(wire_bytes(size_bytes))
        if full is not None:
            self._is_waiting = True
            full.when_room(self._room_again)
        return full is not None

    def _room_again(self) -> None:
        self._is_waiting = False
        self._send_ready()

    def _send(self, size_bytes: int) -> None:
        was_full = self.is_full
        payload = self._cut_off(size_bytes)
        self._unsent_bytes -= size_bytes
        self._unread_bytes += size_bytes
        self._carry(payload, self.window.send(size_bytes, self._clock.now_us), None)
        if was_full and not self.is_full:
            self._ends.resume_reading()

    def _cut_off(self, size_bytes: int) -> memoryview:
        """Take so many bytes off the front. Small writes that waited travel together."""
        first = self._unsent[0]
        if len(first) > size_bytes:
            self._unsent[0] = first[size_bytes:]
            return first[:size_bytes]
        if len(first) == size_bytes:
            return self._unsent.popleft()
        buffer = bytearray()
        while len(buffer) < size_bytes:
            first = self._unsent.popleft()
            missing_bytes = size_bytes - len(buffer)
            buffer += first[:missing_bytes]
            if len(first) > missing_bytes:
                self._unsent.appendleft(first[missing_bytes:])
        return memoryview(bytes(buffer))

    def _carry(self, payload: memoryview, extra_us: int, mark: StreamEnd | None) -> None:
        outages = self._outages

        def arrive() -> None:
            if self._there.is_cut:
                self._note_stall()
            elif payload:
                # One acknowledgement for two packets, which take their share of the way back.
                headers_bytes = (packets(len(payload)) + 1) // 2 * HEADER_BYTES
                self._back.carry(headers_bytes, take_acknowledgement)
            self._queue_arrival(payload, extra_us, mark)

        def take_acknowledgement() -> None:
            if self._there.is_cut:
                self._note_stall()
            elif outages == self._outages:
                self.window.acknowledge(len(payload), self._clock.now_us)
                self._send_ready()

        self._there.carry(wire_bytes(len(payload)), arrive)

    def _queue_arrival(self, payload: memoryview, extra_us: int, mark: StreamEnd | None) -> None:
        """Put an arrival in line behind what came before it, and behind what that waits for."""
        self._last_due_us = max(self._last_due_us, self._clock.now_us + extra_us)
        self._arrived.append(_Parcel(self._last_due_us, payload, mark))
        if self._last_due_us > self._clock.now_us:
            self._clock.at(self._last_due_us, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        if self._there.is_cut and self._arrived:
            self._note_stall()
        while self._arrived and self._stalled_since_us is None:
            if self._arrived[0].due_us > self._clock.now_us:
                return
            due_us, payload, mark = self._arrived.popleft()
            if mark is None:
                self._there.delivered_bytes += len(payload)
                self._ends.deliver(payload, due_us)
            else:
                self._ends.end_stream(mark)
