"""The tunnel's router and the stages that packets pass."""

import socket
import time
from collections.abc import Iterator

import pytest

from hypergpu.units import Microseconds
from netsim.emulation.namespaces import host_address
from netsim.emulation.requests import Condition, LinkRequestFailed, SetCondition, SetShape
from netsim.link import STALLED_BITS_PER_S, Link, LinkDirection, NatKind, PairDelay, Shape
from netsim.tunnel.router import Router
from netsim.tunnel.stage import Calendar, LinkStage
from netsim.tunnel.tunnel import RouterStatistics, TunnelPlan, TunnelPort, packed_address

S_NS = 10**9
# So long that no busy machine makes a packet due before a test says so.
SLOW = LinkDirection(delay_us=Microseconds(10_000_000), bits_per_s=12_000_000)
FAST = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)


class Hosts:
    """Two hosts, a behind 10 s and b next door, their devices sockets; the time is a test's.

    Args:
        pairs: Ways of their own between hosts.
    """

    def __init__(self, *pairs: PairDelay) -> None:
        self.ends: dict[str, socket.socket] = {}
        self._router_ends: list[socket.socket] = []
        links = {"a": Link(up=SLOW, down=SLOW), "b": Link(up=FAST, down=FAST)}
        self.addresses = {name: host_address(number) for number, name in enumerate(links, 1)}
        ports = [
            TunnelPort(
                name=name,
                namespace=name,
                address=self.addresses[name],
                shape=Shape(link=link),
            )
            for name, link in links.items()
        ]
        self.router = Router(TunnelPlan(seed=1, ports=tuple(ports), pairs=pairs), self._open_device)

    def _open_device(self, port: TunnelPort) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        self.ends[port.namespace] = ours
        self._router_ends.append(theirs)
        return theirs.fileno()

    def send(self, source: str, target: str, at_ns: int) -> None:
        ends = packed_address(self.addresses[source]) + packed_address(self.addresses[target])
        self.router.ports[source].up.arrive(at_ns, b"\x45" + bytes(11) + ends + bytes(1480))

    def reach(self, at_ns: int) -> None:
        """Let it be so late, and do what is due."""
        self.set_clock(at_ns)
        self.router.calendar.run_until(at_ns)

    def set_clock(self, at_ns: int) -> None:
        self.router.start_ns = time.monotonic_ns() - at_ns

    def read_packets(self, name: str) -> int:
        count = 0
        try:
            while self.ends[name].recv(2048):
                count += 1
        except BlockingIOError:
            pass
        return count

    def close(self) -> None:
        for end in (*self.ends.values(), *self._router_ends):
            end.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_packets_cross_after_their_delay(hosts: Hosts, source: str, target: str) -> None:
    hosts.send(source, target, 0)
    hosts.reach(10 * S_NS)
    assert hosts.read_packets(target) == 0
    hosts.reach(11 * S_NS)
    assert hosts.read_packets(target) == 1


def test_a_port_gets_no_nat_while_packets_are_under_way(hosts: Hosts) -> None:
    shape = Shape(link=Link(up=SLOW, down=SLOW), nat=NatKind.SYMMETRIC)
    answer = hosts.router.obey(SetShape("a", shape))
    assert isinstance(answer, LinkRequestFailed)
    assert "no other NAT" in answer.detail


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_a_cut_loses_what_is_under_way_though_it_is_healed_at_once(
    hosts: Hosts, source: str, target: str
) -> None:
    for _ in range(50):
        hosts.send(source, target, 0)
    hosts.reach(S_NS // 50)  # Some wait, one is being sent, some propagate.
    hosts.router.obey(SetCondition("a", Condition.CUT))
    hosts.router.obey(SetCondition("a", Condition.OPEN))
    hosts.send(source, target, S_NS)
    hosts.reach(30 * S_NS)
    assert hosts.read_packets(target) == 1


def test_a_cut_loses_nothing_of_others(hosts: Hosts) -> None:
    hosts.send("a", "b", 0)
    hosts.reach(S_NS)
    hosts.router.obey(SetCondition("b", Condition.CUT))
    hosts.router.obey(SetCondition("b", Condition.OPEN))
    hosts.reach(30 * S_NS)
    assert hosts.read_packets("b") == 1


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"type":"set","name":"a","shape":{"link":{"up":{"delay_us":-1,"bits_per_s":0}}}}',
    ],
)
def test_an_impossible_request_fails_alone(hosts: Hosts, line: bytes) -> None:
    assert isinstance(hosts.router.obey_line(line), LinkRequestFailed)
    assert isinstance(hosts.router.obey_line(b'{"type":"statistics"}'), RouterStatistics)


def test_what_was_due_before_a_request_is_done_before_it(hosts: Hosts) -> None:
    hosts.send("b", "a", 0)
    hosts.set_clock(30 * S_NS)
    hosts.router.obey(SetShape("a", Shape(link=Link(up=SLOW, down=SLOW))))
    assert hosts.read_packets("a") == 1


SECOND_NS = 10**9
MS_NS = 10**6
FULL = bytes(1500)


class StagePath:
    """A stage with its calendar, and what came out of it when."""

    def __init__(
        self, direction: LinkDirection, *, room_bytes: int = 10**9, key: str = "1/a/up"
    ) -> None:
        self.out: list[tuple[int, bytes]] = []
        self.calendar = Calendar()
        self.stage = LinkStage(
            self.calendar,
            direction,
            room_bytes=room_bytes,
            key=key,
            forward=lambda at_ns, packet: self.out.append((at_ns, packet)),
        )

    def offer(self, count: int, *, gap_ns: int = 0, from_ns: int = 0) -> None:
        for number in range(count):
            at_ns = from_ns + number * gap_ns
            self.calendar.run_until(at_ns)
            self.stage.arrive(at_ns, number.to_bytes(4) + FULL[4:])

    def drain(self) -> None:
        while (due_ns := self.calendar.next_ns()) < 1 << 61:
            self.calendar.run_until(due_ns)

    def numbers(self) -> list[int]:
        return [int.from_bytes(packet[:4]) for _, packet in self.out]


def direction(delay_ms: float = 0, bits_per_s: int = 0, **others: float) -> LinkDirection:
    return LinkDirection(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=bits_per_s,
        **others,  # type: ignore[arg-type]
    )


def test_a_packet_takes_its_time_at_the_bottleneck_and_then_its_delay() -> None:
    path = StagePath(direction(25, 12_000_000))
    path.offer(2)
    path.drain()
    assert [at_ns for at_ns, _ in path.out] == [26 * MS_NS, 27 * MS_NS]


@pytest.mark.parametrize("bits_per_s", [1_000_000, 5_000_000, 77_000_000, 200_000_000])
def test_a_full_queue_drains_at_exactly_the_rate(bits_per_s: int) -> None:
    path = StagePath(direction(10, bits_per_s))
    path.offer(1001)
    path.drain()
    taken_ns = path.out[-1][0] - path.out[0][0]
    assert 1000 * 12_000 * SECOND_NS / taken_ns == pytest.approx(bits_per_s, rel=1e-4)


def test_what_waits_drains_at_the_rate_that_holds_when_it_leaves() -> None:
    path = StagePath(direction(0, 12_000_000))
    path.offer(3000)
    for second in range(1, 5):
        path.calendar.run_until(second * SECOND_NS)
        path.stage.change(second * SECOND_NS, direction(0, [12, 1, 6, 3, 2][second] * 1_000_000))
    path.calendar.run_until(5 * SECOND_NS)
    seconds = [at_ns // SECOND_NS for at_ns, _ in path.out]
    # The packet that is being sent at a change goes on at the new rate, so no bit is lost or won.
    assert [seconds.count(second) for second in range(5)] == pytest.approx(
        [1000, 1000 / 12, 500, 250, 1000 / 6], abs=1
    )


def test_a_gap_holds_back_even_the_packet_that_is_being_sent() -> None:
    path = StagePath(direction(0, 12_000_000))
    path.offer(3)
    path.calendar.run_until(MS_NS // 2)
    path.stage.change(MS_NS // 2, direction(0, STALLED_BITS_PER_S))
    path.calendar.run_until(SECOND_NS)
    assert path.out == []
    path.stage.change(SECOND_NS, direction(0, 12_000_000))
    path.drain()
    assert [round(at_ns / MS_NS, 3) for at_ns, _ in path.out] == [1000.5, 1001.5, 1002.5]


def test_what_waits_goes_at_once_when_the_limit_is_lifted() -> None:
    path = StagePath(direction(0, 12_000))
    path.offer(3)
    path.stage.change(MS_NS, direction(0, 0))
    path.drain()
    assert [at_ns for at_ns, _ in path.out] == [MS_NS] * 3


def test_a_packet_that_was_due_before_a_change_leaves_with_it_and_not_earlier() -> None:
    path = StagePath(direction(0, 12_000_000))
    path.offer(2)
    path.stage.change(5 * MS_NS, direction(0, 1_200_000))
    path.drain()
    assert [at_ns for at_ns, _ in path.out] == [5 * MS_NS, 15 * MS_NS]


def test_a_full_queue_drops_the_newest_and_counts_them() -> None:
    path = StagePath(direction(0, 12_000_000), room_bytes=4 * 1500)
    path.offer(10)
    path.drain()
    assert path.numbers() == [0, 1, 2, 3, 4]
    assert path.stage.counts.overflowed == 5


def test_jitter_keeps_the_order() -> None:
    path = StagePath(direction(50, jitter_us=20_000, jitter_memory_ms=20))
    path.offer(5000, gap_ns=MS_NS // 5)
    path.drain()
    assert path.numbers() == list(range(5000))
    assert len({at_ns - number * MS_NS // 5 for number, (at_ns, _) in enumerate(path.out)}) > 100


def test_a_share_of_packets_overtakes_where_that_is_asked_for() -> None:
    path = StagePath(direction(50, reordering=0.1))
    path.offer(5000, gap_ns=MS_NS)
    path.drain()
    assert sorted(path.numbers()) == list(range(5000))
    assert path.stage.counts.overtaking == pytest.approx(500, abs=100)


def test_a_share_of_packets_arrives_twice_where_that_is_asked_for() -> None:
    path = StagePath(direction(1, duplication=0.05))
    path.offer(5000, gap_ns=MS_NS)
    path.drain()
    assert path.stage.counts.duplicated == len(path.out) - 5000 == pytest.approx(250, abs=80)


def test_the_same_key_decides_the_same_about_every_packet() -> None:
    def survivors(key: str) -> list[int]:
        path = StagePath(direction(1, loss=0.05, burst_packets=3), key=key)
        path.offer(5000, gap_ns=MS_NS)
        path.drain()
        return path.numbers()

    assert survivors("7/a/up") == survivors("7/a/up") != survivors("8/a/up")


def test_a_change_of_delay_does_not_let_later_packets_overtake() -> None:
    path = StagePath(direction(100))
    path.offer(10)
    path.stage.change(MS_NS, direction(1))
    path.offer(10, from_ns=2 * MS_NS)
    path.drain()
    assert [at_ns for at_ns, _ in path.out] == sorted(at_ns for at_ns, _ in path.out)
    assert path.out[-1][0] == 100 * MS_NS
