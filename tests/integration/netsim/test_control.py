"""Open links changed by the programs that run over them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from hypergpu.sites import Sites
from netsim.emulation.requests import Condition, LinkRequestFailed, Reset, SetCondition, SetShape
from netsim.link.error import NetsimError
from netsim.network import control
from netsim.network.backends import BACKENDS, profile_links
from netsim.network.options import Backend
from netsim.network.profiles import PROFILES
from netsim.network.programs import controllable
from tests.integration.netsim.shaped import OPENABLE

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("serving", flush=True)
while True:
    client, _ = server.accept()
    with client:
        client.sendall(client.recv(1))
"""
DIAL = """
import socket, sys
try:
    address, within_s = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
    with socket.create_connection(address, within_s) as server:
        server.sendall(b"x")
        print("heard" if server.recv(1) else "closed")
except TimeoutError:
    print("silent")
"""
LONG_S, SHORT_S = 60, 1.5


@asynccontextmanager
async def lan(backend: str = Backend.PROXY) -> AsyncIterator[Sites]:
    async with (
        BACKENDS[Backend(backend)].open(profile_links(["lan"], 0)) as links,
        controllable(links) as sites,
    ):
        yield sites


async def dial(sites: Sites, port: int, within_s: float) -> str:
    (site,) = sites.nodes.values()
    words = [sys.executable, "-c", DIAL, site.dials, str(port), str(within_s)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*site.command(words), stdout=pipe)
    out, _ = await child.communicate()
    return out.decode().strip()


@pytest.mark.parametrize("backend", OPENABLE)
async def test_a_cut_link_is_silent_until_it_is_healed(backend: str) -> None:
    async with lan(backend) as sites:
        port = sites.ports[0] if sites.ports else 7700
        words = [sys.executable, "-c", SERVE, sites.coordinator.dials, str(port)]
        pipe = asyncio.subprocess.PIPE
        command = sites.coordinator.command(words)
        server = await asyncio.create_subprocess_exec(*command, stdout=pipe)
        assert server.stdout is not None
        assert await server.stdout.readline() == b"serving\n"
        assert await dial(sites, port, LONG_S) == "heard"
        await control.ask_links(sites.control, SetCondition("lan", Condition.CUT))
        assert await dial(sites, port, SHORT_S) == "silent"
        await control.ask_links(sites.control, SetCondition("lan", Condition.OPEN))
        assert await dial(sites, port, LONG_S) == "heard"
        assert "VALID" in (await control.read_verdict(sites.control)).sentence
        server.kill()
        await server.wait()


@pytest.mark.parametrize("backend", OPENABLE)
async def test_what_cannot_be_done_is_refused_and_the_links_stay(backend: str) -> None:
    async with lan(backend) as sites:
        with pytest.raises(NetsimError, match="nobody"):
            await control.ask_links(sites.control, SetCondition("nobody", Condition.CUT))
        if backend != Backend.PROXY:
            with pytest.raises(NetsimError, match="no connection of lan"):
                await control.ask_links(sites.control, Reset("lan"))
        await control.ask_links(sites.control, SetShape("lan", PROFILES["D"].shape))
        assert (await control.read_verdict(sites.control)).sentence


async def test_a_line_that_is_no_request_is_answered_and_the_next_one_heard() -> None:
    async with lan() as sites:
        reader, writer = await asyncio.open_unix_connection(sites.control)
        for line in (b"nonsense\n", b'{"type": "explode"}\n', b'{"type": "reset"}\n'):
            writer.write(line)
            assert b"no request" in await reader.readline()
        writer.write(b'{"type": "verdict"}\n')
        assert b"sentence" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_an_impossible_link_is_refused_at_once_and_the_next_request_heard() -> None:
    request = msgspec.to_builtins(SetShape("lan", PROFILES["D"].shape))
    request["shape"]["link"]["up"]["delay_us"] = -1
    async with lan() as sites:
        reader, writer = await asyncio.open_unix_connection(sites.control)
        writer.write(msgspec.json.encode(request) + b"\n")
        answer = msgspec.json.decode(await reader.readline(), type=LinkRequestFailed)
        assert "delay" in answer.detail
        assert answer.fix
        writer.write(b'{"type": "verdict"}\n')
        assert b"sentence" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_links_that_are_closed_do_not_answer() -> None:
    async with lan() as sites:
        path = sites.control
    with pytest.raises(NetsimError, match="do not answer"):
        await control.read_verdict(path)
