"""What an assignment of a real coordinator brings beside it, directly and through a gateway."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from socket import create_connection, create_server, socket

import numpy as np
import pytest
from msgspec.structs import replace

from hypergpu.digests import digest_from_wire, digest_of
from hypergpu.jobfile.spec import CodecChoice, JobSpec, RoundRule, TrainingSettings, Trust
from hypergpu.v1 import measurement_pb2, node_pb2
from hypergpu.wire.credentials import parse_token, split_address, token_text
from hypergpu.wire.packing import MessageUnpacker
from tests.gateway_process import GatewayProcess, operator_token
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster

SMALL, LARGEST = 2_048, 65_536
"""Parameters of a model of 8 KiB and of one of 256 KiB."""
FAST, SLOW = 20_000, 20_000_000
"""Microseconds that a MiB takes down a line."""


def spec(parameters: int) -> JobSpec:
    """Whole models as float32: the first one is drawn, each later one has to be moved."""
    return JobSpec(
        workload="null",
        strategy="diloco",
        options={"parameters": parameters},
        training=TrainingSettings(rounds=3, inner_steps=1, nodes=1),
        codec=CodecChoice("fp32", "fp32"),
        round=RoundRule(quorum=1.0),
        trust=Trust(duplicates="none"),
    )


class InlineKit:
    """A coordinator, and a node that works for it one message at a time."""

    def __init__(self, cluster: Cluster, node: WireNode) -> None:
        self.cluster = cluster
        self.node = node
        self._unpacker = MessageUnpacker()
        self._stream: AsyncIterator[node_pb2.ControlResponse] | None = None

    def dial(self) -> None:
        """Open a stream, which ends the one before."""
        self._unpacker = MessageUnpacker()
        self._stream = self.node.control([("null", 1)])

    async def next_work(self) -> node_pb2.ControlResponse:
        """The next assignment, and what comes beside it."""
        assert self._stream is not None
        async for came in self._stream:
            message = self._unpacker.unpack(came)
            if message.HasField("assignment"):
                return node_pb2.ControlResponse(assignment=message.assignment, blob=came.blob)
        raise AssertionError("the stream ended without an assignment")

    async def say_line(self, mib_us: int) -> None:
        """Tell how fast the line is, and wait until that was heard."""
        report = measurement_pb2.Measured(
            round_trips_us=[1_000] * 4,
            transfers=[
                measurement_pb2.MeasuredTransfer(
                    direction=measurement_pb2.DIRECTION_DOWN,
                    size_bytes=1 << 20,
                    took_us=mib_us,
                    connections=1,
                )
            ],
        )
        self.node.say(node_pb2.ControlRequest(measured=report))
        self.node.say(node_pb2.ControlRequest(heartbeat=node_pb2.Heartbeat(sequence=1)))
        assert self._stream is not None
        async for came in self._stream:
            if self._unpacker.unpack(came).HasField("heartbeat_echo"):
                return

    async def finish(self, work: node_pb2.Assignment, parameters: int) -> None:
        """Send an update for the work."""
        update = np.full(parameters, 0.25, np.float32).tobytes()
        await self.node.submit(self.node.offer(work, update), update)

    async def second_round(
        self, parameters: int, mib_us: int | None = None
    ) -> node_pb2.ControlResponse:
        """A job's second assignment, the first of whose model the node lacks."""
        self.dial()
        if mib_us is not None:
            await self.say_line(mib_us)
        await asyncio.to_thread(self.cluster.submit, spec(parameters))
        first = await self.next_work()
        assert not first.blob
        await self.finish(first.assignment, parameters)
        return await self.next_work()


def is_whole(came: node_pb2.ControlResponse) -> bool:
    """Whether the model came beside the assignment, and no ticket for it."""
    digest = digest_from_wire(came.assignment.model.blob.digest.value)
    return digest_of(came.blob) == digest and not came.assignment.HasField("model_ticket")


def is_to_be_fetched(came: node_pb2.ControlResponse) -> bool:
    """Whether only a ticket came."""
    return came.assignment.HasField("model_ticket") and not came.blob


@asynccontextmanager
async def inline_kit(
    cluster: Cluster, gateway: GatewayProcess | None = None
) -> "AsyncIterator[InlineKit]":
    there = cluster.coordinator
    addresses = (there.address, there.node_address)
    if gateway is not None:
        addresses = (gateway.line.address, gateway.node_address)
    node = WireNode(*addresses)
    node.takes_blobs = node.unpacks = True
    await node.join(await asyncio.to_thread(there.node_token))
    yield InlineKit(cluster, node)
    await node.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("inline"), *NOBODY_LOST) as cluster:
        yield cluster


@pytest.mark.parametrize("unpacks", [True, False])
async def test_a_small_model_comes_beside_its_assignment_and_again_after_a_reconnect(
    cluster: Cluster, *, unpacks: bool
) -> None:
    async with inline_kit(cluster) as kit:
        kit.node.unpacks = unpacks
        work = await kit.second_round(SMALL)
        assert is_whole(work)
        kit.dial()
        second_work = await kit.next_work()
        assert is_whole(second_work)
        assert second_work.assignment.lease == work.assignment.lease
        await kit.finish(second_work.assignment, SMALL)
        last = await kit.next_work()
        assert is_whole(last)
        await kit.finish(last.assignment, SMALL)


async def test_an_older_node_gets_a_ticket(cluster: Cluster) -> None:
    async with inline_kit(cluster) as kit:
        kit.node.takes_blobs = False
        work = await kit.second_round(SMALL)
        assert is_to_be_fetched(work)
        assert await kit.node.fetch(work.assignment.model.blob.digest)


@pytest.mark.parametrize(
    ("mib_us", "is_inline"), [(FAST, True), (SLOW, False), (None, False)], ids=str
)
async def test_a_model_of_256_kib_comes_beside_its_assignment_over_a_fast_line_alone(
    cluster: Cluster, mib_us: int | None, *, is_inline: bool
) -> None:
    async with inline_kit(cluster) as kit:
        work = await kit.second_round(LARGEST, mib_us)
        assert is_whole(work) if is_inline else is_to_be_fetched(work)


class RequestCounter:
    """Passes connections to ports of 127.0.0.2 on to 127.0.0.1, and counts what is fetched by plain
    HTTP.
    """

    HOST = "127.0.0.2"

    def __init__(self) -> None:
        self.gets = 0
        self._lock = threading.Lock()
        self._listeners: list[socket] = []

    def listen(self, port: int) -> None:
        """Take connections to a port until the end."""
        listener = create_server((self.HOST, port))
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket, port: int) -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                target = create_connection(("127.0.0.1", port))
                for ends in ((caller, target), (target, caller)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket, sink: socket) -> None:
        with suppress(OSError), closing(source), closing(sink):
            while piece := source.recv(1 << 16):
                with self._lock:
                    self.gets += piece.count(b"GET /")
                sink.sendall(piece)


def test_no_request_lies_between_an_assignment_and_the_first_inner_step(tmp_path: Path) -> None:
    deltas = spec(SMALL)
    deltas = replace(
        deltas,
        training=replace(deltas.training, rounds=12, nodes=2),
        codec=CodecChoice("int8", "int8"),
    )
    counter = RequestCounter()
    with closing(counter), Cluster(tmp_path) as cluster:
        token = parse_token(cluster.coordinator.node_token())
        port = split_address(cluster.coordinator.address)[1]
        for each in (port, split_address(cluster.coordinator.node_address)[1]):
            counter.listen(each)
        counter.listen(cluster.coordinator.bulk_port)
        through = replace(token, addresses=(f"{counter.HOST}:{port}",))
        cluster.add_nodes(2, token=token_text(through))
        job = cluster.wait_until_finished(cluster.submit(deltas))
    assert (job.phase, job.updates_accepted) == ("finished", 24)
    # Each node asks for the layout, once.
    assert counter.gets == 2


@pytest.mark.parametrize("unpacks", [True, False])
async def test_a_gateway_passes_on_what_comes_beside_an_assignment(
    cluster: Cluster, tmp_path: Path, *, unpacks: bool
) -> None:
    with ExitStack() as owner:
        token = operator_token(cluster.coordinator)
        gateway = await asyncio.to_thread(GatewayProcess, token, tmp_path / "gateway.log")
        owner.callback(gateway.end)
        async with inline_kit(cluster, gateway) as kit:
            kit.node.unpacks = unpacks
            assert is_whole(await kit.second_round(LARGEST, FAST))
