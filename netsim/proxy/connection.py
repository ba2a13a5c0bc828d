"""One proxied TCP connection: two sockets and the two streams between them."""

import asyncio
import errno
import random
import socket
from collections.abc import Callable
from typing import NamedTuple

from coordinator.core.transfer.path import Path
from coordinator.core.transfer.window import Window
from netsim.proxy.clock import LoopClock
from netsim.proxy.flow.stream import ProxyStream
from netsim.proxy.flow.way import HEADER_BYTES, HopPath
from netsim.proxy.side import BUFFER_BYTES, NoteLateness, Side

_FIRST_RETRY_US = 1_000_000
"""Linux: of a connection attempt that nobody answers; twice as long each time."""

Address = tuple[str, int]


class _Ends:
    """What a stream tells goes to two sockets."""

    def __init__(self, receiver: Side, sender: Side) -> None:
        self.take = receiver.take
        self.conclude = receiver.conclude
        self.read_on = sender.read_on


class Surroundings(NamedTuple):
    """What all connections of a node share."""

    there: HopPath
    """From the program that dials to its target."""
    back: HopPath
    models: Callable[[], tuple[Path, Path]]
    """What the transfer model is to know of both ways now."""
    clock: LoopClock
    note_lateness: NoteLateness
    source: str
    """The address that the coordinator sees."""
    key: str
    """Seeds the losses: the seed and the node's name."""


class ProxyConnection:
    """Forwards between a program that dialled and the target, until both have closed.

    Args:
        accepted: The program's socket, owned from here on.
        target: Where it is forwarded to.
        around: The node's ways.
        number: Of the connection at its node, which seeds its losses.
        closed: Called once, when both sockets are gone.
    """

    def __init__(
        self,
        accepted: socket.socket,
        target: Address,
        around: Surroundings,
        *,
        number: int,
        closed: Callable[["ProxyConnection"], None],
    ) -> None:
        self._target = target
        self._around = around
        self._number = number
        self._closed = closed
        self._stuck_since_us: int | None = None
        self._is_silent = False
        self._is_over = False
        self._dialled: socket.socket | None = None
        clock, note = around.clock, around.note_lateness
        self._near = Side(clock, note, self._side_closed)
        self._far = Side(clock, note, self._side_closed)
        self._there = self._stream("there", (around.there, around.back), self._far, self._near)
        self._back = self._stream("back", (around.back, around.there), self._near, self._far)
        self._near.join(self._there, self._back)
        self._far.join(self._back, self._there)
        self._near.attach(accepted)
        self._shake_hands()

    def update_windows(self) -> None:
        """The link has other numbers now."""
        there, back = self._around.models()
        self._there.window.repath(there)
        self._back.window.repath(back)

    def resume_after_cut(self) -> None:
        """Something crosses again."""
        self._there.resume_after_cut()
        self._back.resume_after_cut()
        if self._stuck_since_us is None:
            return
        wait_us, try_us = _FIRST_RETRY_US, self._stuck_since_us + _FIRST_RETRY_US
        while try_us < self._around.clock.now_us:
            wait_us *= 2
            try_us += wait_us
        self._stuck_since_us = None
        self._around.clock.at(try_us, self._shake_hands)

    def silence(self) -> None:
        """From now on each end talks to nobody and is told nothing, for good."""
        self._is_silent = True
        self._near.silence()
        self._far.silence()
        self._hang_up()
        if not self._far.is_attached:
            self._far.close()

    def break_off(self) -> None:
        """Reset both ends at once."""
        self._is_over = True
        self._near.break_off()
        self._far.break_off()
        self._hang_up()

    def _stream(
        self, name: str, ways: tuple[HopPath, HopPath], receiver: Side, sender: Side
    ) -> ProxyStream:
        dice = random.Random(f"{self._around.key}/{self._number}/{name}")
        place = 0 if name == "there" else 1

        def new_window() -> Window:
            return Window(self._around.models()[place], dice.random)

        ends = _Ends(receiver, sender)
        return ProxyStream(*ways, new_window=new_window, clock=self._around.clock, ends=ends)

    def _shake_hands(self) -> None:
        """SYN there, answer back: only then do bytes leave, however soon the kernel accepted."""
        around = self._around
        around.there.carry(HEADER_BYTES, lambda: around.back.carry(HEADER_BYTES, self._open_there))

    def _open_there(self) -> None:
        if self._is_silent or self._is_over:
            return
        around = self._around
        if around.there.is_cut:
            self._stuck_since_us = around.clock.now_us
            return
        self._there.open()
        # The target learns of the connection with the third packet of the handshake.
        around.clock.at(around.clock.now_us + around.there.delay_us, self._dial)

    def _dial(self) -> None:
        if self._is_silent or self._is_over:
            return
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        try:
            dialled = self._dialled = socket.socket(family, socket.SOCK_STREAM)
            dialled.setblocking(False)
            dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            if self._around.source and family == socket.AF_INET:
                dialled.bind((self._around.source, 0))
            error = dialled.connect_ex(self._target)
        except OSError:
            self._not_reached()
            return
        if error in {0, errno.EINPROGRESS}:
            asyncio.get_running_loop().add_writer(dialled, self._dialled_out)
        else:
            self._not_reached()

    def _dialled_out(self) -> None:
        self._around.clock.catch_up()
        dialled = self._dialled
        if dialled is None:
            return
        if dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._not_reached()
            return
        self._dialled = None
        asyncio.get_running_loop().remove_writer(dialled)
        if self._is_silent or self._is_over or self._far.is_closed:
            dialled.close()
            return
        self._far.attach(dialled)
        self._back.open()

    def _not_reached(self) -> None:
        """The target refused: so is the program that dialled, as soon as that gets back to it."""
        self._hang_up()
        self._back.open()
        self._back.reset()
        self._far.close()

    def _hang_up(self) -> None:
        dialled, self._dialled = self._dialled, None
        if dialled is not None:
            asyncio.get_running_loop().remove_writer(dialled)
            dialled.close()

    def _side_closed(self) -> None:
        if self._near.is_closed and self._far.is_closed:
            self._is_over = True
            self._closed(self)
