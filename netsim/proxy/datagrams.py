"""UDP: each datagram is delayed, queued, lost, doubled or overtaken by itself."""

import asyncio
import random
import socket
from collections.abc import Callable
from typing import NamedTuple

from netsim.emulation.requests import PacketCount
from netsim.link import LinkDirection, LossChain
from netsim.proxy.connection import NoteLateness, SocketAddress
from netsim.proxy.hops import HopPath, LoopClock

HEADER_BYTES = 28
"""IPv4 20, UDP 8."""
_READ_BYTES = 65_535
_AT_ONCE = 32
_BUFFER_BYTES = 4 << 20
_PEERS_MAX = 1_024
"""Programs that send through one port; the one that was silent longest makes room."""


class DatagramDice:
    """Draws losses, doubles and overtaking of one direction. Equal keys give equal draws."""

    def __init__(self, direction: LinkDirection, key: str) -> None:
        self._direction = direction
        self._order = random.Random(f"{key}/order")
        self._doubling = random.Random(f"{key}/doubling")
        self._loss = LossChain(
            direction.loss, direction.burst_packets, dice=random.Random(f"{key}/loss")
        )

    def change(self, direction: LinkDirection) -> None:
        """Other numbers; a burst of losses that has begun goes on."""
        if (direction.loss, direction.burst_packets) != (
            self._direction.loss,
            self._direction.burst_packets,
        ):
            self._loss.change(direction.loss, direction.burst_packets)
        self._direction = direction

    def is_lost(self, now_us: int) -> bool:
        """Whether the datagram that is sent now is lost."""
        return self._loss.is_lost(now_us)

    def is_doubled(self) -> bool:
        """Whether the datagram arrives twice."""
        return self._doubling.random() < self._direction.duplication

    def is_overtaking(self) -> bool:
        """Whether the datagram goes past those that are under way."""
        return self._order.random() < self._direction.reordering


class DatagramPath(NamedTuple):
    """One direction of a node, for datagrams."""

    way: HopPath
    dice: DatagramDice
    counts: PacketCount
    clock: LoopClock
    note_lateness: NoteLateness

    def send(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Let a datagram of this payload set out."""
        self.counts.offered += 1
        if self.way.is_cut or self.dice.is_lost(self.clock.now_us):
            self.counts.lost += 1
            return
        self._set_out(size_bytes, arrive)
        if self.dice.is_doubled():
            self.counts.duplicated += 1
            self._set_out(size_bytes, arrive)

    def _set_out(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        wire_bytes = size_bytes + HEADER_BYTES
        if self.way.full_hop(wire_bytes) is not None:
            self.counts.overflowed += 1
            return
        if self.dice.is_overtaking():
            # As netem has it: it goes at once, past everything that is under way.
            self.counts.overtaking += 1
            self._arrive(arrive)
            return
        self.way.carry(wire_bytes, lambda: self._arrive(arrive))

    def _arrive(self, arrive: Callable[[], None]) -> None:
        if self.way.is_cut:
            self.counts.lost += 1
            return
        self.counts.delivered += 1
        self.note_lateness(self.clock.wall_us() - self.clock.now_us)
        arrive()


class DatagramPort:
    """A port that programs send to, and for each of them a socket towards the target."""

    def __init__(
        self,
        listening: socket.socket,
        target: SocketAddress,
        *,
        there: DatagramPath,
        back: DatagramPath,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._target = target
        self._there = there
        self._back = back
        self._peers: dict[SocketAddress, socket.socket] = {}
        listening.setblocking(False)
        # What the kernel drops while the loop is busy would be a loss that nobody asked for.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._loop.add_reader(listening, self._readable)

    def close(self) -> None:
        """Give every socket back."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for peer in list(self._peers):
            self._drop(peer)

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                payload, peer = self._listening.recvfrom(_READ_BYTES)
            except OSError:
                return
            # Once it is here: a clock read before it came would have it arrive early.
            self._there.clock.catch_up()
            self._there.send(len(payload), self._forwarding(payload, peer))

    def _forwarding(self, payload: bytes, peer: SocketAddress) -> Callable[[], None]:
        def forward() -> None:
            if self._listening.fileno() >= 0:
                _send(self._towards_target(peer), payload, None)

        return forward

    def _towards_target(self, peer: SocketAddress) -> socket.socket:
        # The order of the dictionary is that of use.
        towards = self._peers.pop(peer, None)
        if towards is None:
            if len(self._peers) >= _PEERS_MAX:
                self._drop(next(iter(self._peers)))
            family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
            towards = socket.socket(family, socket.SOCK_DGRAM)
            towards.setblocking(False)
            towards.connect(self._target)
            self._loop.add_reader(towards, self._return_answers, towards, peer)
        self._peers[peer] = towards
        return towards

    def _return_answers(self, towards: socket.socket, peer: SocketAddress) -> None:
        for _ in range(_AT_ONCE):
            try:
                payload = towards.recv(_READ_BYTES)
            except OSError:
                return
            self._back.clock.catch_up()
            self._back.send(len(payload), self._answering(payload, peer))

    def _answering(self, payload: bytes, peer: SocketAddress) -> Callable[[], None]:
        def answer() -> None:
            if self._listening.fileno() >= 0:
                _send(self._listening, payload, peer)

        return answer

    def _drop(self, peer: SocketAddress) -> None:
        towards = self._peers.pop(peer)
        self._loop.remove_reader(towards)
        towards.close()


def _send(through: socket.socket, payload: bytes, peer: SocketAddress | None) -> None:
    """A datagram that the kernel will not take is lost, as any network may lose one."""
    try:
        if peer is None:
            through.send(payload)
        else:
            through.sendto(payload, peer)
    except OSError:
        return
