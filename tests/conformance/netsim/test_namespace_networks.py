"""Tunnel and tc networks alike: what hosts see, and that nothing is ever left behind."""

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
from netsim.emulation.namespaces import NamespaceNetwork
from netsim.emulation.requests import Condition, SetCondition
from netsim.link import UNLIMITED, CongestionControl, Link, NetsimError
from netsim.tc.traffic_control import TrafficControl
from netsim.tunnel.tunnel import Tunnel
from tests.conformance.netsim.backends import can_tunnel

pytestmark = pytest.mark.needs("namespaces")

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240
SLOTS = 20
OURS = f"test{os.getpid()}"
RENO = Link(up=UNLIMITED.up, down=UNLIMITED.down, congestion_control=CongestionControl.RENO)
NETWORKS = [*([Tunnel] if can_tunnel() else []), TrafficControl]
ON_EACH = pytest.mark.parametrize("kind", NETWORKS)
Network = type[Tunnel] | type[TrafficControl]
OWNER = """
import asyncio, json, sys
from netsim.link import UNLIMITED
from netsim.tc.traffic_control import TrafficControl
from netsim.tunnel.tunnel import Tunnel

async def main():
    kinds = {"Tunnel": Tunnel, "TrafficControl": TrafficControl}
    async with kinds[sys.argv[1]]({sys.argv[2]: UNLIMITED}, UNLIMITED) as network:
        node = network.host(sys.argv[2])
        program = node.command(["sh", "-c", "echo inside; exec sleep 1000"])
        inside = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
        await inside.stdout.readline()
        sys.stdout.write(json.dumps([node.namespace, inside.pid]) + "\\n")
        sys.stdout.flush()
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def present() -> set[str]:
    """Return the namespaces of these tests; others may run beside them."""
    return {each.name for each in namespaces.FOLDER.glob(f"*-{OURS}")}


def read_records() -> str:
    """Return the records of all runs."""
    records = []
    for path in namespaces.RECORDS.glob("*.json"):
        with suppress(FileNotFoundError):
            records.append(path.read_text("utf-8"))
    return "\n".join(records)


def assert_nothing_left() -> None:
    assert present() == set()
    assert OURS not in read_records()


async def output_of(network: NamespaceNetwork, host: str, *command: str) -> str:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*network.host(host).command(command), stdout=pipe)
    async with asyncio.timeout(TIMEOUT_S):
        out, _ = await child.communicate()
    return out.decode()


async def arrived_share(network: NamespaceNetwork, node: str) -> float:
    probes = await network.probe(node).probes("up", count=20, gap_us=Microseconds(1000))
    return 1 - probes.loss()


@ON_EACH
async def test_hosts_run_the_congestion_control_of_their_links(kind: Network) -> None:
    async with kind({"a": UNLIMITED, "b": RENO}, UNLIMITED) as network:
        assert "congctl cubic" in await output_of(network, "a", "ip", "route")
        assert "congctl reno" in await output_of(network, "b", "ip", "route")
        address = network.host("b").address
        back = await output_of(network, "coordinator", "ip", "route", "get", address)
        assert "congctl reno" in back


@ON_EACH
async def test_a_cut_host_reaches_nobody_until_it_is_healed(kind: Network) -> None:
    async with kind({"a": UNLIMITED, "b": UNLIMITED}, UNLIMITED) as network:
        await network.obey(SetCondition("a", Condition.CUT))
        # A host that answered would refuse the port at once.
        program = (
            "import socket; s = socket.socket(type=2); s.settimeout(0.5); s.connect(('{}', 9))\n"
            "try: s.send(b'x'); s.recv(1)\nexcept Exception as error: print(type(error).__name__)"
        ).format(network.host("coordinator").address)
        assert await output_of(network, "a", sys.executable, "-c", program) == "TimeoutError\n"
        assert await arrived_share(network, "b") == 1
        await network.obey(SetCondition("a", Condition.OPEN))
        assert await arrived_share(network, "a") == 1


@ON_EACH
async def test_a_start_that_is_cancelled_leaves_nothing(kind: Network) -> None:
    start_task = asyncio.create_task(kind({OURS: UNLIMITED}, UNLIMITED).__aenter__())
    await asyncio.sleep(0)
    start_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start_task
    assert_nothing_left()


@ON_EACH
async def test_nothing_is_left_after_an_error_inside(kind: Network) -> None:
    children: list[asyncio.subprocess.Process] = []

    async def fail() -> None:
        async with kind({OURS: UNLIMITED}, UNLIMITED) as network:
            command = network.host(OURS).command(["sh", "-c", "echo inside; exec sleep 1000"])
            pipe = asyncio.subprocess.PIPE
            children.append(await asyncio.create_subprocess_exec(*command, stdout=pipe))
            assert children[0].stdout is not None
            assert await children[0].stdout.readline() == b"inside\n"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert_nothing_left()
    async with asyncio.timeout(TIMEOUT_S):
        assert await children[0].wait() == -signal.SIGKILL


@ON_EACH
async def test_a_namespace_that_is_not_ours_is_refused_and_left_alone(kind: Network) -> None:
    foreign = [f"netsim-{slot}-{OURS}" for slot in range(SLOTS)]
    namespaces.create(foreign)
    try:
        with pytest.raises(NetsimError, match=f"ip netns delete netsim-[0-9]+-{OURS}"):
            await kind({"b": UNLIMITED, OURS: UNLIMITED}, UNLIMITED).__aenter__()
        assert present() == set(foreign)
    finally:
        namespaces.destroy(foreign)


@ON_EACH
@pytest.mark.parametrize("name", ["coordinator", "a b", "", "../a", "x" * 65])
def test_a_node_with_an_impossible_name_is_refused(kind: Network, name: str) -> None:
    with pytest.raises(NetsimError, match="a node"):
        kind({name: UNLIMITED})


@ON_EACH
async def test_a_closed_network_says_that_it_is(kind: Network) -> None:
    with pytest.raises(NetsimError, match="not open"):
        await kind({"a": UNLIMITED}).obey(SetCondition("a", Condition.CUT))


class OtherRun:
    """Another run of netsim, which has opened a network with a program inside."""

    def __init__(self, kind: Network) -> None:
        command = [sys.executable, "-c", OWNER, kind.__name__, OURS]
        self.owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.owner.stdout is not None
        self.namespace, inside_pid = json.loads(self.owner.stdout.readline())
        self.inside = psutil.Process(inside_pid)
        children = psutil.Process(self.owner.pid).children()
        (self.helper,) = (each for each in children if each.pid != inside_pid)

    def kill_owner(self) -> None:
        """Kill the owner; until it has ended it holds the lock of its record."""
        self.owner.kill()
        self.owner.wait()


@pytest.fixture
def other(kind: Network) -> Iterator[OtherRun]:
    run = OtherRun(kind)
    yield run
    run.kill_owner()
    psutil.wait_procs([run.helper], TIMEOUT_S)
    assert run.owner.stdout is not None
    run.owner.stdout.close()


@ON_EACH
def test_a_network_whose_owner_was_killed_is_removed(other: OtherRun) -> None:
    assert present() == {other.namespace}
    assert other.namespace in read_records()
    other.kill_owner()
    assert psutil.wait_procs([other.helper, other.inside], TIMEOUT_S)[1] == []
    assert_nothing_left()


@ON_EACH
def test_a_run_removes_what_one_left_that_was_killed_with_its_helper(other: OtherRun) -> None:
    other.helper.suspend()
    other.kill_owner()
    other.helper.kill()
    assert psutil.wait_procs([other.helper], TIMEOUT_S)[1] == []
    # Any other run may have cleaned up in between.
    namespaces.remove_leftovers()
    assert psutil.wait_procs([other.inside], TIMEOUT_S)[1] == []
    assert_nothing_left()


@ON_EACH
def test_a_run_that_goes_on_is_not_cleaned_away(other: OtherRun) -> None:
    namespaces.remove_leftovers()
    assert present() == {other.namespace}
