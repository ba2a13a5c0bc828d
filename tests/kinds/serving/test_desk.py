"""Calls to a served model by nodes that say what a test wants said."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    ModelCall,
    ReplicaReady,
    pack_parts,
    unpack_call,
)
from hypergpu.serving.serve_request import ENGINE_KIND, ENGINE_VERSION
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.user.client.models import AnswerRoute
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.credentials import Role, parse_token
from tests.kinds.serving.small_model import serve_small_model
from tests.node_client import NOBODY_LOST, WireNode, reason_of
from tests.processes import Cluster

READY = ReplicaReady(tokens_most=64, fingerprint="f", device="cpu")
CALL = ModelCall(text="hello", new_tokens_most=3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("desk"), *NOBODY_LOST) as cluster:
        yield cluster


class WireReplica:
    """A node that holds the model, reduced to its wire."""

    def __init__(self, node: WireNode, stream: AsyncIterator[node_pb2.ControlResponse]) -> None:
        self._node = node
        self._stream = stream
        self._work = node_pb2.WorkAssignment()

    @property
    def node_id(self) -> str:
        """Id of the node."""
        return self._node.node_id

    async def begin(self) -> None:
        """Wait for the lease, and say that the model is loaded."""
        message = await self._next("work_assignment")
        self._work = message.work_assignment
        self.say(0, READY)

    async def next_call(self) -> work_pb2.WorkCall:
        """The next call that is not one to be given up."""
        while (call := (await self._next("work_call")).work_call).is_cancelled:
            pass
        return call

    async def _next(self, kind: str) -> node_pb2.ControlResponse:
        async with asyncio.timeout(60):
            async for message in self._stream:
                if message.WhichOneof("message") == kind:
                    return message
        raise AssertionError("the stream ended")

    def say(self, call: int, *parts: AnswerPart, is_last: bool = False) -> None:
        """Say parts of an answer."""
        self.say_bytes(call, pack_parts([*parts]) if parts else b"", is_last=is_last)

    def say_bytes(self, call: int, body: bytes, *, is_last: bool = False) -> None:
        """Say anything."""
        output = work_pb2.WorkOutput(
            job_id=self._work.lease.job_id,
            lease=self._work.lease.number,
            call=call,
            body=body,
            is_last=is_last,
        )
        outputs = work_pb2.WorkOutputs(outputs=[output])
        self._node.say(node_pb2.ControlRequest(work_outputs=outputs))

    async def end(self) -> None:
        """Read the stream to its end, which raises what ended it."""
        async with asyncio.timeout(60):
            async for _ in self._stream:
                pass


@asynccontextmanager
async def replicas(
    cluster: Cluster, folder: Path, count: int
) -> AsyncIterator[tuple[AsyncCoordinator, list[WireReplica]]]:
    """A model on so many nodes, and a connection of its user."""
    with cluster.client() as client:
        token = client.create_token(Role.USER, ttl_s=600).token
    target = ConnectionTarget(cluster.coordinator.address, parse_token(token), 60.0)
    nodes = [
        WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
        for _ in range(count)
    ]
    async with await AsyncCoordinator.open(target) as user:
        job = await serve_small_model(user, folder, replicas=count)
        wires = []
        for node in nodes:
            await node.join(cluster.coordinator.node_token())
            wire = WireReplica(node, node.control([(ENGINE_KIND, ENGINE_VERSION)]))
            await wire.begin()
            wires.append(wire)
        while (await user.models())[0].ready_replicas < count:
            pass
        yield user, wires
        await user.stop(job)
    for node in nodes:
        await node.close()


async def parts_of(user: AsyncCoordinator, parts: list[AnswerPart | AnswerRoute]) -> None:
    parts.extend([part async for part in user.answer("small", CALL)])


async def test_a_replica_that_gives_more_tokens_than_asked_for_is_cut_off(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 2) as (user, wires):
        parts: list[AnswerPart | AnswerRoute] = []
        answer_task = asyncio.create_task(parts_of(user, parts))
        call_tasks = {asyncio.create_task(wire.next_call()): wire for wire in wires}
        ready_tasks, _ = await asyncio.wait(call_tasks, return_when=asyncio.FIRST_COMPLETED)
        (first_task,) = ready_tasks
        liar = call_tasks.pop(first_task)
        flood = [AnswerToken(number, "x") for number in range(50)]
        liar.say(first_task.result().call, AnswerBegun(1), *flood)
        ((second_task, honest),) = call_tasks.items()
        second_call = await second_task
        assert unpack_call(second_call.body).tokens_out == (0, 1, 2)
        honest.say(second_call.call, AnswerBegun(1), AnswerEnded("length"), is_last=True)
        await answer_task
        tokens = [part.token for part in parts if isinstance(part, AnswerToken)]
        assert tokens == [0, 1, 2]
        nodes = [part.node for part in parts if isinstance(part, AnswerRoute)]
        assert nodes == [liar.node_id, honest.node_id]


async def test_what_is_no_answer_ends_the_node_s_stream_and_the_call_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 2) as (user, wires):
        parts: list[AnswerPart | AnswerRoute] = []
        answer_task = asyncio.create_task(parts_of(user, parts))
        call_tasks = {asyncio.create_task(wire.next_call()): wire for wire in wires}
        ready_tasks, _ = await asyncio.wait(call_tasks, return_when=asyncio.FIRST_COMPLETED)
        (first_task,) = ready_tasks
        liar = call_tasks.pop(first_task)
        liar.say_bytes(first_task.result().call, b"no answer")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await liar.end()
        assert reason_of(refusal.value) == "REQUEST_INVALID"
        ((second_task, honest),) = call_tasks.items()
        second_call = await second_task
        honest.say(second_call.call, AnswerBegun(1), AnswerToken(9, "y"))
        honest.say(second_call.call, AnswerEnded("stop"), is_last=True)
        await answer_task
        assert [part.token for part in parts if isinstance(part, AnswerToken)] == [9]


async def test_a_replica_without_memory_passes_the_call_on_and_a_refusal_is_told(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 2) as (user, wires):
        parts: list[AnswerPart | AnswerRoute] = []
        answer_task = asyncio.create_task(parts_of(user, parts))
        call_tasks = {asyncio.create_task(wire.next_call()): wire for wire in wires}
        ready_tasks, _ = await asyncio.wait(call_tasks, return_when=asyncio.FIRST_COMPLETED)
        (first_task,) = ready_tasks
        full = call_tasks.pop(first_task)
        lack = AnswerRefused("no memory", is_lasting=False)
        full.say(first_task.result().call, lack, is_last=True)
        ((second_task, other),) = call_tasks.items()
        second_call = await second_task
        other.say(second_call.call, AnswerRefused("too long", is_too_long=True), is_last=True)
        await answer_task
        assert parts[-1] == AnswerRefused("too long", is_too_long=True)
