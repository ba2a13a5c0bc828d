"""What `doctor` says of congestion control."""

from pathlib import Path

import pytest

from hypergpu.cli.checks import (
    OK,
    WARN,
    control_check,
    joined_host,
    uplink_check,
    way_of,
)
from hypergpu.wire.congestion import Controls, RouteSettings, controls

LOADED = Controls("cubic", ("reno", "cubic", "bbr"), is_bbr_loadable=False)
LOADABLE = Controls("cubic", ("reno", "cubic"), is_bbr_loadable=True)
LACKING = Controls("cubic", ("reno", "cubic"), is_bbr_loadable=False)
BBR = Controls("bbr", ("reno", "cubic", "bbr"), is_bbr_loadable=False)
UNKNOWN = Controls("", (), is_bbr_loadable=False)
WAY = RouteSettings("203.0.113.5", "eth0", "192.168.1.1", "192.168.1.7", "", is_local=False)
ROUTE = "ip route replace 203.0.113.5/32 via 192.168.1.1 dev eth0 src 192.168.1.7 congctl bbr"
FOR_ALL = "sysctl -w net.ipv4.tcp_congestion_control=bbr"


@pytest.mark.parametrize(
    ("found", "verdict", "fix"),
    [
        (BBR, OK, ""),
        (UNKNOWN, OK, ""),
        (LOADED, WARN, f"for all connections: {FOR_ALL}"),
        (LOADABLE, WARN, f"for all connections: modprobe tcp_bbr && {FOR_ALL}"),
        (LACKING, WARN, "use a kernel with tcp_bbr: Linux 4.9 or later, its modules installed"),
    ],
)
def test_a_machine_is_told_what_its_connections_get(
    found: Controls, verdict: str, fix: str
) -> None:
    check = control_check(found)
    assert (check.verdict, check.fix) == (verdict, fix)


def test_a_node_gets_the_command_for_the_route_to_its_coordinator() -> None:
    check = uplink_check("example.org", WAY, LOADED)
    assert check.what.startswith("updates to example.org leave through eth0 by cubic")
    assert check.fix.endswith(f"or by hand: {ROUTE}")
    assert "--congestion-control bbr" in check.fix
    assert f"modprobe tcp_bbr && {ROUTE}" in uplink_check("example.org", WAY, LOADABLE).fix


def test_a_route_that_has_bbr_already_is_good_whatever_the_default() -> None:
    check = uplink_check("example.org", WAY._replace(congestion_control="bbr"), LOADED)
    assert (check.verdict, check.fix) == (OK, "")


def test_a_coordinator_on_this_machine_needs_no_route() -> None:
    assert uplink_check("127.0.0.1", way_of("127.0.0.1"), LACKING).verdict == OK


def test_the_host_is_the_one_that_the_node_joined(tmp_path: Path) -> None:
    assert joined_host(tmp_path) == ""
    kept = '{"address": "[2001:db8::1]:7701", "is_plaintext": false, "certificate_life_s": 1}'
    (tmp_path / "coordinator.json").write_text(kept)
    assert joined_host(tmp_path) == "2001:db8::1"
    (tmp_path / "coordinator.json").write_bytes(b'{"address": "\xff"}')
    assert joined_host(tmp_path) == ""


def test_this_kernel_tells_what_its_connections_get() -> None:
    found = controls()
    assert found.default in found.available
