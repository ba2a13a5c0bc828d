"""Open links changed by the programs that run over them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from hypergpu.sites import Sites
from netsim.cli.asked import links_of_profiles
from netsim.error import NetsimError
from netsim.network.ground import control
from netsim.network.ground.backend import Backend
from netsim.network.ground.holding import opened, told
from netsim.network.profiles import PROFILES
from tests.integration.netsim.shaped import BACKENDS

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
        opened(Backend(backend), links_of_profiles(["lan"], 0)) as ground,
        told(ground) as sites,
    ):
        yield sites


async def dialled(sites: Sites, port: int, within_s: float) -> str:
    (site,) = sites.nodes.values()
    words = [sys.executable, "-c", DIAL, site.dials, str(port), str(within_s)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*site.command(words), stdout=pipe)
    out, _ = await child.communicate()
    return out.decode().strip()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_cut_link_is_silent_until_it_is_healed(backend: str) -> None:
    async with lan(backend) as sites:
        port = sites.ports[0] if sites.ports else 7700
        words = [sys.executable, "-c", SERVE, sites.coordinator.dials, str(port)]
        pipe = asyncio.subprocess.PIPE
        command = sites.coordinator.command(words)
        server = await asyncio.create_subprocess_exec(*command, stdout=pipe)
        assert server.stdout is not None
        assert await server.stdout.readline() == b"serving\n"
        assert await dialled(sites, port, LONG_S) == "heard"
        await control.asked(sites.control, control.Cut("lan"))
        assert await dialled(sites, port, SHORT_S) == "silent"
        await control.asked(sites.control, control.Heal("lan"))
        assert await dialled(sites, port, LONG_S) == "heard"
        answer = await control.asked(sites.control, control.ReadVerdict())
        assert answer.verdict is not None
        assert "VALID" in answer.verdict.sentence
        server.kill()
        await server.wait()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_cannot_be_done_is_refused_and_the_links_stay(backend: str) -> None:
    async with lan(backend) as sites:
        with pytest.raises(NetsimError, match="nobody"):
            await control.asked(sites.control, control.Cut("nobody"))
        if backend != Backend.PROXY:
            with pytest.raises(NetsimError, match="no connection of lan"):
                await control.asked(sites.control, control.Reset("lan"))
        await control.asked(sites.control, control.SetLink("lan", PROFILES["D"].link))
        answer = await control.asked(sites.control, control.ReadVerdict())
        assert answer.verdict is not None


async def test_a_line_that_is_no_request_is_answered_and_the_next_one_heard() -> None:
    async with lan() as sites:
        reader, writer = await asyncio.open_unix_connection(sites.control)
        for line in (b"nonsense\n", b'{"type": "explode"}\n', b'{"type": "cut"}\n'):
            writer.write(line)
            assert b"no request" in await reader.readline()
        writer.write(b'{"type": "verdict"}\n')
        assert b"sentence" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_an_impossible_link_is_refused_at_once_and_the_next_request_heard() -> None:
    link = PROFILES["D"].link
    request = msgspec.to_builtins(control.SetLink("lan", link))
    request["link"]["up"]["delay_us"] = -1
    async with lan() as sites:
        reader, writer = await asyncio.open_unix_connection(sites.control)
        writer.write(msgspec.json.encode(request) + b"\n")
        answer = msgspec.json.decode(await reader.readline(), type=control.Answer)
        assert "delay" in answer.refused
        assert answer.fix
        writer.write(b'{"type": "verdict"}\n')
        assert b"sentence" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_links_that_are_closed_do_not_answer() -> None:
    async with lan() as sites:
        path = sites.control
    with pytest.raises(NetsimError, match="do not answer"):
        await control.asked(path, control.ReadVerdict())
