"""Real sockets behind the tunnel's NATs: who is seen where, and who reaches whom."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from netsim.emulation.namespaces import COORDINATOR
from netsim.link import UNLIMITED, NatKind, Shape
from netsim.tunnel.tunnel import Tunnel

pytestmark = pytest.mark.needs("tunnel")

TIMEOUT_S = 60
PORT = 7000
REFLECTOR = """
import socket, sys
sock = socket.socket(type=socket.SOCK_DGRAM)
sock.bind(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
while True:
    _, sender = sock.recvfrom(2000)
    sock.sendto("{} {}".format(*sender).encode(), sender)
"""
# Reflection is a barrier, too: links without a delay keep the order, so what was sent to a host
# before its own question lies in its socket before the answer.
HOST = """
import socket, sys
reflector = (sys.argv[1], int(sys.argv[2]))
sock = socket.socket(type=socket.SOCK_DGRAM)
heard = []
def reflect():
    sock.sendto(b"where am I", reflector)
    while True:
        data, sender = sock.recvfrom(2000)
        if sender == reflector:
            return data.decode()
        heard.append(data.decode())
print(reflect(), flush=True)
for line in sys.stdin:
    address, port = line.split()
    sock.sendto(b"hello", (address, int(port)))
    reflect()
    print(len(heard), flush=True)
"""
LISTENER = """
import socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
connection, (address, _) = server.accept()
print(address, connection.recv(100).decode(), flush=True)
"""
CALLER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(b"joins")
print(connection.getsockname()[0], flush=True)
"""


class NamespaceProgram:
    """A program in a host's namespace, talked to by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return await self.read()

    async def read(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


@asynccontextmanager
async def program(
    tunnel: Tunnel, host: str, text: str, *arguments: str
) -> AsyncIterator[NamespaceProgram]:
    command: Sequence[str] = tunnel.host(host).command([sys.executable, "-c", text, *arguments])
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    child_program = NamespaceProgram(process)
    try:
        yield child_program
    finally:
        await child_program.end()


async def heard_after_punching(ours: NatKind, theirs: NatKind) -> tuple[int, int]:
    """Return how many packets each of two hosts got of four that both sent in turn."""
    shapes = {"a": Shape(link=UNLIMITED, nat=ours), "b": Shape(link=UNLIMITED, nat=theirs)}
    async with Tunnel(shapes, UNLIMITED) as tunnel:
        place = (tunnel.host(COORDINATOR).address, str(PORT))
        async with program(tunnel, COORDINATOR, REFLECTOR, str(PORT)) as reflector:
            assert await reflector.read() == "ready"
            async with (
                program(tunnel, "a", HOST, *place) as a,
                program(tunnel, "b", HOST, *place) as b,
            ):
                a_end, b_end = await a.read(), await b.read()
                assert a_end.split()[0] == tunnel.host("a").address
                counts = [(await a.ask(b_end), await b.ask(a_end)) for _ in range(4)]
                return int(counts[-1][0]), int(counts[-1][1])


async def test_hosts_behind_port_restricted_nats_reach_each_other_once_both_have_sent() -> None:
    # The first packet of a opens its own box, and is lost at b's.
    kind = NatKind.PORT_RESTRICTED
    assert await heard_after_punching(kind, kind) == (3, 3)


async def test_hosts_behind_symmetric_nats_do_not_reach_each_other() -> None:
    kind = NatKind.SYMMETRIC
    assert await heard_after_punching(kind, kind) == (0, 0)


async def test_a_host_behind_a_full_cone_hears_whoever_knows_its_public_end() -> None:
    assert await heard_after_punching(NatKind.FULL_CONE, NatKind.FULL_CONE) == (3, 4)


async def test_a_host_behind_a_nat_dials_the_coordinator_under_its_public_address() -> None:
    shape = Shape(link=UNLIMITED, nat=NatKind.SYMMETRIC)
    async with Tunnel({"a": shape}, UNLIMITED) as tunnel:
        coordinator = tunnel.host(COORDINATOR).address
        async with program(tunnel, COORDINATOR, LISTENER, str(PORT)) as listener:
            assert await listener.read() == "ready"
            async with program(tunnel, "a", CALLER, coordinator, str(PORT)) as caller:
                own_address = await caller.read()
                assert await listener.read() == f"{tunnel.host('a').address} joins"
        assert own_address == "10.78.0.2"
        counts = (await tunnel.statistics()).ports["a"].nat
        assert counts is not None
        assert counts.inward == 0
