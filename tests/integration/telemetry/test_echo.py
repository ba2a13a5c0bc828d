"""Datagrams on real sockets: who is answered, and who is not."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.shell.telemetry.probe_echo import RATE, ProbeEcho
from coordinator.shell.telemetry.probe_tokens import LIFE_MS, ProbeTokens
from gpu_node.shell.probing.trains import PACKETS, ProbeTarget, send_train
from hypergpu.ids import NodeId
from hypergpu.process.clock import monotonic_ms
from hypergpu.units import Milliseconds
from hypergpu.v1.node_pb2 import ProbeTrain
from hypergpu.wire.probing import DATAGRAM_BYTES, TOKEN_BYTES, Numbers, datagram, numbers_of

NODE = NodeId("0x" + "a1" * 20)
HOST = "127.0.0.1"
TOKEN = bytes(range(TOKEN_BYTES))
WAIT_S = 240.0
"""Far more than a whole train needs: only what is lost is waited for."""


class Stand:
    """An echo with one connected node."""

    def __init__(self) -> None:
        self.tokens = ProbeTokens()
        self.connected = {NODE}
        self.echo = ProbeEcho(self.tokens, self.connected.__contains__)

    def target(self, port: int = 0) -> ProbeTarget:
        return ProbeTarget(HOST, port or self.echo.port, self.echo.token(NODE))

    async def wait_for_datagrams(self, total: int) -> None:
        """Until the echo has seen so many datagrams."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S):
            while sum(self.echo.count) < total:
                turned = loop.create_future()
                loop.call_soon(turned.set_result, None)
                await turned


@asynccontextmanager
async def stand() -> AsyncIterator[Stand]:
    made = Stand()
    await made.echo.open(HOST, 0)
    try:
        yield made
    finally:
        made.echo.close()


def send_to(port: int, *payloads: bytes) -> socket.socket:
    """A fresh socket, from which these went out."""
    caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    caller.setblocking(False)
    caller.connect((HOST, port))
    for payload in payloads:
        caller.send(payload)
    return caller


def is_answered(caller: socket.socket) -> bool:
    with caller:
        try:
            return bool(caller.recv(1 << 16))
        except BlockingIOError:
            return False


async def test_every_packet_of_a_train_comes_back() -> None:
    async with stand() as there:
        train = await send_train(there.target(), 1, wait_s=WAIT_S)
    assert train == ProbeTrain(sent=PACKETS, lost=0, bursts=0)
    assert there.echo.count == (PACKETS, 0, 0)


async def test_datagrams_of_strangers_and_of_another_size_are_answered_by_nothing() -> None:
    noise = [bytes([number]) * DATAGRAM_BYTES for number in range(100)]
    async with stand() as there:
        packet = datagram(there.echo.token(NODE), Numbers(1, 0))
        long_ago = Milliseconds(monotonic_ms() - LIFE_MS)
        expired = datagram(there.tokens.token(NODE, long_ago), Numbers(1, 0))
        caller = send_to(there.echo.port, *noise, packet[:-1], packet + b"\0", expired)
        await there.wait_for_datagrams(103)
        there.connected.clear()
        caller.send(packet)
        await there.wait_for_datagrams(104)
        assert not is_answered(caller)
        assert there.echo.count == (0, 104, 0)


async def test_one_token_gets_no_more_than_its_rate() -> None:
    async with stand() as there:
        packet = datagram(there.echo.token(NODE), Numbers(1, 0))
        began_ms = monotonic_ms()
        with send_to(there.echo.port, *[packet] * 100):
            await there.wait_for_datagrams(100)
        passed_ms = monotonic_ms() - began_ms
    echoed, unauthorised, throttled = there.echo.count
    assert unauthorised == 0
    assert throttled > 0
    assert RATE.burst <= echoed <= RATE.burst + passed_ms // RATE.interval_ms + 1


async def test_a_port_that_is_taken_is_done_without() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HOST, 0))
        there = Stand()
        await there.echo.open(HOST, taken.getsockname()[1])
    assert there.echo.port == 0
    assert there.echo.token(NODE) == b""


async def test_a_train_to_a_port_where_nobody_is_has_lost_everything() -> None:
    async with stand() as there:
        target = there.target()
    train = await send_train(target, 1, wait_s=0.2)
    assert train == ProbeTrain(sent=PACKETS, lost=PACKETS, bursts=1)


class FarEnd(asyncio.DatagramProtocol):
    """Sends nothing back before the last packet of a train is there, and has its port closed for a
    while after the third.
    """

    def __init__(self) -> None:
        self.heard: dict[int, bytes] = {}
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=(HOST, self.port)
        )
        self.port = int(self._transport.get_extra_info("sockname")[1])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def datagram_received(self, payload: bytes, addr: tuple[str, int]) -> None:
        numbers = numbers_of(payload, TOKEN)
        if numbers is None:
            return
        self.heard[numbers.packet] = payload
        if len(self.heard) == 3:
            self.close()
            loop = asyncio.get_running_loop()
            loop.call_later(0.03, lambda: loop.create_task(self.open()))
        elif numbers.packet == PACKETS - 1 and self._transport is not None:
            for each in self.heard.values():
                self._transport.sendto(each, addr)


async def test_packets_that_are_turned_back_leave_the_others_of_their_train_to_be_waited_for() -> (
    None
):
    far = FarEnd()
    await far.open()
    train = await send_train(ProbeTarget(HOST, far.port, TOKEN), 1, wait_s=1.5)
    far.close()
    assert 3 < len(far.heard) < PACKETS
    assert train.lost == PACKETS - len(far.heard)
