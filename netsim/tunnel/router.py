"""The router between a tunnel's hosts: `python -m netsim.tunnel.router DESCRIPTOR`.

It reads its plan and requests from standard input, opens every device, carries packets through the
stages of both ports, and measures how late it is. It ends when its input closes, however its owner
ended, and removes everything.
"""

import ctypes
import gc
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from netsim.emulation.namespaces import SlotClaim
from netsim.emulation.requests import (
    Condition,
    LinkRequest,
    LinkRequestFailed,
    ReadStatistics,
    RequestDone,
    Reset,
    SetCondition,
    SetShape,
    decode_line,
)
from netsim.link import NEVER_US, LinkCourse, NetsimError, Shape, Way
from netsim.measure.lateness import LatenessCounter, allowed_us
from netsim.tunnel.nat_box import NatBox
from netsim.tunnel.stage import NS_PER_US, Act, Calendar, LinkStage, PacketPath
from netsim.tunnel.tunnel import (
    PortCount,
    RouterAnswer,
    RouterStatistics,
    TunnelPlan,
    TunnelPort,
    open_device,
    packed_address,
)

# So many packets of one device before the next one and the calendar have their turn.
_BATCH = 32
_PACKET_BYTES = 2048
# Above the measuring programs, which take 1: they wait for packets, so packets come first.
_PRIORITY = 2
_CONTROL = 0
_ANSWERS = 1
_PR_SET_TIMERSLACK = 29
# Of a packet's IPv4 header.
_PATH = slice(12, 20)
_SOURCE, _TARGET = slice(12, 16), slice(16, 20)
_ENDLESS_NS = 3600 * 10**9


class RoutedPort:
    """A port's device and its two stages."""

    def __init__(self, port: TunnelPort, router: "Router") -> None:
        self.name = port.name
        self.address = packed_address(port.address)
        self.inside = packed_address(port.inside or port.address)
        self.descriptor = router.open_device(port)
        self.link = port.shape.link
        self.is_cut = False
        self.pair_delays_us: dict[bytes, int] = {}
        """Delays to other hosts that are not those of both links, by their addresses."""
        self._router = router
        self.nat_kind = port.shape.nat
        self._nat = _nat_box(port, router.seed)
        self.up = self._stage("up", port.shape, router.route)
        self.down = self._stage("down", port.shape, self._let_in if self._nat else self.write)
        # A host without a NAT pays nothing for those of others.
        self._take: Act = self._let_out if self._nat else self.up.arrive
        self.set_shape(router.now_ns(), port.shape)

    def _stage(self, way: Way, shape: Shape, forward: Act) -> LinkStage:
        return LinkStage(
            self._router.calendar,
            getattr(shape.link, way),
            room_bytes=shape.room_bytes(way),
            key=f"{self._router.seed}/{way}/{self.name}",
            forward=forward,
        )

    def set_shape(self, at_ns: int, shape: Shape) -> None:
        """Follow another shape from now on."""
        # The key of a world's own links, so that every backend has the same ones.
        self._course = LinkCourse(shape, key=f"{self._router.seed}/link/{self.name}")
        self._course_from_ns = at_ns
        self.link = shape.link
        self.up.room_bytes = shape.room_bytes("up")
        self.down.room_bytes = shape.room_bytes("down")
        self._follow(at_ns)

    def _follow(self, at_ns: int) -> None:
        """Apply the course's present link, and plan the next change."""
        course = self._course
        now_us = (at_ns - self._course_from_ns) // NS_PER_US
        link = course.at(now_us)
        self.up.change(at_ns, link.up)
        self.down.change(at_ns, link.down)
        next_us = course.next_change_us(now_us)
        if next_us < NEVER_US:
            due_ns = self._course_from_ns + next_us * NS_PER_US

            def follow(due_ns: int, _: bytes) -> None:
                if self._course is course:
                    self._follow(due_ns)

            self._router.calendar.add(due_ns, follow, b"")

    def read(self) -> None:
        """Take in a batch of what the host sent."""
        descriptor = self.descriptor
        arrive = self._take
        # This loop and `write` set the throughput of the whole: nothing is looked up twice here.
        clock_ns, start_ns = time.monotonic_ns, self._router.start_ns
        for _ in range(_BATCH):
            try:
                packet = os.read(descriptor, _PACKET_BYTES)
            except BlockingIOError:
                return
            if not self.is_cut:
                arrive(clock_ns() - start_ns, packet)

    def write(self, due_ns: int, packet: bytes) -> None:
        """Give a packet to the host, and note how late."""
        if self.is_cut:
            return
        try:
            os.write(self.descriptor, packet)
        except OSError:
            # The host took its device down, which is its right.
            return
        router = self._router
        late_ns = time.monotonic_ns() - router.start_ns - due_ns
        limit_us = router.limits_us.get(packet[_PATH])
        if limit_us is None:
            limit_us = router.limit_us(packet)
        router.lateness.add(late_ns // NS_PER_US, limit_us)

    def _let_out(self, at_ns: int, packet: bytes) -> None:
        if self._nat and (public_packet := self._nat.let_out(at_ns, packet)):
            self.up.arrive(at_ns, public_packet)

    def _let_in(self, due_ns: int, packet: bytes) -> None:
        if self._nat and (inside_packet := self._nat.let_in(due_ns, packet)):
            self.write(due_ns, inside_packet)

    def set_pair(self, other: bytes, delay_us: int) -> None:
        """Have packets to another host take this delay on the way up, and those from it none on the
        way down, whose host does the same.
        """
        self.up.path_address, self.down.path_address = _TARGET, _SOURCE
        self.up.paths[other] = PacketPath(delay_us * NS_PER_US)
        self.down.paths[other] = PacketPath(0)
        self.pair_delays_us[other] = delay_us

    def cut(self) -> None:
        """Lose what is under way and, until it is healed, whatever comes."""
        self.is_cut = True
        self.up.lose()
        self.down.lose()

    def count(self) -> PortCount:
        """Return the counters of both directions."""
        nat = self._nat.counts if self._nat else None
        return PortCount(up=self.up.counts, down=self.down.counts, nat=nat, is_cut=self.is_cut)


def _nat_box(port: TunnelPort, seed: int) -> NatBox | None:
    if port.shape.nat is None:
        return None
    inside, public = packed_address(port.inside), packed_address(port.address)
    return NatBox(port.shape.nat, inside=inside, public=public, key=f"{seed}/nat/{port.name}")


class Router:
    """Every port, and the one loop that serves them.

    Args:
        plan: The ports.
        open_device: Makes a host's device and returns its descriptor.
    """

    def __init__(
        self, plan: TunnelPlan, open_device: Callable[[TunnelPort], int] = open_device
    ) -> None:
        self.seed = plan.seed
        self.start_ns = time.monotonic_ns()
        self.calendar = Calendar()
        self.lateness = LatenessCounter()
        self._is_realtime = False
        self.open_device = open_device
        self.limits_us: dict[bytes, int] = {}
        self._unroutable = 0
        self._unread = bytearray()
        self._is_open = True
        ports = [RoutedPort(port, self) for port in plan.ports]
        self.ports = {port.name: port for port in ports}
        self._addresses = {port.address: port for port in ports}
        # Packets that a NAT let in bear inside addresses, which nothing is routed to.
        self._receivers = {port.inside: port for port in ports}
        for pair in plan.pairs:
            first, second = self.ports[pair.first], self.ports[pair.second]
            first.set_pair(second.address, pair.delay_us)
            second.set_pair(first.address, pair.delay_us)
        self._readers: dict[int, Callable[[], None]] = {_CONTROL: self._read_requests}
        self._readers.update({port.descriptor: port.read for port in ports})

    def now_ns(self) -> int:
        """Return the time since the router began."""
        return time.monotonic_ns() - self.start_ns

    def route(self, at_ns: int, packet: bytes) -> None:
        """Hand a packet that reached the middle to the direction of its receiver."""
        port = self._addresses.get(packet[_TARGET])
        if port is None or packet[0] >> 4 != 4:
            self._unroutable += 1
        elif not port.is_cut:
            port.down.arrive(at_ns, packet)

    def limit_us(self, packet: bytes) -> int:
        """Return how late this packet may be: its path's delay decides."""
        path = packet[_PATH]
        source, target = self._addresses.get(path[:4]), self._receivers[path[4:]]
        if source is None:  # A host may forge its sender; such paths are not kept.
            return allowed_us(target.link.down.delay_us)
        star_us = source.link.up.delay_us + target.link.down.delay_us
        limit_us = allowed_us(source.pair_delays_us.get(target.address, star_us))
        self.limits_us[path] = limit_us
        return limit_us

    def run(self) -> None:
        """Serve until the owner is gone."""
        self._is_realtime = _raise_priority()
        epoll = select.epoll()
        for descriptor in self._readers:
            epoll.register(descriptor, select.EPOLLIN)
        calendar = self.calendar
        now_ns = self.now_ns
        descriptors = [epoll.fileno()]
        while self._is_open:
            calendar.run_until(now_ns())
            ready = epoll.poll(0)
            if not ready:
                # epoll counts in whole milliseconds; select in microseconds.
                wait_ns = min(max(calendar.next_ns() - now_ns(), 0), _ENDLESS_NS)
                select.select(descriptors, (), (), wait_ns / 1e9)
                continue
            for descriptor, _ in ready:
                self._readers[descriptor]()
                # Many who send at once must not hold up what is due.
                calendar.run_until(now_ns())

    def _read_requests(self) -> None:
        read = os.read(_CONTROL, 1 << 16)
        if not read:
            self._is_open = False
            return
        self._unread += read
        if b"\n" not in read:
            return  # A shape with a long trace comes in many pieces.
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            answer(self.obey_line(bytes(line)))

    def obey_line(self, line: bytes) -> RouterAnswer:
        """Do what a line asks for; one that is no request, or an impossible one, fails alone."""
        try:
            return self.obey(decode_line(line, LinkRequest))
        except NetsimError as error:
            return LinkRequestFailed(error.detail, error.fix)

    def obey(self, request: LinkRequest) -> RouterAnswer:
        """Do what the owner asks for, now."""
        if isinstance(request, ReadStatistics):
            return self._statistics()
        if isinstance(request, Reset) or (
            isinstance(request, SetCondition)
            and request.condition not in {Condition.OPEN, Condition.CUT}
        ):
            what = f"the tunnel carries packets and knows no connection of {request.name}"
            return LinkRequestFailed(what, "cut the link for a moment, or use the proxy backend")
        port = self.ports.get(request.name)
        if port is None:
            port_list = ", ".join(self.ports)
            return LinkRequestFailed(
                f"the tunnel has no port {request.name!r}", f"name one of {port_list}"
            )
        if isinstance(request, SetShape) and request.shape.nat not in {None, port.nat_kind}:
            what = f"{request.name} gets no other NAT while packets are under way"
            return LinkRequestFailed(what, "leave nat out: the box stays as it is")
        now_ns = self.now_ns()
        # What was due before the request is done as it was before.
        self.calendar.run_until(now_ns)
        if isinstance(request, SetShape):
            port.set_shape(now_ns, request.shape)
            self.limits_us.clear()
        elif request.condition is Condition.CUT:
            port.cut()
        else:
            port.is_cut = False
        return RequestDone(self.start_ns + now_ns)

    def _statistics(self) -> RouterStatistics:
        return RouterStatistics(
            lateness=self.lateness.reading(),
            ports={name: port.count() for name, port in self.ports.items()},
            is_realtime=self._is_realtime,
            cpu_us=time.process_time_ns() // NS_PER_US,
            unroutable=self._unroutable,
        )


def answer(what: RouterAnswer) -> None:
    """Write one line to the owner; one that is gone is noticed by its other pipe."""
    with suppress(BrokenPipeError):
        os.write(_ANSWERS, msgspec.json.encode(what) + b"\n")


def _raise_priority() -> bool:
    """Request exact timers and priority over ordinary programs; true when it is granted."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))
    except PermissionError:
        return False
    return True


def main() -> None:
    """Serve the plan on standard input and leave nothing behind."""
    claim = SlotClaim.inherit(int(sys.argv[1]))
    try:
        router = Router(msgspec.json.decode(sys.stdin.buffer.readline(), type=TunnelPlan))
        gc.disable()  # Nothing in the loop makes cycles, and a collection takes milliseconds.
        answer(RequestDone(time.monotonic_ns()))
        router.run()
    except NetsimError as error:
        answer(LinkRequestFailed(error.detail, error.fix))
    finally:
        claim.remove_everything()


if __name__ == "__main__":
    main()
