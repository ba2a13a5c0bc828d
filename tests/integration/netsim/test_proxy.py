"""The proxy between programs in the test's own loop, and its clock."""

import asyncio
import random
import socket
import struct
import time

import pytest

from netsim.emulation.requests import Condition, Reset, SetCondition, SetShape
from netsim.link import NatKind, NetsimError, Shape
from netsim.proxy.hops import LoopClock
from netsim.proxy.process import LOOPBACK, Forward, ProxiedNode, ProxyPlan, ProxyProtocol
from netsim.proxy.proxies import Proxies
from tests.integration.netsim.proxied import (
    FREE,
    TIMEOUT_S,
    Dialled,
    echo,
    link,
    plan,
    target,
)

MIB = 1 << 20


async def until(holds: asyncio.Event) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await holds.wait()


async def test_an_answer_takes_both_delays() -> None:
    async with (
        target() as port,
        Proxies(plan(port, a=link(25))) as proxies,
        Dialled(*proxies.address("a")) as connection,
    ):
        await connection.exchange(b"hands are shaken")
        started_s = time.monotonic()
        await connection.exchange(b"hello")
        assert time.monotonic() - started_s >= 0.0499


async def test_a_node_behind_a_nat_is_refused_at_the_start_and_later() -> None:
    shape = Shape(link=link(1), nat=NatKind.FULL_CONE)
    node = ProxiedNode(name="a", shape=shape, forwards=(Forward(target_port=1),))
    with pytest.raises(NetsimError, match=r"a stands behind a NAT .full-cone.*the proxy does not"):
        await Proxies(ProxyPlan(nodes=(node,))).__aenter__()
    async with target() as port, Proxies(plan(port, a=link(1))) as proxies:
        with pytest.raises(NetsimError, match="the proxy does not emulate"):
            await proxies.obey(SetShape("a", shape))


async def test_bytes_arrive_as_they_were_written_both_ways_at_once() -> None:
    dice = random.Random(3)
    proxy_plan = plan(0, a=link(2, 200, loss=0.001), b=link(5))
    async with target() as port, Proxies(_towards(proxy_plan, port)) as proxies:

        async def talk(name: str) -> None:
            async with Dialled(*proxies.address(name)) as connection:
                sent_bytes = dice.randbytes(3 * MIB + 17)

                async def write() -> None:
                    at = 0
                    while at < len(sent_bytes):
                        size_bytes = dice.choice([1, 100, 1448, 5000, 70_000, 400_000])
                        connection.writer.write(sent_bytes[at : at + size_bytes])
                        await connection.writer.drain()
                        at += size_bytes
                    connection.writer.write_eof()

                write_task = asyncio.create_task(write())
                async with asyncio.timeout(TIMEOUT_S):
                    got_bytes = await connection.reader.read(-1)
                await write_task
                assert got_bytes == sent_bytes

        await asyncio.gather(*(talk(name) for name in ("a", "b", "a")))
        counts = proxies.statistics().nodes
        assert counts["a"].up_bytes == counts["a"].down_bytes == 2 * (3 * MIB + 17)
        assert counts["a"].accepted == 2


async def test_half_of_a_connection_may_end_before_the_other() -> None:
    async def last_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard_bytes = await reader.read(-1)
        writer.write(b"heard " + heard_bytes)

    async with (
        target(last_words) as port,
        Proxies(plan(port, a=link())) as proxies,
        Dialled(*proxies.address("a")) as connection,
    ):
        connection.writer.write(b"all")
        connection.writer.write_eof()
        async with asyncio.timeout(TIMEOUT_S):
            assert await connection.reader.read(-1) == b"heard all"


@pytest.mark.parametrize("seed", range(3))
async def test_a_reset_reaches_the_other_end_behind_intact_bytes(seed: int) -> None:
    dice = random.Random(seed)
    sent_bytes = dice.randbytes(MIB)
    got_bytes = bytearray()
    is_reset = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!")
        try:
            while payload := await reader.read(1 << 16):
                got_bytes.extend(payload)
        except ConnectionResetError:
            is_reset.set()

    async with target(listen) as port, Proxies(plan(port, a=link(3, 50))) as proxies:
        plain_socket = socket.create_connection(proxies.address("a"))
        plain_socket.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT_S):
            assert await loop.sock_recv(plain_socket, 1) == b"!"
        await loop.sock_sendall(plain_socket, sent_bytes[: dice.randrange(MIB)])
        plain_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        plain_socket.close()
        await until(is_reset)
        assert sent_bytes.startswith(bytes(got_bytes))


async def test_a_target_that_refuses_breaks_the_connection_off() -> None:
    with socket.socket() as unused_socket:
        unused_socket.bind((LOOPBACK, 0))
        port = unused_socket.getsockname()[1]
        async with Proxies(plan(port, a=link())) as proxies:
            async with Dialled(*proxies.address("a")) as connection:
                with pytest.raises(ConnectionResetError):
                    async with asyncio.timeout(TIMEOUT_S):
                        await connection.reader.read(1)
            assert proxies.statistics().nodes["a"].connections == 0


async def test_a_slow_link_holds_up_no_other() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(1)
        while first == b"x" and await reader.read(1 << 16):
            pass
        writer.write(first)
        await echo(reader, writer)

    proxy_plan = plan(0, slow=link(5, 0.1), fast=link(5, 100))
    async with target(swallow) as port, Proxies(_towards(proxy_plan, port)) as proxies:
        slow = [socket.create_connection(proxies.address("slow")) for _ in range(4)]
        for each in slow:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        fill_tasks = [asyncio.create_task(loop.sock_sendall(each, b"x" * 8 * MIB)) for each in slow]
        async with Dialled(*proxies.address("fast")) as connection:
            assert await connection.exchange(b"y") == b"y"
            assert len(await connection.exchange(bytes(4 * MIB))) == 4 * MIB
        assert not any(each.done() for each in fill_tasks)
        for task in fill_tasks:
            task.cancel()
        await asyncio.gather(*fill_tasks, return_exceptions=True)
        for each in slow:
            each.close()


async def test_a_cut_says_nothing_and_what_it_lost_arrives_after_it_is_healed() -> None:
    async with (
        target() as port,
        Proxies(plan(port, a=link(), b=link())) as proxies,
        Dialled(*proxies.address("a")) as connection,
    ):
        await connection.exchange(b"before")
        await proxies.obey(SetCondition("a", Condition.CUT))
        connection.writer.write(b"while")
        assert await connection.is_silent_for(0.3)
        async with Dialled(*proxies.address("b")) as other:
            assert await other.exchange(b"unharmed") == b"unharmed"
        await proxies.obey(SetCondition("a", Condition.OPEN))
        assert await connection.receive(5) == b"while"


async def test_who_dials_while_the_link_is_cut_gets_through_after_it_is_healed() -> None:
    async with target() as port, Proxies(plan(port, a=link())) as proxies:
        await proxies.obey(SetCondition("a", Condition.CUT))
        async with Dialled(*proxies.address("a")) as connection:
            connection.writer.write(b"hello")
            assert await connection.is_silent_for(0.1)
            await proxies.obey(SetCondition("a", Condition.OPEN))
            assert await connection.receive(5) == b"hello"


async def test_a_stalled_link_goes_on_where_it_stood() -> None:
    async with (
        target() as port,
        Proxies(plan(port, a=link())) as proxies,
        Dialled(*proxies.address("a")) as connection,
    ):
        await connection.exchange(b"before")
        await proxies.obey(SetCondition("a", Condition.STALLED))
        connection.writer.write(b"while")
        assert await connection.is_silent_for(0.2)
        await proxies.obey(SetCondition("a", Condition.OPEN))
        assert await connection.receive(5) == b"while"


async def test_a_half_open_link_accepts_and_never_answers() -> None:
    async with (
        target() as port,
        Proxies(plan(port, a=link())) as proxies,
        Dialled(*proxies.address("a")) as before,
    ):
        await before.exchange(b"before")
        await proxies.obey(SetCondition("a", Condition.HALF_OPEN))
        async with Dialled(*proxies.address("a")) as late_connection:
            for each in (before, late_connection):
                each.writer.write(b"is anybody there?")
                assert await each.is_silent_for(0.1)
            await proxies.obey(SetCondition("a", Condition.OPEN))
            # The connections of then stay dead; a new one is well.
            assert await before.is_silent_for(0.1)
            assert await late_connection.is_silent_for(0.1)
            async with Dialled(*proxies.address("a")) as after:
                assert await after.exchange(b"yes") == b"yes"


async def test_a_connection_that_nobody_answered_is_gone_when_its_program_has_gone() -> None:
    async with target() as port, Proxies(plan(port, a=link())) as proxies:
        await proxies.obey(SetCondition("a", Condition.HALF_OPEN))
        async with Dialled(*proxies.address("a")) as connection:
            connection.writer.write(b"is anybody there?")
            assert await connection.is_silent_for(0.05)
            assert proxies.statistics().nodes["a"].connections == 1
        await _all_closed(proxies)


async def test_a_disconnected_node_is_reset_and_refused_and_comes_back_at_the_same_port() -> None:
    async with target() as port, Proxies(plan(port, a=link())) as proxies:
        address = proxies.address("a")
        async with Dialled(*address) as connection:
            await connection.exchange(b"before")
            await proxies.obey(SetCondition("a", Condition.DISCONNECTED))
            with pytest.raises(ConnectionResetError):
                await connection.receive(1)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*address)
            assert proxies.statistics().nodes["a"].condition is Condition.DISCONNECTED
            await proxies.obey(SetCondition("a", Condition.OPEN))
            assert proxies.address("a") == address
            async with Dialled(*address) as again:
                assert await again.exchange(b"back") == b"back"


async def test_a_node_whose_port_was_taken_comes_back_when_it_is_free_again() -> None:
    async with target() as port, Proxies(plan(port, a=link())) as proxies:
        address = proxies.address("a")
        await proxies.obey(SetCondition("a", Condition.DISCONNECTED))
        with socket.create_server(address):
            with pytest.raises(NetsimError, match="a's proxy cannot listen"):
                await proxies.obey(SetCondition("a", Condition.OPEN))
            assert proxies.statistics().nodes["a"].condition is Condition.DISCONNECTED
        await proxies.obey(SetCondition("a", Condition.OPEN))
        async with Dialled(*address) as connection:
            assert await connection.exchange(b"back") == b"back"


async def test_a_reset_breaks_off_what_is_there_and_welcomes_what_comes() -> None:
    async with target() as port, Proxies(plan(port, a=link())) as proxies:
        async with Dialled(*proxies.address("a")) as connection:
            await connection.exchange(b"before")
            await proxies.obey(Reset("a"))
            with pytest.raises(ConnectionResetError):
                await connection.receive(1)
        async with Dialled(*proxies.address("a")) as again:
            assert await again.exchange(b"after") == b"after"


async def test_a_link_changes_under_a_connection() -> None:
    async with (
        target() as port,
        Proxies(plan(port, a=link(1))) as proxies,
        Dialled(*proxies.address("a")) as connection,
    ):
        await connection.exchange(b"near")
        await proxies.obey(SetShape("a", Shape(link=link(80))))
        started_s = time.monotonic()
        await connection.exchange(b"far")
        assert time.monotonic() - started_s >= 0.159


async def test_nodes_at_addresses_of_their_own_share_port_numbers_and_are_told_apart() -> None:
    seen_hosts: list[str] = []

    async def name_peer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen_hosts.append(writer.get_extra_info("peername")[0])
        writer.write(b"!")

    async with target(name_peer) as port:
        nodes = tuple(
            ProxiedNode(
                name=host,
                shape=Shape(link=link()),
                forwards=(Forward(target_port=port, port=port),),
                listen=host,
            )
            for host in ("127.77.9.1", "127.77.9.2")
        )
        async with Proxies(ProxyPlan(nodes=nodes, coordinator=FREE)) as proxies:
            for node in nodes:
                assert proxies.address(node.name) == (node.name, port)
                async with Dialled(node.name, port) as connection:
                    await connection.receive(1)
    assert seen_hosts == ["127.77.9.1", "127.77.9.2"]


async def test_datagrams_are_really_lost_and_really_doubled() -> None:
    with _datagrams() as receiver, _datagrams() as sender:
        proxy_plan = plan(
            receiver.getsockname()[1],
            protocol=ProxyProtocol.UDP,
            a=link(1, loss=0.2, doubling=0.1),
        )
        async with Proxies(proxy_plan) as proxies:
            for number in range(2000):
                sender.sendto(number.to_bytes(4), proxies.address("a"))
                if number % 50 == 49:
                    await _wait_for_datagrams(proxies, number + 1)
            up = proxies.statistics().nodes["a"].datagrams_up
        assert up.offered == 2000
        assert up.lost == pytest.approx(400, abs=80)
        assert up.duplicated == pytest.approx(160, abs=50)
        assert up.delivered == up.offered - up.lost + up.duplicated
        assert len(_receive_all(receiver)) == up.delivered


async def test_a_datagram_is_answered_to_whoever_sent_it() -> None:
    loop = asyncio.get_running_loop()
    with _datagrams() as answerer, _datagrams() as one, _datagrams() as other:
        proxy_plan = plan(answerer.getsockname()[1], protocol=ProxyProtocol.UDP, a=link())
        async with Proxies(proxy_plan) as proxies:
            for sender, words in ((one, b"one"), (other, b"other")):
                sender.sendto(words, proxies.address("a"))
                async with asyncio.timeout(TIMEOUT_S):
                    heard_bytes, whom = await loop.sock_recvfrom(answerer, 100)
                answerer.sendto(heard_bytes.upper(), whom)
                async with asyncio.timeout(TIMEOUT_S):
                    assert await loop.sock_recv(sender, 100) == words.upper()


async def test_a_port_that_is_taken_is_refused_and_nothing_is_left_open() -> None:
    async with target() as port:
        taken_node = ProxiedNode(
            name="b", shape=Shape(link=link()), forwards=(Forward(target_port=1, port=port),)
        )
        free = ProxiedNode(name="a", shape=Shape(link=link()), forwards=(Forward(target_port=1),))
        proxies = Proxies(ProxyPlan(nodes=(free, taken_node)))
        with pytest.raises(NetsimError, match=f"b's proxy cannot listen on {LOOPBACK}:{port}"):
            async with proxies:
                pass
        with pytest.raises(NetsimError, match="not open"):
            proxies.ports("a")


def test_two_nodes_cannot_share_a_name() -> None:
    node = ProxiedNode(name="a", shape=Shape(link=link()), forwards=())
    with pytest.raises(NetsimError, match="two nodes are named 'a'"):
        Proxies(ProxyPlan(nodes=(node, node)))


def _towards(asked: ProxyPlan, port: int) -> ProxyPlan:
    nodes = {node.name: node.shape.link for node in asked.nodes}
    return plan(port, protocol=ProxyProtocol.TCP, **nodes)


def _datagrams() -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    bound.setblocking(False)
    bound.bind((LOOPBACK, 0))
    return bound


async def _wait_for_datagrams(proxies: Proxies, count: int) -> None:
    """Wait until so many datagrams were sent and each has met its fate."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            up = proxies.statistics().nodes["a"].datagrams_up
            if up.offered == count == up.lost + up.delivered - up.duplicated:
                return
            await asyncio.sleep(0)


async def _all_closed(proxies: Proxies) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if not proxies.statistics().nodes["a"].connections:
                return
            await asyncio.sleep(0)


def _receive_all(receiver: socket.socket) -> list[bytes]:
    datagrams = []
    try:
        while True:
            datagrams.append(receiver.recv(100))
    except BlockingIOError:
        return datagrams


async def test_a_callback_that_fails_stops_no_other() -> None:
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    loop.set_exception_handler(lambda _loop, context: errors.append(context.get("exception")))
    clock, is_done = LoopClock(loop), asyncio.Event()
    failure = ValueError("no such callback")

    def fail() -> None:
        raise failure

    clock.at(1000, fail)
    clock.at(2000, is_done.set)
    async with asyncio.timeout(TIMEOUT_S):
        await is_done.wait()
    clock.close()
    assert errors == [failure]
