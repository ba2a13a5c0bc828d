"""Delays between pairs of nodes: what world files say, what packets take, and what refuses them."""

from collections.abc import Iterator

import pytest

from benchmarks.ours.stages.virtual_ring import VirtualRing, direct_ways, relayed_ways
from coordinator.core.rings.ring_state import RingLimits, StagePace
from hypergpu.units import Microseconds
from netsim.link import Link, LinkDirection, NetsimError, PairDelay
from netsim.network.backends import BACKENDS, choose_backend, world_links
from netsim.network.options import Backend, Fallback
from netsim.network.pairs import hop_times
from netsim.network.world import WorldDescription
from netsim.network.world_file import parse_world
from netsim.virtual.worlds import TransferSizes, described_world
from tests.unit.netsim.test_tunnel import S_NS, Hosts

NODES = """
[job]
workload = "digits-softmax"
[coordinator]
rtt_ms = 0
up_mbit_s = 0
down_mbit_s = 0
[[nodes]]
name = "city"
count = 3
rtt_ms = 80
up_mbit_s = 0
down_mbit_s = 0
[[nodes]]
name = "far"
rtt_ms = 200
up_mbit_s = 0
down_mbit_s = 0
"""
CITY = '[[pairs]]\nbetween = ["city", "city"]\ndelay_ms = 5\n'
FAR = '[[pairs]]\nbetween = ["far", "city-2"]\ndelay_ms = 150.5\n'


def world(pairs: str = "") -> WorldDescription:
    return parse_world(f"{NODES}\n{pairs}", source="w.toml")


def test_a_group_beside_itself_is_all_of_its_pairs_and_each_pair_stands_once() -> None:
    assert world(CITY + FAR).pairs == (
        PairDelay("city-1", "city-2", Microseconds(5_000)),
        PairDelay("city-1", "city-3", Microseconds(5_000)),
        PairDelay("city-2", "city-3", Microseconds(5_000)),
        PairDelay("city-2", "far", Microseconds(150_500)),
    )


@pytest.mark.parametrize(
    ("pairs", "what"),
    [
        (CITY + CITY, "city-1 and city-2 have a delay already"),
        (CITY.replace('"city", "city"', '"far", "far"'), "a node has no delay to itself"),
        (CITY.replace('"city", "city"', '"city", "city-1"'), "on both sides"),
        (CITY.replace('"city", "city"', '"coordinator", "far"'), "a pair has two nodes"),
        (CITY.replace('"city", "city"', '"all", "town"'), 'no node or group "town"'),
        (CITY.replace('"city", "city"', '"city"'), "length"),
        (CITY.replace("= 5", "= -1"), "delay_ms"),
    ],
)
def test_pairs_that_say_nothing_are_refused_with_their_line(pairs: str, what: str) -> None:
    with pytest.raises(NetsimError, match=what) as failure:
        world(pairs)
    assert "w.toml" in failure.value.detail


def test_hops_of_pairs_are_their_own_and_those_through_the_coordinator_stay() -> None:
    own_world = world(CITY + FAR)
    links = {node.name: node.link for node in own_world.nodes}
    hops = hop_times(links, own_world.coordinator, own_world.pairs)
    # city-1, city-2, city-3, far, and the coordinator.
    assert hops.direct_us[0] == [0, 5_000, 5_000, 140_000, 40_000]
    assert hops.direct_us[3] == [140_000, 150_500, 140_000, 0, 100_000]
    assert hops.relayed_us == hop_times(links, own_world.coordinator).relayed_us
    assert hops.relayed_us[0] == [0, 80_000, 80_000, 140_000, 40_000]
    assert hops.relayed_us[4] == [40_000, 40_000, 40_000, 100_000, 0]


def test_a_coordinator_s_own_line_is_passed_twice_by_what_it_relays() -> None:
    way = LinkDirection(delay_us=Microseconds(10_000), bits_per_s=0)
    link = Link(up=way, down=way)
    own = LinkDirection(delay_us=Microseconds(3_000), bits_per_s=0)
    hops = hop_times({"a": link, "b": link}, Link(up=own, down=own))
    assert (hops.direct_us[0][1], hops.relayed_us[0][1]) == (20_000, 26_000)


def test_a_ring_whose_nodes_are_near_each_other_gives_tokens_by_their_pairs() -> None:
    own_world = world(CITY)
    links = {name: own_world.node(name).link for name in ("city-1", "city-2", "city-3")}
    hops = hop_times(links, own_world.coordinator, own_world.pairs)
    paces = [StagePace(20_000.0, 1_000.0, 0.0)] * 3
    for ways, hop_us in (
        (relayed_ways(hops.relayed_us), 6 * 40_000),
        (direct_ways(hops.direct_us), 40_000 + 5_000 + 5_000 + 40_000),
    ):
        ring = VirtualRing(paces, RingLimits(has_drafts=False), ways=ways)
        ring.open(0, prompt=4, answer=20)
        times_us = ring.run()[0].times_us
        assert times_us[-1] - times_us[0] == pytest.approx(19 * (3 * 21_000 + hop_us))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(PairDelay("a", "b", Microseconds(2_000_000)))
    yield hosts
    hosts.close()


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_packets_of_a_pair_take_its_delay_and_wait_for_none_of_others(
    hosts: Hosts, source: str, target: str
) -> None:
    hosts.send("a", "a", 0)  # 20 s, by both of its links.
    hosts.send(source, target, 0)
    hosts.reach(round(1.9 * S_NS))
    assert hosts.read_packets(target) == 0
    hosts.reach(round(2.1 * S_NS))
    assert hosts.read_packets(target) == 1
    hosts.reach(19 * S_NS)
    assert hosts.read_packets("a") == 0
    hosts.reach(21 * S_NS)
    assert hosts.read_packets("a") == 1


def test_a_cut_loses_what_is_under_way_between_a_pair(hosts: Hosts) -> None:
    hosts.send("a", "b", 0)
    hosts.reach(S_NS)
    hosts.router.ports["a"].cut()
    hosts.reach(3 * S_NS)
    assert hosts.read_packets("b") == 0


def test_lateness_of_a_pair_is_judged_by_its_own_delay(hosts: Hosts) -> None:
    names = ("a", "b")
    path = b"".join(hosts.router.ports[name].address for name in names)
    assert hosts.router.limit_us(bytes(12) + path) == 40_000  # 2 % of 2 s.


def test_backends_without_packets_between_nodes_refuse_pairs() -> None:
    own_world = world(FAR)
    links = world_links(own_world)
    assert choose_backend(Backend.TUNNEL, links, Fallback.REFUSE) == (Backend.TUNNEL, "")
    with pytest.raises(NetsimError, match="the proxy carries nothing from node to node"):
        choose_backend(Backend.PROXY, links, Fallback.REFUSE)
    with pytest.raises(NetsimError, match="delays of pairs"):
        choose_backend(Backend.TC, links, Fallback.REFUSE)
    backend, reason = choose_backend(Backend.TC, links, Fallback.TUNNEL)
    assert backend is Backend.TUNNEL
    assert reason
    with pytest.raises(NetsimError, match="virtual time carries nothing from node to node"):
        described_world(own_world, TransferSizes())


@pytest.mark.parametrize("backend", [Backend.PROXY, Backend.TC])
async def test_a_backend_that_is_opened_all_the_same_refuses_pairs(backend: Backend) -> None:
    with pytest.raises(NetsimError, match="carries nothing from node to node"):
        async with BACKENDS[backend].open(world_links(world(FAR))):
            pass
