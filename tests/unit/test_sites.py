import msgspec
import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.sites import SITES_VARIABLE, Site, Sites, told_sites

SITES = Sites(
    backend="tunnel",
    coordinator=Site(prefix=("ip", "netns", "exec", "x"), dials="10.77.0.1"),
    nodes={"a": Site(dials="127.77.0.1"), "b": Site(dials="10.77.0.1")},
    ports=(7700, 7701),
    control="/run/somewhere",
)


def test_sites_survive_the_environment() -> None:
    text = msgspec.json.encode(SITES).decode()
    assert told_sites({SITES_VARIABLE: text}) == SITES


def test_a_program_that_is_told_nothing_has_no_sites() -> None:
    assert told_sites({}) is None
    assert told_sites({SITES_VARIABLE: ""}) is None


@pytest.mark.parametrize("text", ["{", "{}", '{"backend": 7}', "null", '{"backend": "\udcff"}'])
def test_altered_sites_are_refused_with_the_variable_named(text: str) -> None:
    with pytest.raises(HyperGPUError, match=SITES_VARIABLE) as refused:
        told_sites({SITES_VARIABLE: text})
    assert refused.value.reason is Reason.FILE_UNUSABLE


def test_a_command_goes_behind_the_prefix_of_its_site() -> None:
    assert SITES.coordinator.command(["ls", "-l"]) == ["ip", "netns", "exec", "x", "ls", "-l"]
    assert SITES.nodes["a"].command(["ls"]) == ["ls"]


def test_each_address_of_the_coordinator_is_named_once() -> None:
    assert SITES.addresses == ("10.77.0.1", "127.77.0.1")
