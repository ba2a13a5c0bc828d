"""The kernel's own queues, as far as the kernel that runs this has them."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from hypergpu.units import Microseconds
from netsim.emulation import namespaces
from netsim.emulation.requests import Reset, SetShape
from netsim.link import (
    CongestionControl,
    Link,
    LinkDirection,
    NatKind,
    NetsimError,
    Shape,
    Variation,
)
from netsim.measure.ends import Arrivals
from netsim.network.backends import BACKENDS, Links, choose_backend
from netsim.network.options import Backend, Fallback
from netsim.tc.plan import FRAME_BYTES
from netsim.tc.traffic_control import TrafficControl, kernel_lacks

pytestmark = pytest.mark.needs("namespaces")

ROOT = Path(__file__).parents[3]
MBIT = 1_000_000
TIMEOUT_S = 240
ETH_P_ALL = 3
SLOTS = 20
OURS = f"test{os.getpid()}"


def link(
    up_mbit_s: int = 0,
    down_mbit_s: int = 0,
    *,
    delay_ms: int = 0,
    control: CongestionControl = CongestionControl.CUBIC,
) -> Link:
    def way(mbit_s: int) -> LinkDirection:
        return LinkDirection(delay_us=Microseconds(delay_ms * 1000), bits_per_s=mbit_s * MBIT)

    return Link(up=way(up_mbit_s), down=way(down_mbit_s), congestion_control=control)


FREE = link()


def present(ending: str = f"-{OURS}") -> set[str]:
    """The namespaces that ``ip netns`` knows, of these tests only; others may run beside them."""
    return {each.name for each in namespaces.FOLDER.glob(f"*{ending}")}


def read_records() -> str:
    """What all runs have written down as theirs."""
    records = []
    for path in namespaces.RECORDS.glob("*.json"):
        with suppress(FileNotFoundError):
            records.append(path.read_text("utf-8"))
    return "\n".join(records)


async def probe(control: TrafficControl, node: str) -> Arrivals:
    return await control.probe(node).probes("up", count=20, gap_us=Microseconds(1000))


@pytest.mark.parametrize(("way", "mbit_s"), [("up", 2), ("down", 8)])
async def test_each_way_has_its_own_rate(way: str, mbit_s: int) -> None:
    async with TrafficControl({"a": link(2, 8)}, FREE) as control:
        flood = await control.probe("a").flood(
            way,  # type: ignore[arg-type]
            bits_per_s=round(1.5 * mbit_s * MBIT),
            for_s=1.5,
        )
    # A sender that waited for a core for longer than the queue lasts offered less than the rate.
    assert 0.6 * mbit_s * MBIT < flood.bits_per_s() < 1.05 * mbit_s * MBIT


async def test_the_coordinators_own_link_limits_a_faster_node() -> None:
    async with TrafficControl({"a": link(100, 100)}, link(8, 8)) as control:
        flood = await control.probe("a").flood("up", bits_per_s=16 * MBIT, for_s=1.5)
    assert 4.8 * MBIT < flood.bits_per_s() < 8.4 * MBIT


async def test_a_frame_is_one_packet_even_in_a_stream() -> None:
    longest = 0
    async with TrafficControl({"a": link(0, 50)}, FREE) as control:
        with namespaces.inside_namespace(control.host("a").namespace):
            tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        with tap:
            tap.bind(("eth0", ETH_P_ALL))
            tap.setblocking(False)
            await control.probe("a").stream("down", for_s=0.5)
            while True:
                try:
                    longest = max(longest, tap.recv_into(bytearray(1), 0, socket.MSG_TRUNC))
                except BlockingIOError:
                    break
    assert longest == FRAME_BYTES


async def test_a_rate_that_is_set_changes_under_way() -> None:
    async with TrafficControl({"a": link(20, 20)}, FREE) as control:
        await control.obey(SetShape("a", Shape(link=link(4, 20))))
        flood = await control.probe("a").flood("up", bits_per_s=8 * MBIT, for_s=1.5)
    assert 2.4 * MBIT < flood.bits_per_s() < 4.3 * MBIT


async def test_a_link_without_limits_can_get_some() -> None:
    async with TrafficControl({"a": FREE}, FREE) as control:
        await control.obey(SetShape("a", Shape(link=link(4, 4))))
        flood = await control.probe("a").flood("up", bits_per_s=8 * MBIT, for_s=1.5)
    assert 2.4 * MBIT < flood.bits_per_s() < 4.3 * MBIT


async def test_a_delay_is_delivered_or_refused_with_what_the_kernel_lacks() -> None:
    lacks = {lack.part for lack in kernel_lacks()}
    control = TrafficControl({"a": link(delay_ms=25)}, FREE)
    if "netem" in lacks:
        with pytest.raises(NetsimError) as failure:
            await control.__aenter__()
        assert failure.value.detail.startswith("a has a delay of 25 ms up")
        assert "this kernel lacks netem" in failure.value.detail
        assert "tunnel" in failure.value.fix
    else:
        async with control:
            assert min((await probe(control, "a")).delays_ms()) >= 25


def test_what_was_tried_leaves_nothing_behind() -> None:
    assert {lack.part for lack in kernel_lacks()} <= {"netem"}
    scratch_names, recorded_names = present(".scratch"), read_records()
    # Another run may be trying the kernel just now, and have removed its own by then.
    assert not {name for name in scratch_names if name not in recorded_names} & present(".scratch")


async def test_a_link_that_changes_by_itself_is_refused() -> None:
    with pytest.raises(NetsimError, match="the link of a varies by itself"):
        await BACKENDS[Backend.TC].open(links_of(VARYING)).__aenter__()


async def test_programs_are_told_where_they_run() -> None:
    links = Links(nodes={"a": Shape(link=link(20, 20))}, coordinator=Shape(link=FREE))
    async with BACKENDS[Backend.TC].open(links) as open_links:
        argv = open_links.sites.nodes["a"].command(["ip", "-brief", "address", "show", "eth0"])
        child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await child.communicate()
        assert await open_links.owner.lateness() is None
        with pytest.raises(NetsimError, match="knows no connection"):
            await open_links.owner.obey(Reset("a"))
    assert "10.77.0.2/16" in out.decode()
    assert open_links.sites.nodes["a"].dials == "10.77.0.1"


VARYING = Shape(link=FREE, variation=Variation(delay_step_ms=1.0))


def links_of(shape: Shape) -> Links:
    return Links(nodes={"a": shape}, coordinator=Shape(link=FREE))


def test_links_that_the_kernel_can_do_stay_where_they_were_asked_for() -> None:
    choice = choose_backend(Backend.TC, links_of(Shape(link=link(5, 5))), Fallback.TUNNEL)
    assert choice == (Backend.TC, "")


def test_links_that_vary_by_themselves_fall_to_the_tunnel_with_the_reason() -> None:
    backend, reason = choose_backend(Backend.TC, links_of(VARYING), Fallback.TUNNEL)
    assert backend is Backend.TUNNEL
    assert reason.startswith("the link of a varies by itself")


def test_hosts_behind_a_nat_fall_to_the_tunnel_with_the_reason() -> None:
    links = links_of(Shape(link=FREE, nat=NatKind.SYMMETRIC))
    backend, reason = choose_backend(Backend.TC, links, Fallback.TUNNEL)
    assert backend is Backend.TUNNEL
    assert reason.startswith("a stands behind a NAT")


async def test_a_host_behind_a_nat_is_refused() -> None:
    links = links_of(Shape(link=FREE, nat=NatKind.SYMMETRIC))
    with pytest.raises(NetsimError, match=r"a stands behind a NAT .symmetric.*tc does not"):
        await BACKENDS[Backend.TC].open(links).__aenter__()


def test_without_the_wish_to_fall_back_they_are_refused_with_the_option() -> None:
    with pytest.raises(NetsimError, match="varies by itself") as failure:
        choose_backend(Backend.TC, links_of(VARYING), Fallback.REFUSE)
    assert "--fallback tunnel" in failure.value.fix
