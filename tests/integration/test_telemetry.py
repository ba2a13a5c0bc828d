"""Datagrams and streams on real sockets: who is answered, and what both ends make of the times."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from coordinator.shell.probe_echo import RATE, ProbeEcho
from coordinator.shell.probe_tokens import LIFE_MS, ProbeTokens
from gpu_node.core.events import Connected, LinkLost
from gpu_node.shell.folder.receipts import ReceiptKeeper
from gpu_node.shell.folder.state import identity_key
from gpu_node.shell.link.access import Access
from gpu_node.shell.link.control import CoordinatorStream
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.link.probing import PACKETS, ProbeIntervals, Prober, ProbeTarget, send_train
from hypergpu.clock import monotonic_ms
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.user.client import NodeView
from hypergpu.v1 import measurement_pb2, node_pb2
from hypergpu.v1.measurement_pb2 import ProbeTrain
from hypergpu.wire.datagrams import DATAGRAM_BYTES, TOKEN_BYTES, Numbers, datagram, numbers_of
from hypergpu.wire.tcp_counters import connections_on
from tests.integration.node.fake_coordinator import (
    TIMEOUT_MS,
    WELCOME,
    FakeCoordinator,
    serve,
    state_paths_in,
)
from tests.node_client import WireNode
from tests.processes import CoordinatorProcess

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
                turn = loop.create_future()
                loop.call_soon(turn.set_result, None)
                await turn


@asynccontextmanager
async def stand() -> AsyncIterator[Stand]:
    new_stand = Stand()
    await new_stand.echo.open(HOST, 0)
    try:
        yield new_stand
    finally:
        new_stand.echo.close()


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
        expired_datagram = datagram(there.tokens.token(NODE, long_ago), Numbers(1, 0))
        caller = send_to(there.echo.port, *noise, packet[:-1], packet + b"\0", expired_datagram)
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
    echo_count, unauthorised_count, throttled_count = there.echo.count
    assert unauthorised_count == 0
    assert throttled_count > 0
    assert RATE.burst <= echo_count <= RATE.burst + passed_ms // RATE.interval_ms + 1


async def test_a_port_that_is_taken_is_done_without() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken_socket:
        taken_socket.bind((HOST, 0))
        there = Stand()
        await there.echo.open(HOST, taken_socket.getsockname()[1])
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


CONGESTION_CONTROLS = (
    Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text("ascii").split()
)
CAPABILITIES = node_pb2.Capabilities(device="cpu", worker="null")
FAST = ProbeIntervals(
    round_trip_s=0.02,
    first_train_s=0.01,
    train_s=0.05,
    idle_train_s=0.05,
    idle_train_beats=0,
    idle_report_beats=0,
    blocked_train_s=0.05,
    report_s=0.05,
    idle_report_s=0.05,
    news_s=0.02,
)


def transfer(
    direction: measurement_pb2.Direction.ValueType, connections: int
) -> measurement_pb2.MeasuredTransfer:
    return measurement_pb2.MeasuredTransfer(
        direction=direction, size_bytes=1 << 20, took_us=9_000, connections=connections
    )


class LinkKit:
    """A node's link to a small service, measured often."""

    def __init__(
        self, service: FakeCoordinator, link: CoordinatorStream, events: EventQueue
    ) -> None:
        self.service = service
        self.link = link
        self.events = events

    async def connect(
        self, probe_port: int = 0, probe_token: bytes = b"", heartbeat_ms: int = 10_000
    ) -> None:
        self.service.welcome = node_pb2.Welcome(
            version=WELCOME.version,
            heartbeat_interval_ms=heartbeat_ms,
            probe_port=probe_port,
            probe_token=probe_token,
        )
        self.link.open(())
        async with asyncio.timeout(240):
            assert isinstance(await self.events.next(), Connected)

    async def next_report(self) -> measurement_pb2.Measured:
        async with asyncio.timeout(240):
            report = await self.service.next_said("measured")
        assert isinstance(report, measurement_pb2.Measured)
        return report


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[LinkKit]:
    with state_paths_in(tmp_path) as paths:
        async with serve() as there:
            identity, events = identity_key(paths), EventQueue()
            access = Access(paths, identity, timeout_ms=TIMEOUT_MS)
            await access.join(there.token, CAPABILITIES)
            receipts = ReceiptKeeper(paths, identity.node_id)
            link = CoordinatorStream(access, receipts, events, prober=Prober(FAST))
            link.capabilities = CAPABILITIES
            yield LinkKit(there.service, link, events)
            await link.close()


async def test_a_node_reports_round_trips_and_its_congestion_control(
    kit: LinkKit,
) -> None:
    await kit.connect()
    first = await kit.next_report()
    trips = list(first.round_trips_us)
    while len(trips) < 5:
        trips += (await kit.next_report()).round_trips_us
    assert all(trip > 0 for trip in trips)
    assert first.congestion_control in CONGESTION_CONTROLS


async def test_a_node_reports_trains_that_came_back(kit: LinkKit) -> None:
    echo = ProbeEcho(ProbeTokens(), lambda _: True)
    await echo.open(HOST, 0)
    await kit.connect(echo.port, echo.token(NODE))
    report = await kit.next_report()
    # All of one is lost where this process was kept from the processor for a second.
    while all(train.lost == PACKETS for train in report.trains):
        report = await kit.next_report()
    echo.close()
    assert (report.trains[0].sent, report.is_probing_blocked) == (PACKETS, False)


async def test_datagrams_that_get_nowhere_are_blocked_and_count_for_nothing(
    kit: LinkKit,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed_socket:
        closed_socket.bind((HOST, 0))
        port = closed_socket.getsockname()[1]
    await kit.connect(port, b"t" * 45)
    reports = [await kit.next_report()]
    while not reports[-1].is_probing_blocked:
        reports.append(await kit.next_report())
    assert not any(train.lost == PACKETS for report in reports for train in report.trains)
    kernel = await kit.next_report()
    while not kernel.trains:
        kernel = await kit.next_report()
    assert kernel.trains[0].lost == 0, "the kernel sent nothing twice over loopback"


async def test_what_was_measured_before_a_break_is_told_after_it(
    kit: LinkKit,
) -> None:
    await kit.connect()
    await kit.next_report()
    kit.service.to_say.put_nowait(None)
    async with asyncio.timeout(240):
        assert isinstance(await kit.events.next(), LinkLost)
    earlier_transfer = transfer(measurement_pb2.DIRECTION_UP, 1)
    kit.link.prober.measurements.add_transfer(earlier_transfer)
    kit.service.forget_said()
    await kit.connect()
    while not (report := await kit.next_report()).transfers:
        pass
    assert report.transfers[0].direction == measurement_pb2.DIRECTION_UP


@pytest.mark.parametrize(("heartbeat_ms", "is_new"), [(10_000, False), (5_000, True)])
async def test_a_node_of_thousands_is_not_new_when_it_comes_back(
    kit: LinkKit, heartbeat_ms: int, *, is_new: bool
) -> None:
    """Early probes, trains and reports of all of them would come at once."""
    intervals = msgspec.structs.replace(FAST, idle_train_s=3_600.0)
    kit.link.prober = prober = Prober(intervals)
    echo = ProbeEcho(ProbeTokens(), lambda _: True)
    await echo.open(HOST, 0)
    await kit.connect(echo.port, echo.token(NODE), heartbeat_ms)
    assert prober._first_train_s() == FAST.first_train_s
    while not (await kit.next_report()).trains:
        pass
    kit.service.to_say.put_nowait(None)
    async with asyncio.timeout(240):
        assert isinstance(await kit.events.next(), LinkLost)
    await kit.connect(echo.port, echo.token(NODE), heartbeat_ms)
    waits_s = prober._first_train_s(), prober._first_report_s(), prober._round_trip_s()
    early_s = FAST.first_train_s, FAST.news_s, FAST.round_trip_s
    assert waits_s == (early_s if is_new else (3_600.0, FAST.idle_report_s, math.inf))
    echo.close()


async def test_the_kernel_counts_the_connections_that_grpc_hides(
    kit: LinkKit,
) -> None:
    await kit.connect()
    ends = list(connections_on(kit.service.node_port))
    assert len(ends) == 2, "both ends lie in this process"
    # A busy machine's kernel may send a segment again though nothing was lost.
    assert all(0 <= end.retransmitted < end.segments for end in ends)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    coordinator_process = CoordinatorProcess(tmp_path_factory.mktemp("measured"))
    coordinator_process.start()
    yield coordinator_process
    coordinator_process.end()


async def open_stream(
    node: WireNode, coordinator: CoordinatorProcess
) -> tuple[AsyncIterator[node_pb2.ControlResponse], node_pb2.Welcome]:
    """A control stream and its greeting."""
    await node.join(await asyncio.to_thread(coordinator.node_token))
    stream = node.control([])
    return stream, (await anext(stream)).welcome


async def sync(node: WireNode, stream: AsyncIterator[node_pb2.ControlResponse]) -> None:
    """Until the coordinator has taken in everything that was said before."""
    probe = measurement_pb2.RoundTripProbe(sequence=77)
    node.say(node_pb2.ControlRequest(round_trip_probe=probe))
    async for message in stream:
        if message.round_trip_echo.sequence == 77:
            return


async def test_everything_measured_of_a_node_is_listed(coordinator: CoordinatorProcess) -> None:
    node = WireNode(coordinator.address, coordinator.node_address)
    stream, _ = await open_stream(node, coordinator)
    report = measurement_pb2.Measured(
        round_trips_us=[50_000, 60_000],
        trains=[measurement_pb2.ProbeTrain(sent=20, lost=1, bursts=1)],
        transfers=[
            measurement_pb2.MeasuredTransfer(
                direction=direction, size_bytes=4 << 20, took_us=4_000_000, connections=1
            )
            for direction in (measurement_pb2.DIRECTION_UP, measurement_pb2.DIRECTION_DOWN)
        ],
        congestion_control="cubic",
    )
    node.say(node_pb2.ControlRequest(measured=report))
    await sync(node, stream)
    summary = await asyncio.to_thread(listed_node, coordinator, node.node_id)
    reading = summary.reading
    assert reading.round_trip_us
    assert reading.round_trip_us.samples == 2
    assert reading.least_round_trip_us == 50_000
    assert reading.up_bits_per_s
    assert reading.up_bits_per_s.mean == pytest.approx(8.4e6, rel=0.2)
    assert reading.down_bits_per_s
    assert reading.down_bits_per_s.samples == 1
    assert reading.loss
    assert 0 < reading.loss.mean < 0.2
    assert reading.congestion_control == "cubic"
    assert summary.plan_reason == "", "no plan has named it"
    assert summary.health.level == "normal", "it idles, and has a health all the same"
    await node.close()


async def test_the_coordinator_echoes_on_the_port_that_its_nodes_dial(
    coordinator: CoordinatorProcess,
) -> None:
    node = WireNode(coordinator.address, coordinator.node_address)
    _, welcome = await open_stream(node, coordinator)
    assert welcome.probe_port == int(coordinator.node_address.rpartition(":")[2])
    target = ProbeTarget(HOST, welcome.probe_port, welcome.probe_token)
    assert (await send_train(target, 1, wait_s=60)).lost < PACKETS
    await node.close()


def listed_node(coordinator: CoordinatorProcess, node_id: str) -> NodeView:
    with coordinator.client() as client:
        return next(node for node in client.nodes() if node.id == node_id)
