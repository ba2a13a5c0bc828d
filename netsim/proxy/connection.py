"""One proxied TCP connection: its two sockets, and the two streams between them."""

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from coordinator.core.network.tcp import NetworkPath
from coordinator.core.network.transfer_forecast import Window
from netsim.proxy.hops import HEADER_BYTES, HopPath, LoopClock
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
                plain_socket: socket.socket = self._transport.get_extra_info("socket")
                plain_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
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
        plain_socket: socket.socket = self._transport.get_extra_info("socket")
        plain_socket.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)
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
        outgoing_stream = self._outgoing
        self.close()
        if outgoing_stream is not None:
            outgoing_stream.reset()

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


_FIRST_RETRY_US = 1_000_000
"""Linux: time until an unanswered connection attempt is repeated; twice as long each time."""

SocketAddress = tuple[str, int]


class _StreamEnds:
    """Passes a stream's calls to two sockets."""

    def __init__(self, receiver: SocketEnd, sender: SocketEnd) -> None:
        self.deliver = receiver.deliver
        self.end_stream = receiver.end_stream
        self.resume_reading = sender.resume_reading


class NodePaths(NamedTuple):
    """The paths that all connections of a node share."""

    there: HopPath
    """From the program that dials to its target."""
    back: HopPath
    models: Callable[[], tuple[NetworkPath, NetworkPath]]
    """The transfer model's view of both directions now."""
    clock: LoopClock
    note_lateness: NoteLateness
    source: str
    """The address that the coordinator sees."""
    key: str
    """Seeds the losses: the seed and the node's name."""


class ProxyConnection:
    """Forwards between a program that dialled and the target, until both have closed.

    Args:
        target: Where it is forwarded to.
        paths: The node's paths.
        number: Number of the connection at its node, which seeds its losses.
        on_closed: Called once, when both sockets are gone.
    """

    def __init__(
        self,
        target: SocketAddress,
        paths: NodePaths,
        *,
        number: int,
        on_closed: Callable[["ProxyConnection"], None],
    ) -> None:
        self._target = target
        self._paths = paths
        self._number = number
        self._on_closed = on_closed
        self._unanswered_since_us: int | None = None
        self._is_silent = False
        self._is_over = False
        self._dialling: asyncio.Task[None] | None = None
        clock, note = paths.clock, paths.note_lateness
        self.near = SocketEnd(clock, note, self._note_closed_end)
        """The end of the program that dialled."""
        self._far = SocketEnd(clock, note, self._note_closed_end)
        self._there = self._stream("there", (paths.there, paths.back), self._far, self.near)
        self._back = self._stream("back", (paths.back, paths.there), self.near, self._far)
        self.near.join(self._there, self._back)
        self._far.join(self._back, self._there)
        self._start_handshake()

    def update_windows(self) -> None:
        """Give both windows the link's present numbers."""
        there, back = self._paths.models()
        self._there.window.change_path(there)
        self._back.window.change_path(back)

    def resume_after_cut(self) -> None:
        """Go on when the next retransmission timer would ring: the link is open again."""
        self._there.resume_after_cut()
        self._back.resume_after_cut()
        if self._unanswered_since_us is None:
            return
        wait_us, try_us = _FIRST_RETRY_US, self._unanswered_since_us + _FIRST_RETRY_US
        while try_us < self._paths.clock.now_us:
            wait_us *= 2
            try_us += wait_us
        self._unanswered_since_us = None
        self._paths.clock.at(try_us, self._start_handshake)

    def silence(self) -> None:
        """Forward and answer nothing from now on, for good."""
        self._is_silent = True
        self.near.silence()
        self._far.silence()
        self._stop_dialling()
        if not self._far.is_attached:
            self._far.close()

    def abort(self) -> None:
        """Reset both ends at once."""
        self._is_over = True
        self.near.abort()
        self._far.abort()
        self._stop_dialling()

    def _stream(
        self, name: str, paths: tuple[HopPath, HopPath], receiver: SocketEnd, sender: SocketEnd
    ) -> ProxyStream:
        dice = random.Random(f"{self._paths.key}/{self._number}/{name}")
        place = 0 if name == "there" else 1

        def new_window() -> Window:
            return Window(self._paths.models()[place], dice.random)

        ends = _StreamEnds(receiver, sender)
        return ProxyStream(*paths, new_window=new_window, clock=self._paths.clock, ends=ends)

    def _start_handshake(self) -> None:
        """SYN there, answer back: only then do bytes leave, however soon the kernel accepted."""
        paths = self._paths
        paths.there.carry(HEADER_BYTES, lambda: paths.back.carry(HEADER_BYTES, self._open_there))

    def _open_there(self) -> None:
        if self._is_silent or self._is_over:
            return
        clock, there = self._paths.clock, self._paths.there
        if there.is_cut:
            self._unanswered_since_us = clock.now_us
            return
        self._there.open()
        # The target learns of the connection with the third packet of the handshake.
        clock.at(clock.now_us + there.delay_us, self._start_dialling)

    def _start_dialling(self) -> None:
        if not (self._is_silent or self._is_over):
            self._dialling = asyncio.create_task(self._dial())

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        far_socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            far_socket.setblocking(False)
            far_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            if self._paths.source and family == socket.AF_INET:
                far_socket.bind((self._paths.source, 0))
            await loop.sock_connect(far_socket, self._target)
            await loop.create_connection(lambda: self._far, sock=far_socket)
        except OSError:
            far_socket.close()
            self._paths.clock.catch_up()
            self._reset_program()
        except asyncio.CancelledError:
            far_socket.close()
            raise
        else:
            self._paths.clock.catch_up()
            self._back.open()

    def _reset_program(self) -> None:
        """The target refused: so is the program that dialled, as soon as that gets back to it."""
        self._back.open()
        self._back.reset()
        self._far.close()

    def _stop_dialling(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()

    def _note_closed_end(self) -> None:
        if self.near.is_closed and self._far.is_closed:
            self._is_over = True
            self._on_closed(self)
