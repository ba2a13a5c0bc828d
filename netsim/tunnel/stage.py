"""One direction of one link: loss, a queue before a bottleneck, propagation with jitter.

Every step happens at the instant at which it was due, however late the router gets to it, so that
lateness never adds up and never changes a rate. Nothing here reads a clock; instants are
nanoseconds since the router began.
"""

import heapq
from collections import deque
from collections.abc import Callable
from random import Random

from netsim.emulation.requests import PacketCount
from netsim.link import LinkDirection, LossChain, WanderingDelay

Act = Callable[[int, bytes], None]
"""An effect on a packet at an instant."""

NS_PER_US = 1000
BITS_NS = 8 * 10**9
NEVER_NS = 1 << 62


class Calendar:
    """Acts by their instants; those of one instant keep the order in which they were entered."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Act, bytes]] = []
        self._entered = 0

    def add(self, due_ns: int, act: Act, packet: bytes) -> None:
        """Enter an act, which may be due already."""
        self._entered += 1
        heapq.heappush(self._entries, (due_ns, self._entered, act, packet))

    def next_ns(self) -> int:
        """Return when something is due next."""
        return self._entries[0][0] if self._entries else NEVER_NS

    def forget(self, act: Act) -> None:
        """Strike out an act, however often it was entered."""
        self._entries[:] = [entry for entry in self._entries if entry[2] is not act]
        heapq.heapify(self._entries)

    def run_until(self, now_ns: int) -> None:
        """Perform what is due, each with the instant at which it was."""
        entries = self._entries
        while entries and entries[0][0] <= now_ns:
            due_ns, _, act, packet = heapq.heappop(entries)
            act(due_ns, packet)


class PacketPath:
    """Packets from or to one other host, which propagate for a time of their own.

    Args:
        delay_ns: In place of the direction's.
    """

    def __init__(self, delay_ns: int) -> None:
        self.delay_ns = delay_ns
        self.latest_ns = 0
        """When the newest of them comes through."""


class LinkStage:
    """Carries packets of one direction and hands them on.

    Args:
        calendar: Where it enters what it will do.
        direction: What it is like, until ``change``.
        room_bytes: What may wait before the bottleneck; it may be changed at any time.
        key: Seeds its dice: the run, the port and the way. Each purpose has its own, so that the
            decision over the n-th packet depends on nothing else.
        forward: What gets the packets that came through; an object of this stage alone.
    """

    def __init__(
        self,
        calendar: Calendar,
        direction: LinkDirection,
        *,
        room_bytes: int,
        key: str,
        forward: Act,
    ) -> None:
        self.room_bytes = room_bytes
        self._calendar = calendar
        self._forward = forward
        self._key = key
        self._order = Random(f"{key}/order")
        self._doubling = Random(f"{key}/doubling")
        self._loss = LossChain(direction.loss, direction.burst_packets, dice=Random(f"{key}/loss"))
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._sending = b""
        self._bits_left_ns = 0  # bits times 10**9, so that a rate divides them into nanoseconds
        self._counted_from_ns = 0
        self._sent_ns = 0
        self._usual_path = PacketPath(0)
        self.paths: dict[bytes, PacketPath] = {}
        """Paths that are not the usual one, by the address of their other host."""
        self.path_address = slice(0, 0)
        """Where that address stands in a packet."""
        self.counts = PacketCount()
        self._take(direction)

    def change(self, at_ns: int, direction: LinkDirection) -> None:
        """Be different from now on. What is being sent goes on at the new rate."""
        before = self.direction
        if (direction.loss, direction.burst_packets) != (before.loss, before.burst_packets):
            self._loss.change(direction.loss, direction.burst_packets)
        self._take(direction)
        if self._sending and direction.bits_per_s != before.bits_per_s:
            sent_ns = (at_ns - self._counted_from_ns) * before.bits_per_s
            # Below 0 where it was due already: then it leaves now, never before.
            self._bits_left_ns = max(0, self._bits_left_ns - sent_ns)
            self._send(at_ns)

    def lose(self) -> None:
        """Lose what waits, what is being sent and what propagates: the line was cut."""
        self._queue.clear()
        self._queued_bytes = 0
        self._sending = b""
        for path in (self._usual_path, *self.paths.values()):
            path.latest_ns = 0
        self._calendar.forget(self._forward)

    def _take(self, direction: LinkDirection) -> None:
        self.direction = direction
        self._bits_per_s = direction.bits_per_s
        self._usual_path.delay_ns = direction.delay_us * NS_PER_US
        # Equal keys give equal wander, so a change of the mean is no new beginning.
        self._is_plain = not (
            direction.delay_us
            or direction.jitter_us
            or direction.loss
            or direction.bits_per_s
            or direction.reordering
            or direction.duplication
        )
        self._wander = WanderingDelay(direction, key=f"{self._key}/jitter")

    def arrive(self, at_ns: int, packet: bytes) -> None:
        """Take a packet in."""
        self.counts.offered += 1
        is_free = at_ns >= self._usual_path.latest_ns and not self._sending
        if self._is_plain and is_free and not self.paths:
            self.counts.delivered += 1
            self.counts.delivered_bytes += len(packet)
            self._forward(at_ns, packet)
            return
        direction = self.direction
        if direction.loss and self._loss.is_lost(at_ns // NS_PER_US):
            self.counts.lost += 1
            return
        self._enqueue(at_ns, packet)
        if direction.duplication and self._doubling.random() < direction.duplication:
            self.counts.duplicated += 1
            self._enqueue(at_ns, packet)

    def _enqueue(self, at_ns: int, packet: bytes) -> None:
        if self._sending:
            if self._queued_bytes + len(packet) > self.room_bytes:
                self.counts.overflowed += 1
                return
            self._queued_bytes += len(packet)
            self._queue.append(packet)
        elif self._bits_per_s:
            self._begin(at_ns, packet)
        else:
            self._propagate(at_ns, packet)

    def _begin(self, at_ns: int, packet: bytes) -> None:
        self._sending = packet
        self._bits_left_ns = len(packet) * BITS_NS
        self._send(at_ns)

    def _send(self, at_ns: int) -> None:
        # The rate is read when a packet leaves the queue: one that was given its time when it
        # entered would keep a rate that the trace has long left.
        self._counted_from_ns = at_ns
        taken_ns = self._bits_left_ns // self._bits_per_s if self._bits_per_s else 0
        self._sent_ns = at_ns + taken_ns
        self._calendar.add(self._sent_ns, self._finish_sending, self._sending)

    def _finish_sending(self, at_ns: int, packet: bytes) -> None:
        if packet is not self._sending or at_ns != self._sent_ns:
            return  # The rate changed after this was entered.
        self._sending = b""
        self._propagate(at_ns, packet)
        while self._queue and not self._sending:
            next_packet = self._queue.popleft()
            self._queued_bytes -= len(next_packet)
            self._enqueue(at_ns, next_packet)

    def _propagate(self, at_ns: int, packet: bytes) -> None:
        self.counts.delivered += 1
        self.counts.delivered_bytes += len(packet)
        direction = self.direction
        if direction.reordering and self._order.random() < direction.reordering:
            # As netem has it: it goes at once, past everything that is still under way.
            self.counts.overtaking += 1
            self._forward(at_ns, packet)
            return
        path = self._usual_path
        if self.paths:
            path = self.paths.get(packet[self.path_address], path)
        delay_ns = path.delay_ns
        if direction.jitter_us:
            wander_ns = (self._wander.at(at_ns // NS_PER_US) - direction.delay_us) * NS_PER_US
            delay_ns = max(0, delay_ns + wander_ns)
        due_ns = max(at_ns + delay_ns, path.latest_ns)
        path.latest_ns = due_ns
        if due_ns > at_ns:
            self._calendar.add(due_ns, self._forward, packet)
        else:
            self._forward(at_ns, packet)
