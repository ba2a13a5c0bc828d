"""The proxy and the measuring ends as programs of their own, and the documented example."""

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hypergpu.units import Microseconds
from hypergpu.wire.free_ports import free_ports
from netsim.emulation.requests import Condition, LinkRequestFailed, Reset, SetCondition, SetShape
from netsim.link import STALLED_BITS_PER_S, UNLIMITED, LinkTrace, NetsimError, Shape, TraceRow
from netsim.measure.ends import END, HEADER, OFFERED, Arrivals
from netsim.proxy.process import Forward, ProxiedNode, ProxyPlan, ProxyProcess, ProxyProtocol
from tests.integration.netsim.proxied import (
    FREE,
    TIMEOUT_S,
    Dialled,
    link,
    plan,
    target,
)

PROGRAM = [sys.executable, "-P", "-m", "netsim.proxy"]


async def test_a_process_of_proxies_does_what_it_is_told() -> None:
    async with target() as port, ProxyProcess(plan(port, a=link(), b=link())) as proxies:
        async with Dialled(*proxies.address("a")) as connection:
            assert await connection.exchange(b"hello") == b"hello"
            await proxies.obey(SetCondition("a", Condition.CUT))
            connection.writer.write(b"while")
            assert await connection.is_silent_for(0.1)
            await proxies.obey(SetCondition("a", Condition.OPEN))
            assert await connection.receive(5) == b"while"
            await proxies.obey(SetShape("a", Shape(link=link(2, 10))))
            assert await connection.exchange(b"slower") == b"slower"
            await proxies.obey(Reset("a"))
            with pytest.raises(ConnectionResetError):
                await connection.receive(1)
        statistics = await proxies.statistics()
        assert statistics.nodes["a"].up_bytes == 16
        assert statistics.lateness.packets > 0
        assert "p99" in statistics.lateness.verdict().sentence


async def test_a_refusal_comes_back_in_words() -> None:
    async with target() as port, ProxyProcess(plan(port, a=link())) as proxies:
        with pytest.raises(NetsimError, match=r"no proxy for 'z'. Fix: name one of a"):
            await proxies.obey(SetCondition("z", Condition.CUT))
        async with Dialled(*proxies.address("a")) as connection:
            assert await connection.exchange(b"still here") == b"still here"


async def test_a_link_follows_its_trace() -> None:
    rows = (
        TraceRow(at_us=Microseconds(0), up_bits_per_s=STALLED_BITS_PER_S),
        TraceRow(at_us=Microseconds(300_000), up_bits_per_s=100_000_000),
    )
    trace = LinkTrace(rows, Microseconds(600_000_000))
    async with target() as port:
        node = ProxiedNode(
            name="a",
            shape=Shape(link=UNLIMITED, traces=(trace,)),
            forwards=(Forward(target_port=port),),
        )
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        async with (
            ProxyProcess(ProxyPlan(nodes=(node,), coordinator=FREE)) as proxies,
            Dialled(*proxies.address("a")) as connection,
        ):
            assert await connection.exchange(b"through the gap") == b"through the gap"
        assert loop.time() - before_s >= 0.3


async def test_it_ends_when_its_owner_is_gone_however_it_went() -> None:
    async with target() as port:
        child = await asyncio.create_subprocess_exec(
            *PROGRAM, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(plan(port, a=link())) + b"\n")
        async with asyncio.timeout(TIMEOUT_S):
            await child.stdout.readline()
        child.stdin.close()
        async with asyncio.timeout(TIMEOUT_S):
            assert await child.wait() == 0


async def test_an_answer_that_came_too_late_is_given_to_nobody() -> None:
    async with target() as port, ProxyProcess(plan(port, a=link()), answer_s=0.2) as proxies:
        assert proxies.pid is not None
        os.kill(proxies.pid, signal.SIGSTOP)
        with pytest.raises(NetsimError, match="without an answer for too long"):
            await proxies.statistics()
        os.kill(proxies.pid, signal.SIGCONT)
        with pytest.raises(NetsimError, match="without an answer for too long"):
            await proxies.obey(SetCondition("a", Condition.CUT))


async def test_who_is_cancelled_leaves_no_answer_for_the_next_one() -> None:
    async with target() as port, ProxyProcess(plan(port, a=link())) as proxies:
        assert proxies.pid is not None
        os.kill(proxies.pid, signal.SIGSTOP)
        obey_task = asyncio.create_task(proxies.obey(SetCondition("a", Condition.CUT)))
        await asyncio.sleep(0)
        obey_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await obey_task
        os.kill(proxies.pid, signal.SIGCONT)
        assert (await proxies.statistics()).nodes["a"].condition is Condition.CUT


async def test_who_finds_no_file_left_waits_until_there_is_one() -> None:
    async with target() as port, ProxyProcess(plan(port, a=link())) as proxies:
        assert proxies.pid is not None
        limits = resource.prlimit(proxies.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(proxies.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        async with Dialled(*proxies.address("a")) as connection:
            connection.writer.write(b"hello")
            assert await connection.is_silent_for(0.3)
            resource.prlimit(proxies.pid, resource.RLIMIT_NOFILE, limits)
            assert await connection.receive(5) == b"hello"


@pytest.mark.parametrize(("limit", "says"), [("-n", b"open files"), ("-Sn", b"opened")])
def test_more_nodes_than_files_are_refused_at_the_hard_limit_only(limit: str, says: bytes) -> None:
    nodes = {f"n{number}": link() for number in range(60)}
    child = subprocess.run(
        ["sh", "-c", f'ulimit {limit} 100; exec "$@"', "sh", *PROGRAM],
        input=msgspec.json.encode(plan(1, protocol=ProxyProtocol.TCP, **nodes)) + b"\n",
        capture_output=True,
        check=False,
    )
    assert says in child.stdout


async def test_a_process_that_was_killed_is_told_in_words() -> None:
    async with target() as port, ProxyProcess(plan(port, a=link())) as proxies:
        assert proxies.pid is not None
        os.kill(proxies.pid, signal.SIGKILL)
        with pytest.raises(NetsimError, match="process is gone"):
            await proxies.statistics()


@pytest.mark.parametrize("words", [b"", b"{}\n", b'{"nodes": 3}\n', b"\xff\xfe\n"])
def test_a_plan_that_is_none_is_refused(words: bytes) -> None:
    child = subprocess.run(PROGRAM, input=words, capture_output=True, check=False)
    request_failure = msgspec.json.decode(child.stdout, type=LinkRequestFailed)
    assert child.returncode == 2
    assert "does not understand" in request_failure.detail
    assert request_failure.fix
    assert child.stderr == b""


ROOT = Path(__file__).parents[3]


def test_the_example_of_the_manual_runs() -> None:
    manual = (ROOT / "docs/netsim/proxy.md").read_text("utf-8")
    example = re.search(r"^```python\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    assert example
    port, node_port, bulk_port = free_ports(3)
    program = example[1].replace("7700", str(port)).replace("7701", str(node_port))
    program = program.replace("7702", str(bulk_port))
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"('127.77.0.1', {port})" in child.stdout
    assert "VALID" in child.stdout


HOST = "127.0.0.1"
WITHIN_S = 240


def test_datagrams_of_an_earlier_measurement_do_not_end_this_one() -> None:
    (port,) = free_ports(1)
    before_ns = time.monotonic_ns()
    arguments = msgspec.json.encode({"address": HOST, "port": port}).decode()
    command = [sys.executable, "-m", "netsim.measure", "collect", arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.connect((HOST, port))
            sender.send(HEADER.pack(7, before_ns))
            sender.send(HEADER.pack(END, before_ns) + OFFERED.pack(8))
            for number in range(3):
                sender.send(HEADER.pack(number, time.monotonic_ns()))
            sender.send(HEADER.pack(END, time.monotonic_ns()) + OFFERED.pack(4))
        out, _ = receiver.communicate(timeout=WITHIN_S)
    arrivals = msgspec.json.decode(out, type=Arrivals)
    assert arrivals.offered == 4
    assert arrivals.numbers == [0, 1, 2]
