import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hypergpu.units import Microseconds
from netsim.emulation import namespaces
from netsim.emulation.requests import Condition, SetCondition
from netsim.link import CongestionControl, Link, LinkDirection
from netsim.link.error import NetsimError
from netsim.measure.probe import ProbedLink
from netsim.tunnel.tunnel import Tunnel

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240
OURS = f"test{os.getpid()}"
SLOTS = 20


def link(delay_ms: int = 1, control: CongestionControl = CongestionControl.CUBIC) -> Link:
    way = LinkDirection(delay_us=Microseconds(delay_ms * 1000), bits_per_s=0)
    return Link(up=way, down=way, congestion_control=control)


def present() -> set[str]:
    """The namespaces of these tests; others may run beside them."""
    return {each.name for each in namespaces.FOLDER.glob(f"*-{OURS}")}


async def output_of(tunnel: Tunnel, host: str, *command: str) -> str:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*tunnel.host(host).command(command), stdout=pipe)
    out, _ = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
    return out.decode()


async def arrives(network: ProbedLink) -> float:
    probes = await network.probes("up", count=20, gap_us=Microseconds(1000))
    return 1 - probes.loss()


async def test_hosts_run_the_congestion_control_of_their_links() -> None:
    links = {"a": link(), "b": link(control=CongestionControl.RENO)}
    async with Tunnel(links, link()) as tunnel:
        assert "congctl cubic" in await output_of(tunnel, "a", "ip", "route")
        assert "congctl reno" in await output_of(tunnel, "b", "ip", "route")
        back = await output_of(
            tunnel, "coordinator", "ip", "route", "get", tunnel.host("b").address
        )
        assert "congctl reno" in back


async def test_a_cut_host_is_deaf_and_dumb_until_it_is_healed() -> None:
    async with Tunnel({"a": link(), "b": link()}, link()) as tunnel:
        await tunnel.obey(SetCondition("a", Condition.CUT))
        sent = "import socket; print(socket.socket(type=2).sendto(b'x', ('{}', 9)))"
        for host, target in [("a", "coordinator"), ("coordinator", "a")]:
            program = sent.format(tunnel.host(target).address)
            assert await output_of(tunnel, host, sys.executable, "-c", program) == "1\n"
        ports = (await tunnel.statistics()).ports
        assert ports["a"].is_cut
        assert ports["a"].up.offered == ports["a"].down.offered == 0
        assert await arrives(tunnel.probe("b")) == 1
        await tunnel.obey(SetCondition("a", Condition.OPEN))
        assert await arrives(tunnel.probe("a")) == 1


async def test_every_packet_is_accounted_for() -> None:
    lossy = LinkDirection(delay_us=Microseconds(1000), bits_per_s=20_000_000, loss=0.1)
    async with Tunnel({"a": Link(up=lossy, down=lossy)}, link(0)) as tunnel:
        probes = await tunnel.probe("a").probes("up", count=3000, gap_us=Microseconds(300))
        up = (await tunnel.statistics()).ports["a"].up
    assert up.offered == up.lost + up.overflowed + up.delivered
    assert up.lost > 0
    # The datagrams that end the measurement may be among those that the router lost.
    assert 0 <= up.lost + up.overflowed - (3000 - len(probes.numbers)) <= 20


async def test_a_link_that_is_set_changes_under_way() -> None:
    async with Tunnel({"a": link(1)}, link(0)) as tunnel:
        measured = tunnel.probe("a")
        await tunnel.set_link("a", link(80))
        slow = await measured.probes("up", count=20, gap_us=Microseconds(1000))
    assert min(slow.delays_ms()) >= 80


async def test_a_question_that_was_given_up_leaves_no_answer_for_the_next() -> None:
    async with Tunnel({"a": link()}, link()) as tunnel:
        given_up = asyncio.create_task(tunnel.statistics())
        await asyncio.sleep(0)
        given_up.cancel()
        assert await tunnel.set_link("a", link(2)) > 0
        assert (await tunnel.statistics()).ports["a"].up.offered == 0


async def test_an_answer_that_came_too_late_is_given_to_nobody() -> None:
    async with Tunnel({"a": link()}, link(), answer_s=0.2) as tunnel:
        os.kill(tunnel.router_pid, signal.SIGSTOP)
        with pytest.raises(NetsimError, match="without an answer for too long"):
            await tunnel.statistics()
        os.kill(tunnel.router_pid, signal.SIGCONT)
        with pytest.raises(NetsimError, match="without an answer for too long"):
            await tunnel.obey(SetCondition("a", Condition.CUT))


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async def start() -> None:
        async with Tunnel({OURS: link()}, link()):
            raise AssertionError

    starting = asyncio.create_task(start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert present() == set()


async def test_two_runs_at_once_keep_out_of_each_other() -> None:
    async with Tunnel({"a": link()}, link()) as one, Tunnel({"a": link()}, link()) as other:
        assert one.host("a").namespace != other.host("a").namespace
        assert await arrives(one.probe("a")) == 1
        assert await arrives(other.probe("a")) == 1


async def test_nothing_is_left_after_an_error_inside() -> None:
    child: list[asyncio.subprocess.Process] = []
    pipe = asyncio.subprocess.PIPE

    async def fail() -> None:
        async with Tunnel({OURS: link()}, link()) as tunnel:
            sleeping = tunnel.host(OURS).command(["sh", "-c", "echo inside; exec sleep 1000"])
            child.append(await asyncio.create_subprocess_exec(*sleeping, stdout=pipe))
            assert child[0].stdout is not None
            assert await child[0].stdout.readline() == b"inside\n"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert present() == set()
    assert await asyncio.wait_for(child[0].wait(), TIMEOUT_S) == -signal.SIGKILL


async def test_a_router_that_is_gone_is_told_and_nothing_is_left() -> None:
    async with Tunnel({OURS: link()}, link()) as tunnel:
        os.kill(tunnel.router_pid, signal.SIGKILL)
        with pytest.raises(NetsimError, match="router is gone"):
            await tunnel.statistics()
    assert present() == set()


OWNER = """
import asyncio, json, sys
from hypergpu.units import Microseconds
from netsim.link import Link, LinkDirection
from netsim.tunnel.tunnel import Tunnel

async def main():
    way = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)
    async with Tunnel({sys.argv[1]: Link(up=way, down=way)}) as tunnel:
        node = tunnel.host(sys.argv[1])
        program = node.command(["sh", "-c", "echo inside; exec sleep 1000"])
        inside = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
        await inside.stdout.readline()
        said = [node.namespace, tunnel.router_pid, inside.pid]
        sys.stdout.write(json.dumps(said) + "\\n")
        sys.stdout.flush()
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def owner() -> Iterator["subprocess.Popen[str]"]:
    """Another run of netsim, which has opened a tunnel."""
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, OURS], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    yield child
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def wait_for_network(owner: "subprocess.Popen[str]") -> tuple[str, int, int]:
    assert owner.stdout is not None
    namespace, router_pid, inside_pid = json.loads(owner.stdout.readline())
    return namespace, router_pid, inside_pid


def wait_for_end(pid: int) -> None:
    """Wait until a process that may not be ours is no more."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            with suppress(psutil.TimeoutExpired):
                process.wait(0.05)


def test_a_router_whose_owner_was_killed_removes_everything(
    owner: "subprocess.Popen[str]",
) -> None:
    namespace, router_pid, inside_pid = wait_for_network(owner)
    assert namespace in present()
    owner.kill()
    wait_for_end(router_pid)
    wait_for_end(inside_pid)
    assert namespace not in present()


def test_a_run_removes_what_one_left_that_was_killed_with_its_router(
    owner: "subprocess.Popen[str]",
) -> None:
    namespace, router_pid, inside_pid = wait_for_network(owner)
    assert namespace in present()
    os.kill(router_pid, signal.SIGSTOP)
    owner.kill()
    os.kill(router_pid, signal.SIGKILL)
    wait_for_end(router_pid)
    # Any other run may have cleaned up in between.
    namespaces.remove_leftovers()
    wait_for_end(inside_pid)
    assert namespace not in present()
    assert namespace not in namespaces.remove_leftovers()


def test_a_run_that_goes_on_is_not_cleaned_away(owner: "subprocess.Popen[str]") -> None:
    namespace, router_pid, _ = wait_for_network(owner)
    namespaces.remove_leftovers()
    assert namespace in present()
    owner.kill()
    wait_for_end(router_pid)


async def test_a_namespace_that_is_not_ours_is_refused_and_left_alone() -> None:
    foreign = [f"netsim-{slot}-{OURS}" for slot in range(SLOTS)]
    namespaces.create(foreign)
    try:
        with pytest.raises(NetsimError, match=f"ip netns delete netsim-[0-9]+-{OURS}"):
            async with Tunnel({"b": link(), OURS: link()}, link()):
                pass
        assert present() == set(foreign)
    finally:
        namespaces.destroy(foreign)


def test_the_name_of_a_node_must_be_one_of_a_namespace() -> None:
    with pytest.raises(NetsimError, match="cannot be named"):
        Tunnel({"../x": link()})
    with pytest.raises(NetsimError, match="named coordinator"):
        Tunnel({"coordinator": link()})


def test_without_root_the_tunnel_is_refused_before_anything_is_made() -> None:
    program = (
        "import os\n"
        "from netsim.link.error import NetsimError\n"
        "from netsim.tunnel.device import require_tunnel\n"
        "os.setuid(65534)\n"
        "try:\n    require_tunnel()\nexcept NetsimError as error:\n    print(error)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "needs root" in child.stdout
    assert "use sudo" in child.stdout
