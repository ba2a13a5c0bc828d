"""Words of ssh: which machine is meant, what is asked for, and what its failures mean."""

from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.user.cli.reach import RentedHost, listen_behind
from hypergpu.user.cli.verdicts import FAIL, OK, via_check
from hypergpu.user.cluster.cluster import Listen
from hypergpu.user.cluster.ssh import (
    SshDestination,
    failure_of,
    forward_command,
    hostname_of,
    parse_destination,
)
from hypergpu.user.cluster.via import ViaState

RENTED = SshDestination("ann", "203.0.113.7", 2222)


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("ann@203.0.113.7:2222", RENTED),
        ("rented", SshDestination("", "rented")),
        ("root@[2001:db8::1]:22", SshDestination("root", "2001:db8::1", 22)),
        ("a.b-c@x.example.org", SshDestination("a.b-c", "x.example.org")),
    ],
)
def test_destination_is_read(text: str, destination: SshDestination) -> None:
    assert parse_destination(text) == destination


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=x", "ann@-x", "", "a b", "x:0", "x:70000", "2001:db8::1", "a@b@c"]
)
def test_text_that_names_no_machine_is_refused(text: str) -> None:
    with pytest.raises(HyperGPUError, match="names no machine"):
        parse_destination(text)


def test_command_checks_the_host_key_and_ends_with_a_forwarding_that_fails() -> None:
    command = forward_command(RENTED, "127.0.0.1", (7700, 7701))
    for option in ("StrictHostKeyChecking=yes", "ExitOnForwardFailure=yes", "BatchMode=yes"):
        assert option in command
    assert "*:7700:127.0.0.1:7700" in command
    assert command[-4:] == ["-p", "2222", "--", "ann@203.0.113.7"]


def test_host_is_the_one_that_ssh_dials() -> None:
    settings = "user ann\nhostname 198.51.100.9\nport 22\n"
    assert hostname_of(settings, SshDestination("", "rented")) == "198.51.100.9"


def test_unknown_failure_is_told_in_the_words_of_ssh() -> None:
    lines = ["debug1: Reading configuration data\n", "kex: no common algorithm\n"]
    failure = failure_of(lines, RENTED)
    assert failure.detail == "ssh -p 2222 ann@203.0.113.7: kex: no common algorithm"
    assert failure.fix == "see what it says: ssh -v -p 2222 ann@203.0.113.7"


def test_coordinator_behind_a_rented_machine_listens_on_loopback_and_names_the_machine() -> None:
    at = Listen(data_dir=Path("/x"), advertise=("192.168.1.20",))
    behind = listen_behind(at, RentedHost(RENTED, "203.0.113.7"))
    assert (behind.listen, behind.advertise) == ("127.0.0.1", ("203.0.113.7", "192.168.1.20"))
    assert listen_behind(at, None) == at


def test_plaintext_does_not_go_through_a_rented_machine() -> None:
    at = Listen(data_dir=Path("/x"), is_plaintext=True)
    with pytest.raises(HyperGPUError, match="not encrypted"):
        listen_behind(at, RentedHost(RENTED, "203.0.113.7"))


def test_doctor_tells_the_state() -> None:
    state = ViaState("ann@x", "x", (7700,), 1, is_up=True)
    assert via_check(state, "").verdict == OK
    assert via_check(state, "Connection refused").verdict == FAIL
    lost_state = ViaState(
        "ann@x", "x", (7700,), 1, is_up=False, detail="it is away", fix="start it"
    )
    assert (via_check(lost_state, "").what, via_check(lost_state, "").fix) == (
        "ann@x: it is away",
        "start it",
    )
