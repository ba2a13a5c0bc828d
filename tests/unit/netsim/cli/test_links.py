"""Links out of a command's arguments, and what a command says of them."""

from pathlib import Path

import pytest

from hypergpu.sites import Site, Sites
from netsim.cli.check import distinct_links
from netsim.cli.links import links_by_name
from netsim.cli.shape import greeting
from netsim.link.error import NetsimError
from netsim.network.backends import choose_backend, node_address, profile_links
from netsim.network.options import Backend, Fallback
from netsim.network.profiles import PROFILES

WORLD = """
seed = 9
hour = 20
[coordinator]
up_mbit_s = 7
[[nodes]]
name = "attic"
profile = "home-dsl"
count = 2
[[nodes]]
name = "cellar"
profile = "wifi-bad"
"""


@pytest.fixture
def world(tmp_path: Path) -> str:
    (tmp_path / "home.toml").write_text(WORLD, "utf-8")
    return str(tmp_path / "home.toml")


def test_profiles_become_nodes_of_their_names() -> None:
    links = links_by_name(["lan", "wifi-bad"], seed=4)
    assert list(links.nodes) == ["lan", "wifi-bad"]
    assert links.nodes["wifi-bad"].link == PROFILES["wifi-bad"].shape.link
    assert links.nodes["wifi-bad"].variation == PROFILES["wifi-bad"].shape.variation
    assert links.seed == 4


def test_a_profile_that_comes_again_is_numbered() -> None:
    assert list(links_by_name(["lan", "D", "lan"], seed=0).nodes) == ["lan-1", "D", "lan-2"]


def test_a_world_file_gives_its_nodes_its_coordinator_and_its_seed(world: str) -> None:
    links = links_by_name([world], seed=4)
    assert list(links.nodes) == ["attic-1", "attic-2", "cellar"]
    assert links.coordinator.link.up.bits_per_s == 7_000_000
    assert links.seed == 9
    assert links.nodes["cellar"].starts_at_hour == 20


def test_equal_links_are_measured_once(world: str) -> None:
    assert list(distinct_links(links_by_name([world], seed=0).nodes)) == [
        "attic-1 and 1 like it",
        "cellar",
    ]


def test_every_node_of_a_proxy_has_an_address_of_its_own() -> None:
    addresses = [node_address(number) for number in range(62_500)]
    assert len(set(addresses)) == len(addresses)
    assert addresses[0] == "127.77.0.1"
    assert addresses[-1] == "127.77.249.250"


@pytest.mark.parametrize("backend", [Backend.PROXY, Backend.TUNNEL])
def test_only_the_kernels_queues_have_a_fallback(backend: Backend) -> None:
    links = profile_links(["home-dsl"], 0)
    assert choose_backend(backend, links, Fallback.REFUSE) == (backend, "")
    with pytest.raises(NetsimError, match=f"{backend} has no fallback"):
        choose_backend(backend, links, Fallback.TUNNEL)


def test_greeting_says_who_dials_whom() -> None:
    sites = Sites(
        backend="proxy",
        coordinator=Site(dials="127.0.0.1"),
        nodes={"lan": Site(dials="127.77.0.1")},
        ports=(4000, 4001),
    )
    assert greeting(sites) == [
        "1 link is open (proxy); the coordinator listens on 127.0.0.1, ports 4000 and 4001 only",
        "  lan dials 127.77.0.1",
    ]


def test_greeting_says_how_to_run_something_inside() -> None:
    inside = Site(prefix=("ip", "netns", "exec", "x"), dials="10.77.0.1")
    sites = Sites(backend="tunnel", coordinator=inside, nodes={"a": inside, "b": inside})
    assert greeting(sites)[0].startswith("2 links are open (tunnel)")
    assert greeting(sites)[1].endswith("from inside: ip netns exec x COMMAND")
