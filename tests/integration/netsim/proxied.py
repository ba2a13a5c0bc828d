"""Programs at both ends of a proxy, in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from hypergpu.units import Microseconds
from netsim.link import UNLIMITED, Link, LinkDirection, Shape
from netsim.proxy.process import LOOPBACK, Forward, ProxiedNode, ProxyPlan, ProxyProtocol

FREE = UNLIMITED
TIMEOUT_S = 240
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def link(delay_ms: float = 1, mbit_s: float = 0, *, loss: float = 0, doubling: float = 0) -> Link:
    way = LinkDirection(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=round(mbit_s * 1e6),
        loss=loss,
        duplication=doubling,
    )
    return Link(up=way, down=way)


def plan(port: int, *, protocol: ProxyProtocol = ProxyProtocol.TCP, **links: Link) -> ProxyPlan:
    """Nodes by name, all towards one port."""
    forwards = (Forward(target_port=port, protocol=protocol),)
    nodes = tuple(
        ProxiedNode(name=name, shape=Shape(link=asked_link), forwards=forwards)
        for name, asked_link in links.items()
    )
    return ProxyPlan(nodes=nodes, coordinator=FREE)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while payload := await reader.read(1 << 16):
            writer.write(payload)
            await writer.drain()
        writer.write_eof()
    writer.close()


@asynccontextmanager
async def target(talk: Talk = echo) -> AsyncIterator[int]:
    """A program on a free port, which talks to each connection."""

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(quietly, LOOPBACK, 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


class Dialled:
    """A connection, closed with its context."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    async def __aenter__(self) -> "Dialled":
        self.reader, self.writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    async def exchange(self, payload: bytes) -> bytes:
        """Send, and hear as much."""
        self.writer.write(payload)
        return await self.receive(len(payload))

    async def receive(self, size_bytes: int) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.reader.readexactly(size_bytes)

    async def is_silent_for(self, seconds: float) -> bool:
        """Whether nothing comes for a while, not even an end."""
        try:
            async with asyncio.timeout(seconds):
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False
