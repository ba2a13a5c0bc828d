"""One socket of a proxied connection: read into one stream, written from the other."""

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable

from netsim.proxy.clock import LoopClock
from netsim.proxy.flow.stream import ProxyStream, StreamEnd

_READ_BYTES = 256 << 10
_AT_ONCE = 64
"""Pieces in one write, well below the system's limit."""
BUFFER_BYTES = 256 << 10
"""Buffer of a socket, which the kernel holds beside the stream. It would grow to megabytes, in
which a sender's writes would vanish before the link has seen them."""
_QUICK_ACK = getattr(socket, "TCP_QUICKACK", socket.TCP_NODELAY)
"""Linux only, and for the next acknowledgements only; elsewhere what is set already."""
_LINGER_NOT = struct.pack("ii", 1, 0)

NoteLateness = Callable[[int], None]
"""Told by how many microseconds a delivery was late."""


class Side:
    """Reads and writes one socket.

    Args:
        clock: Of the links.
        note_lateness: Told of each delivery.
        closed: Called once, when the socket is gone.
    """

    def __init__(
        self, clock: LoopClock, note_lateness: NoteLateness, closed: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._note_lateness = note_lateness
        self._closed = closed
        self._socket: socket.socket | None = None
        self._outgoing: ProxyStream | None = None
        self._incoming: ProxyStream | None = None
        self._unwritten: deque[memoryview] = deque()
        self._is_reading = False
        self._is_writing = False
        self._has_read_all = False
        self._written_mark: StreamEnd | None = None
        self.is_closed = False

    def join(self, outgoing: ProxyStream, incoming: ProxyStream) -> None:
        """Say which streams it feeds and is fed by. Without them what it reads goes nowhere."""
        self._outgoing = outgoing
        self._incoming = incoming

    @property
    def is_attached(self) -> bool:
        """Whether it has, or had, a socket."""
        return self._socket is not None

    def attach(self, connected: socket.socket) -> None:
        """Take a connected socket, and own it."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self.read_on()
        self._flush()

    def silence(self) -> None:
        """From now on nobody is at the other end: what comes goes nowhere, nothing comes back."""
        self._outgoing = self._incoming = None
        self._unwritten.clear()
        self._stop_writing()
        self.read_on()

    def break_off(self) -> None:
        """Close with a reset, at once."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.close()

    def close(self) -> None:
        """Give the socket back."""
        if self.is_closed:
            return
        self.is_closed = True
        self._pause()
        self._stop_writing()
        if self._socket is not None:
            self._socket.close()
        self._unwritten.clear()
        self._closed()

    # What the stream that arrives here says.

    def take(self, payload: memoryview, due_us: int) -> None:
        """Write what has arrived."""
        self._note_lateness(self._clock.wall_us() - due_us)
        if self.is_closed or self._incoming is None:
            self._report_taken(len(payload))
            return
        self._unwritten.append(payload)
        if not self._is_writing:
            self._flush()

    def conclude(self, mark: StreamEnd) -> None:
        """Nothing more arrives."""
        if self._incoming is None:
            return
        if mark is StreamEnd.RESET:
            self.break_off()
            return
        self._written_mark = mark
        if not self._unwritten:
            self._shut_down()

    def read_on(self) -> None:
        """Read, if there is something to read from."""
        if self._socket is None or self._is_reading or self.is_closed or self._has_read_all:
            return
        self._is_reading = True
        self._loop.add_reader(self._socket, self._readable)

    def _pause(self) -> None:
        if self._is_reading and self._socket is not None:
            self._loop.remove_reader(self._socket)
        self._is_reading = False

    def _stop_writing(self) -> None:
        if self._is_writing and self._socket is not None:
            self._loop.remove_writer(self._socket)
        self._is_writing = False

    def _readable(self) -> None:
        self._clock.catch_up()
        if self._socket is None or not self._is_reading:
            return
        try:
            payload = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lose()
            return
        if not payload:
            self._read_all()
        elif self._outgoing is not None:
            # A sender that waits 40 ms for each delayed acknowledgement is slower than its link.
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)
            self._outgoing.feed(payload)
            if self._outgoing.is_full:
                self._pause()

    def _read_all(self) -> None:
        self._has_read_all = True
        self._pause()
        if self._outgoing is None:
            self.close()
            return
        self._outgoing.end()
        self._close_if_done()

    def _lose(self) -> None:
        """The program behind this socket broke off: the other side hears of it."""
        outgoing = self._outgoing
        self.close()
        if outgoing is not None:
            outgoing.reset()

    def _writable(self) -> None:
        self._clock.catch_up()
        self._flush()

    def _flush(self) -> None:
        while self._unwritten and self._socket is not None and not self.is_closed:
            pieces = [self._unwritten[at] for at in range(min(_AT_ONCE, len(self._unwritten)))]
            try:
                written_bytes = self._socket.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._lose()
                return
            self._forget(written_bytes)
        self._await_writability()
        if not self._unwritten and self._written_mark is not None:
            self._shut_down()

    def _forget(self, written_bytes: int) -> None:
        left_bytes = written_bytes
        while left_bytes:
            first = self._unwritten[0]
            if len(first) > left_bytes:
                self._unwritten[0] = first[left_bytes:]
                break
            left_bytes -= len(first)
            self._unwritten.popleft()
        self._report_taken(written_bytes)

    def _report_taken(self, size_bytes: int) -> None:
        if self._incoming is not None:
            self._incoming.note_written(size_bytes)

    def _await_writability(self) -> None:
        if self._socket is None or self.is_closed:
            return
        if self._unwritten and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._socket, self._writable)
        elif not self._unwritten:
            self._stop_writing()

    def _shut_down(self) -> None:
        if self._socket is None or self.is_closed:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._has_read_all and self._written_mark is not None and not self._unwritten:
            self.close()
