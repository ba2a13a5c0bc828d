"""A node's calls through a real gateway: what it answers, passes on and refuses."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from yarl import URL

from gpu_node.shell.link.probing import PACKETS, ProbeTarget, send_train
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import Aware, CodecChoice, JobSpec, Pay, TrainingSettings, Trust
from hypergpu.v1 import measurement_pb2, node_pb2
from hypergpu.wire.credentials import Role
from hypergpu.wire.errors import error_in
from hypergpu.wire.packing import MessageUnpacker
from hypergpu.wire.update_requests import UpdateAnswer
from tests.gateway_process import FREE_PORTS, GatewayProcess, operator_token
from tests.node_client import NOBODY_LOST, WireNode, next_assignment, reason_of
from tests.processes import Cluster, CoordinatorProcess

LOST_AFTER_S = 1.0
PARAMETERS = 1 << 20
UPDATE = np.full(PARAMETERS, 0.25, np.float32).tobytes()
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=1, inner_steps=1, nodes=1),
    codec=CodecChoice("fp32", "fp32"),
)
LATE = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS // 256},
    strategy="aware",
    codec=CodecChoice("fp32", "fp32"),
    aware=Aware(stated_keys=("codec.up",)),
    training=TrainingSettings(rounds=9, inner_steps=1, nodes=3),
    pay=Pay(rounds_per_epoch=1),
    trust=Trust(duplicates="none"),
)
"""Three nodes, of which two are a quorum, and an epoch a round."""
SMALL_UPDATE = UPDATE[: len(UPDATE) // 256]


class Front:
    """A coordinator with a gateway before it."""

    def __init__(self, cluster: Cluster, owner: ExitStack) -> None:
        self.cluster = cluster
        self._owner = owner
        self.gateway = self.add_gateway(operator_token(cluster.coordinator))

    def add_gateway(self, token: str, *flags: str) -> GatewayProcess:
        """Start one more."""
        gateway = GatewayProcess(token, self.cluster.folder / "gateway.log", *flags)
        self._owner.callback(gateway.end)
        return gateway

    async def join_node(self, gateway: GatewayProcess | None = None) -> WireNode:
        """A node that has joined through a gateway."""
        gateway = gateway or self.gateway
        node = WireNode(gateway.line.address, gateway.node_address)
        answer = await node.join(await asyncio.to_thread(self.cluster.coordinator.node_token))
        assert (answer.node_port, answer.bulk_port) == (
            gateway.line.node_port,
            gateway.line.bulk_port,
        )
        return node


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with ExitStack() as owner:
        cluster = Cluster(tmp_path_factory.mktemp("front"), *NOBODY_LOST)
        yield Front(owner.enter_context(cluster), owner)


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Front]:
    """A gateway that lets go of silent nodes soon."""
    flags = ("--lost-after-ms", str(round(LOST_AFTER_S * 1000)))
    with ExitStack() as owner:
        yield Front(owner.enter_context(Cluster(tmp_path, *flags)), owner)


def heartbeat(sequence: int) -> node_pb2.ControlRequest:
    return node_pb2.ControlRequest(heartbeat=node_pb2.Heartbeat(sequence=sequence))


async def echo(stream: AsyncIterator[node_pb2.ControlResponse]) -> node_pb2.ControlResponse:
    """The next echo of a heartbeat or a probe."""
    async for message in stream:
        if message.WhichOneof("message") in {"heartbeat_echo", "round_trip_echo"}:
            return message
    raise AssertionError("the stream ended without an echo")


async def dial_until_served(node: WireNode) -> node_pb2.ControlResponse:
    """The first message of a stream, dialled anew as a node does: a gateway may still look for the
    coordinator that serves when the stream before has ended.
    """
    while True:
        try:
            return await anext(node.control([("null", 1)]))
        except grpc.aio.AioRpcError as error:
            if reason_of(error) != "NOT_READY":
                raise


async def test_signs_of_life_are_answered_while_the_coordinator_stands_still(front: Front) -> None:
    node = await front.join_node()
    stream = node.control([("null", 1)])
    assert (await anext(stream)).HasField("welcome")
    with front.cluster.coordinator.freeze():
        node.say(heartbeat(5))
        assert (await echo(stream)).heartbeat_echo.sequence == 5
        probe = measurement_pb2.RoundTripProbe(sequence=6)
        node.say(node_pb2.ControlRequest(round_trip_probe=probe))
        assert (await echo(stream)).round_trip_echo.sequence == 6
    await node.close()


async def test_probes_of_losses_are_echoed_by_the_gateway(front: Front) -> None:
    node = await front.join_node()
    stream = node.control([("null", 1)])
    welcome = (await anext(stream)).welcome
    target = ProbeTarget("127.0.0.1", welcome.probe_port, welcome.probe_token)
    with front.cluster.coordinator.freeze():
        assert (await send_train(target, 1, wait_s=60)).lost < PACKETS
    await node.close()


async def test_a_silent_node_is_let_go_of_and_one_that_says_it_lives_stays(
    impatient: Front,
) -> None:
    living_node, silent = await impatient.join_node(), await impatient.join_node()
    streams = [node.control([("null", 1)]) for node in (living_node, silent)]
    for stream in streams:
        await anext(stream)
    end_future = asyncio.ensure_future(echo(streams[1]))
    for sequence in range(1_000):
        living_node.say(heartbeat(sequence))
        await echo(streams[0])
        if (await asyncio.wait((end_future,), timeout=LOST_AFTER_S / 5))[0]:
            break
    error = end_future.exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert reason_of(error) == "STREAM_SILENT"
    with impatient.cluster.coordinator.client() as client:
        nodes = {node.id: node for node in await asyncio.to_thread(client.nodes)}
    assert nodes[living_node.node_id].state == "idle"
    assert nodes[silent.node_id].state != "idle"
    await living_node.close()
    await silent.close()


async def test_an_update_goes_through_the_gateways_own_bulk_port(front: Front) -> None:
    node = await front.join_node()
    job_id = await asyncio.to_thread(front.cluster.submit, SPEC)
    assignment = await next_assignment(node.control([("null", 1)]))
    assert node.bulk_port == front.gateway.line.bulk_port
    await node.submit(node.offer(assignment, UPDATE), UPDATE)
    job = await asyncio.to_thread(front.cluster.wait_until_finished, job_id)
    assert (job.phase, job.updates_accepted) == ("finished", 1)
    await node.close()


async def test_late_work_is_signed_through_a_gateway_for_the_epoch_that_is_open(
    front: Front,
) -> None:
    nodes = [await front.join_node() for _ in range(3)]
    streams = [node.control([("null", 1)]) for node in nodes]
    job_id = await asyncio.to_thread(front.cluster.submit, LATE)
    works = [await next_assignment(stream) for stream in streams]
    assert {work.terms.epoch for work in works} == {0}
    for node, work in zip(nodes[:2], works[:2], strict=True):
        await node.submit(node.offer(work, SMALL_UPDATE), SMALL_UPDATE)
    # The round closes without the third node, whose lease goes on.
    assert (await next_assignment(streams[0])).terms.epoch == 1
    late, work = nodes[2], works[2]
    answer = await late.bring(late.offer(work, SMALL_UPDATE, epoch=0), 0, SMALL_UPDATE)
    assert answer == UpdateAnswer(open_epoch=1)
    await late.submit(late.offer(work, SMALL_UPDATE, epoch=1), SMALL_UPDATE)
    again = await late.ask(late.offer(work, SMALL_UPDATE, epoch=1))
    assert again == UpdateAnswer(is_accepted=True)
    with front.cluster.coordinator.client() as client:
        await asyncio.to_thread(client.stop, job_id)
    for node in nodes:
        await node.close()


async def test_a_packed_assignment_names_the_gateways_bulk_port(front: Front) -> None:
    node = await front.join_node()
    node.unpacks = True
    await asyncio.to_thread(front.cluster.submit, SPEC)
    unpacker = MessageUnpacker()
    stream = node.control([("null", 1)])
    while True:
        packed_message = await anext(stream)
        if (message := unpacker.unpack(packed_message)).HasField("assignment"):
            break
    assert packed_message.HasField("packed")
    ticket = message.assignment.model_ticket
    assert {URL(each.url).port for each in ticket.ranges} == {front.gateway.line.bulk_port}
    await node.submit(node.offer(message.assignment, UPDATE), UPDATE)
    await node.close()


async def test_an_error_of_the_coordinator_comes_back_as_it_is(front: Front) -> None:
    node = WireNode(front.gateway.line.address, front.gateway.node_address)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await anext(node.control([("null", 1)]))
    assert reason_of(failure.value) == "NODE_UNKNOWN"
    await node.close()


async def test_whoever_revokes_its_token_shuts_a_gateway_out(front: Front) -> None:
    with front.cluster.coordinator.client() as client:
        new_token = await asyncio.to_thread(
            client.create_token, Role.OPERATOR, ttl_s=600, label="test"
        )
    gateway = await asyncio.to_thread(front.add_gateway, new_token.token)
    node = await front.join_node(gateway)
    stream = node.control([("null", 1)])
    assert (await anext(stream)).HasField("welcome")
    with front.cluster.coordinator.client() as client:
        await asyncio.to_thread(client.revoke_token, new_token.id)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await echo(stream)
    assert reason_of(failure.value) == "TOKEN_REVOKED"
    await node.close()


async def test_a_node_beyond_the_rate_is_told_when_to_come_again(front: Front) -> None:
    token = operator_token(front.cluster.coordinator)
    flags = (*FREE_PORTS, "--streams-per-s", "1")
    gateway = await asyncio.to_thread(front.add_gateway, token, *flags)
    # Five are let in at once, and one more each second that the dials take.
    nodes = [await front.join_node(gateway) for _ in range(16)]
    first_answers = [anext(node.control([("null", 1)])) for node in nodes]
    answers = await asyncio.gather(*first_answers, return_exceptions=True)
    refusals = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
    numbered_error = error_in(refusals[-1].trailing_metadata())
    assert isinstance(numbered_error, HyperGPUError)
    assert numbered_error.reason.name == "RATE_LIMITED"
    assert 0 < numbered_error.wait_ms <= 11_000
    for node in nodes:
        await node.close()


async def test_a_gateway_goes_over_to_the_coordinator_that_serves(tmp_path: Path) -> None:
    with ExitStack() as owner:
        before = owner.enter_context(Cluster(tmp_path / "before", *NOBODY_LOST))
        after = CoordinatorProcess(tmp_path / "after", *NOBODY_LOST)
        owner.callback(after.end)
        token = operator_token(before.coordinator)
        addresses = (after.address, before.coordinator.address)
        coordinator_words = [word for address in addresses for word in ("--coordinator", address)]
        gateway = GatewayProcess(token, tmp_path / "gateway.log", *FREE_PORTS, *coordinator_words)
        owner.callback(gateway.end)
        node = WireNode(gateway.line.address, gateway.node_address)
        await node.join(before.coordinator.node_token())
        stream = node.control([("null", 1)])
        assert (await anext(stream)).HasField("welcome")
        with before.coordinator.freeze():
            shutil.copytree(before.folder, after.folder, dirs_exist_ok=True)
            await asyncio.to_thread(after.start)
            # Nothing told the stream that its coordinator stands still.
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await echo(stream)
            assert reason_of(failure.value) == "NOT_READY"
            async with asyncio.timeout(60):
                assert (await dial_until_served(node)).HasField("welcome")
        await node.close()
