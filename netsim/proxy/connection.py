"""One proxied TCP connection: two sockets and the two streams between them."""

import asyncio
import random
import socket
from collections.abc import Callable
from typing import NamedTuple

from coordinator.core.transfer.path import NetworkPath
from coordinator.core.transfer.window import Window
from netsim.proxy.clock import LoopClock
from netsim.proxy.hop_path import HEADER_BYTES, HopPath
from netsim.proxy.socket_end import BUFFER_BYTES, NoteLateness, SocketEnd
from netsim.proxy.stream import ProxyStream

_FIRST_RETRY_US = 1_000_000
"""Linux: time until an unanswered connection attempt is repeated; twice as long each time."""

Address = tuple[str, int]


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
        target: Address,
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
        dialled = socket.socket(family, socket.SOCK_STREAM)
        try:
            dialled.setblocking(False)
            dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            if self._paths.source and family == socket.AF_INET:
                dialled.bind((self._paths.source, 0))
            await loop.sock_connect(dialled, self._target)
            await loop.create_connection(lambda: self._far, sock=dialled)
        except OSError:
            dialled.close()
            self._paths.clock.catch_up()
            self._reset_program()
        except asyncio.CancelledError:
            dialled.close()
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
