"""One socket of a proxied connection: read into one stream, written from the other."""

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable

from netsim.proxy.clock import LoopClock
from netsim.proxy.stream import ProxyStream, StreamEnd

BUFFER_BYTES = 256 << 10
"""Buffer of a socket, which the kernel holds beside the stream. It would grow to megabytes, in
which a sender's writes would vanish before the link has seen them."""
_QUICK_ACK = getattr(socket, "TCP_QUICKACK", socket.TCP_NODELAY)
"""Linux only, and for the next acknowledgements only; elsewhere what is set already."""
_NO_LINGER = struct.pack("ii", 1, 0)

NoteLateness = Callable[[int], None]
"""Told by how many microseconds a delivery was late."""


class SocketEnd(asyncio.Protocol):
    """Reads and writes one socket.

    Args:
        clock: The links' clock.
        note_lateness: Told of each delivery.
        on_closed: Called once, when the socket is gone.
    """

    def __init__(
        self, clock: LoopClock, note_lateness: NoteLateness, on_closed: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._note_lateness = note_lateness
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._outgoing: ProxyStream | None = None
        self._incoming: ProxyStream | None = None
        self._unwritten: deque[memoryview] = deque()
        self._can_write = False
        self._has_read_all = False
        self._stream_end: StreamEnd | None = None
        self.is_closed = False

    def join(self, outgoing: ProxyStream, incoming: ProxyStream) -> None:
        """Name the streams that it feeds and is fed by. Without them its bytes are dropped."""
        self._outgoing = outgoing
        self._incoming = incoming

    @property
    def is_attached(self) -> bool:
        """Whether it has, or had, a socket."""
        return self._transport is not None

    def silence(self) -> None:
        """Drop all bytes from now on, and answer nothing."""
        self._outgoing = self._incoming = None
        self._unwritten.clear()
        self.resume_reading()

    def abort(self) -> None:
        """Close with a reset, at once."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                opened: socket.socket = self._transport.get_extra_info("socket")
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        self.close()

    def close(self) -> None:
        """Close the socket once its buffer is written."""
        if self.is_closed:
            return
        self.is_closed = True
        self._unwritten.clear()
        if self._transport is not None:
            self._transport.close()
        self._on_closed()

    # Calls of the stream that arrives here.

    def deliver(self, payload: memoryview, due_us: int) -> None:
        """Write bytes that have arrived."""
        self._note_lateness(self._clock.wall_us() - due_us)
        if self._incoming is None:
            return
        if self.is_closed:
            self._incoming.note_written(len(payload))
            return
        self._unwritten.append(payload)
        self._flush()

    def end_stream(self, end: StreamEnd) -> None:
        """Pass the end of the stream on to the socket, behind its bytes."""
        if self._incoming is None:
            return
        if end is StreamEnd.RESET:
            self.abort()
            return
        self._stream_end = end
        self._flush()

    def resume_reading(self) -> None:
        """Read, if there is something to read from."""
        if self._transport is not None and not self.is_closed:
            self._transport.resume_reading()

    # Calls of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Own a connected socket."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream socket
        if self.is_closed:
            transport.abort()
            return
        self._transport = transport
        self._can_write = True
        # Parcels stay here until the socket takes them, so that the stream sees a slow reader.
        transport.set_write_buffer_limits(high=0)
        self._flush()

    def data_received(self, payload: bytes) -> None:
        """Feed the stream; a full one stops the reading."""
        self._clock.catch_up()
        if self._outgoing is None or self._transport is None or self.is_closed:
            return
        # A sender that waits 40 ms for each delayed acknowledgement is slower than its link.
        opened: socket.socket = self._transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)
        self._outgoing.feed(payload)
        if self._outgoing.is_full:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """End the stream; the other direction may go on."""
        self._clock.catch_up()
        self._has_read_all = True
        if self._outgoing is None:
            self.close()
        else:
            self._outgoing.end()
            self._close_if_done()
        return True

    def pause_writing(self) -> None:
        """The socket takes no more."""
        self._can_write = False

    def resume_writing(self) -> None:
        """The socket takes bytes again."""
        self._clock.catch_up()
        self._can_write = True
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Reset the other side where the program behind this socket broke off."""
        if self.is_closed:
            return
        self._clock.catch_up()
        outgoing = self._outgoing
        self.close()
        if outgoing is not None:
            outgoing.reset()

    def _flush(self) -> None:
        while self._unwritten and self._can_write and self._transport is not None:
            payload = self._unwritten.popleft()
            self._transport.write(payload)
            if self._incoming is not None:
                self._incoming.note_written(len(payload))
        has_written_all = self._stream_end is not None and not self._unwritten
        if has_written_all and self._transport is not None and not self.is_closed:
            # The peer may have reset the connection already.
            with contextlib.suppress(OSError):
                self._transport.write_eof()
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._has_read_all and self._stream_end is not None and not self._unwritten:
            self.close()
