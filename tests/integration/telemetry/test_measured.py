"""What a node measures over a real stream, and what the coordinator makes of it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.shell.telemetry.probe_echo import ProbeEcho
from coordinator.shell.telemetry.probe_tokens import ProbeTokens
from gpu_node.core.events import Connected, LinkLost
from gpu_node.shell.link.access import Access
from gpu_node.shell.link.control import ControlLink
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.probing.intervals import ProbeIntervals
from gpu_node.shell.probing.prober import Prober
from gpu_node.shell.probing.trains import PACKETS, ProbeTarget, send_train
from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.receipts import ReceiptKeeper
from hypergpu.client import NodeView
from hypergpu.ids import NodeId
from hypergpu.v1 import node_pb2
from hypergpu.wire.tcp_connections import connections_on
from tests.integration.node.fake_coordinator import (
    TIMEOUT_MS,
    WELCOME,
    FakeCoordinator,
    serve,
    state_paths_in,
)
from tests.node_client import WireNode
from tests.processes import CoordinatorProcess

HOST = "127.0.0.1"
NODE = NodeId("0x" + "a1" * 20)
CONGESTION_CONTROLS = (
    Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text("ascii").split()
)
CAPABILITIES = node_pb2.Capabilities(device="cpu", worker="null")
FAST = ProbeIntervals(
    round_trip_s=0.02,
    first_train_s=0.01,
    train_s=0.05,
    idle_train_s=0.05,
    blocked_train_s=0.05,
    report_s=0.05,
    idle_report_s=0.05,
    news_s=0.02,
)


def transfer(
    direction: node_pb2.Direction.ValueType, connections: int
) -> node_pb2.MeasuredTransfer:
    return node_pb2.MeasuredTransfer(
        direction=direction, size_bytes=1 << 20, took_us=9_000, connections=connections
    )


class LinkKit:
    """A node's link to a small service, measured often."""

    def __init__(self, service: FakeCoordinator, link: ControlLink, events: EventQueue) -> None:
        self.service = service
        self.link = link
        self.events = events

    async def connect(self, probe_port: int = 0, probe_token: bytes = b"") -> None:
        self.service.welcome = node_pb2.Welcome(
            version=WELCOME.version,
            heartbeat_interval_ms=10_000,
            probe_port=probe_port,
            probe_token=probe_token,
        )
        self.link.open(())
        async with asyncio.timeout(240):
            assert isinstance(await self.events.next(), Connected)

    async def next_report(self) -> node_pb2.Measured:
        async with asyncio.timeout(240):
            said = await self.service.next_said("measured")
        assert isinstance(said, node_pb2.Measured)
        return said


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[LinkKit]:
    with state_paths_in(tmp_path) as paths:
        async with serve() as there:
            identity, events = identity_key(paths), EventQueue()
            access = Access(paths, identity, timeout_ms=TIMEOUT_MS)
            await access.join(there.token, CAPABILITIES)
            receipts = ReceiptKeeper(paths, identity.node_id)
            link = ControlLink(access, receipts, events, prober=Prober(FAST))
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind((HOST, 0))
        port = closed.getsockname()[1]
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
    found = transfer(node_pb2.DIRECTION_UP, 1)
    kit.link.prober.measurements.add_transfer(found)
    kit.service.forget_said()
    await kit.connect()
    while not (report := await kit.next_report()).transfers:
        pass
    assert report.transfers[0].direction == node_pb2.DIRECTION_UP


async def test_the_kernel_counts_the_connections_that_grpc_hides(
    kit: LinkKit,
) -> None:
    await kit.connect()
    ends = list(connections_on(kit.service.node_port))
    assert len(ends) == 2, "both ends lie in this process"
    assert all(end.segments > 0 and end.retransmitted == 0 for end in ends)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    made = CoordinatorProcess(tmp_path_factory.mktemp("measured"))
    made.start()
    yield made
    made.end()


async def open_stream(
    node: WireNode, coordinator: CoordinatorProcess
) -> tuple[AsyncIterator[node_pb2.ControlResponse], node_pb2.Welcome]:
    """A control stream and its greeting."""
    await node.join(await asyncio.to_thread(coordinator.node_token))
    stream = node.control([])
    return stream, (await anext(stream)).welcome


async def sync(node: WireNode, stream: AsyncIterator[node_pb2.ControlResponse]) -> None:
    """Until the coordinator has taken in everything that was said before."""
    probe = node_pb2.RoundTripProbe(sequence=77)
    node.say(node_pb2.ControlRequest(round_trip_probe=probe))
    async for message in stream:
        if message.round_trip_echo.sequence == 77:
            return


async def test_everything_measured_of_a_node_is_listed(coordinator: CoordinatorProcess) -> None:
    node = WireNode(coordinator.address, coordinator.node_address)
    stream, _ = await open_stream(node, coordinator)
    measured = node_pb2.Measured(
        round_trips_us=[50_000, 60_000],
        trains=[node_pb2.ProbeTrain(sent=20, lost=1, bursts=1)],
        transfers=[
            node_pb2.MeasuredTransfer(
                direction=direction, size_bytes=4 << 20, took_us=4_000_000, connections=1
            )
            for direction in (node_pb2.DIRECTION_UP, node_pb2.DIRECTION_DOWN)
        ],
        congestion_control="cubic",
    )
    node.say(node_pb2.ControlRequest(measured=measured))
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
    assert summary.health is None, "no plan has named it"
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
