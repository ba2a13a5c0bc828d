import socket
import time
from collections.abc import Iterator

import pytest

from hypergpu.units import Microseconds
from netsim.emulation.namespaces import host_address
from netsim.emulation.requests import Condition, SetCondition, SetShape
from netsim.link import Link, LinkDirection, Shape
from netsim.tunnel.device import packed_address
from netsim.tunnel.messages import TunnelPlan, TunnelPort
from netsim.tunnel.router import Router

S_NS = 10**9
# So long that no busy machine makes a packet due before a test says so.
SLOW = LinkDirection(delay_us=Microseconds(10_000_000), bits_per_s=12_000_000)
FAST = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)


class Hosts:
    """Two hosts, a behind 10 s and b next door, their devices sockets; the time is a test's."""

    def __init__(self) -> None:
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
        self.router = Router(TunnelPlan(seed=1, ports=tuple(ports)), self._open_device)

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


def test_what_was_due_before_a_request_is_done_before_it(hosts: Hosts) -> None:
    hosts.send("b", "a", 0)
    hosts.set_clock(30 * S_NS)
    hosts.router.obey(SetShape("a", Shape(link=Link(up=SLOW, down=SLOW))))
    assert hosts.read_packets("a") == 1
