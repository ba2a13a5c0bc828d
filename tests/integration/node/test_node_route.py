"""The route to the coordinator with BBR, in namespaces of real kernels."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_node.shell.link.route import route_error
from hypergpu.units import Microseconds
from hypergpu.wire.congestion import WITHOUT, Controls, RouteSettings, way_to
from netsim.link import CongestionControl, Link, LinkDirection
from netsim.tunnel.tunnel import Tunnel

HOLDER = Path(__file__).with_name("route_holder.py")
WAY = RouteSettings("203.0.113.5", "eth0", "192.168.1.1", "192.168.1.7", "", is_local=False)
COMMAND = "ip route add 203.0.113.5/32 via 192.168.1.1 dev eth0 src 192.168.1.7 congctl bbr"
CUBIC = ("reno", "cubic")


def link() -> Link:
    way = LinkDirection(delay_us=Microseconds(1000), bits_per_s=0)
    return Link(up=way, down=way, congestion_control=CongestionControl.CUBIC)


async def holder(tunnel: Tunnel, *arguments: str) -> Any:
    addresses = [tunnel.host(name).address for name in ("coordinator", "other")]
    command = [sys.executable, str(HOLDER), *addresses, *arguments]
    child = await asyncio.create_subprocess_exec(
        *tunnel.host("node").command(command), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(240):
        out, _ = await child.communicate()
    return json.loads(out)


async def test_the_route_to_the_coordinator_alone_has_bbr_until_the_node_leaves() -> None:
    async with Tunnel({"node": link(), "other": link()}, link()) as tunnel:
        controls, count, left_routes = await holder(tunnel)
    assert controls == ["cubic", "bbr", "cubic", "cubic"]
    assert count == 1
    assert left_routes == []


async def test_a_process_that_may_not_set_routes_is_told_the_command() -> None:
    async with Tunnel({"node": link(), "other": link()}, link()) as tunnel:
        why, fix = await holder(tunnel, "unprivileged")
        address = tunnel.host("coordinator").address
    assert why == "this process may not set routes"
    assert "CAP_NET_ADMIN" in fix
    assert f"ip route add {address}/32 dev " in fix


async def test_the_route_with_bbr_keeps_what_the_one_before_it_had() -> None:
    async with Tunnel({"node": link(), "other": link()}, link()) as tunnel:
        metrics, words = await holder(tunnel, "measured")
    assert metrics == ["mtu", "1280", "initcwnd", "20"]
    assert words == ["mtu", "1280", "initcwnd", "20"]


@pytest.mark.parametrize(
    ("found", "fix"),
    [
        (Controls("cubic", CUBIC, is_bbr_loadable=True), "as root: modprobe tcp_bbr"),
        (Controls("cubic", CUBIC, is_bbr_loadable=False), WITHOUT),
        (Controls("cubic", ("bbr",), is_bbr_loadable=True), f"try it as root: {COMMAND}"),
    ],
)
def test_what_hinders_comes_with_what_helps(found: Controls, fix: str) -> None:
    assert route_error("Error: Unknown tcp congestion algorithm.", WAY, found).fix == fix


def test_the_way_to_this_machine_itself_is_local() -> None:
    way = way_to("127.0.0.1")
    assert way is not None
    assert way.is_local
