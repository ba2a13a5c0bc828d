"""A ring of nodes that say what a test wants said: two stages, of which one does wrong."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from hypergpu.journal.serving_events import ReplicaHandedBackEvent
from hypergpu.packed_work import PackedWork, unpack_work
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, StageWork, span_blobs
from hypergpu.serving.calls import AnswerEnded, AnswerToken, ModelCall
from hypergpu.serving.serve_request import ENGINE_VERSION, ServeRequest
from hypergpu.serving.stage_messages import (
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    JudgedSegment,
    StageJudged,
    StageReady,
    StageRefused,
    StageReply,
    StageRequest,
    StageRows,
    pack_stage_message,
    unpack_stage_request,
)
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.v1 import work_pb2
from hypergpu.wire.credentials import Role, parse_token
from tests.kinds.serving.wire_replica import WireReplica
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster

READY = StageReady(
    tokens_most=64,
    fingerprint="f",
    device="cpu",
    pass_us=1_000.0,
    token_us=10.0,
    layer_us=500.0,
    weights_bytes=1,
    token_bytes=1,
    sessions_bytes=1_000,
)
WIDTH = 4
ROW_BYTES = 4 * WIDTH
CALL = ModelCall(tokens=(5, 6), new_tokens_most=1)


class WireStage:
    """A node that holds one of two layers, reduced to its wire."""

    def __init__(self, wire: WireReplica) -> None:
        self._wire = wire
        self.node_id = wire.node_id
        self.span = LayerSpan(0, 0)
        self.call = 0

    async def begin(self) -> None:
        """Wait for layers, and say that they are there."""
        message = await self._wire._next("work_assignment")
        self._wire._work = message.work_assignment
        self.say_ready()

    def say_ready(self) -> None:
        """Say that the layers of its lease are there."""
        work_message = self._wire._work.work
        work = unpack_work(PackedWork(work_message.kind, work_message.body), STAGE_KIND, StageWork)
        self.span = work.span
        self._wire.say_bytes(0, pack_stage_message(READY))

    async def next_request(self) -> StageRequest:
        """What it is told next."""
        return self.request_of(await self._wire.next_call())

    def request_of(self, call: work_pb2.WorkCall) -> StageRequest:
        """A call that came, which the next reply answers."""
        self.call = call.call
        return unpack_stage_request(call.body)

    async def reply(self, reply: StageReply) -> StageRequest:
        """Take in what it is told next, and answer with this."""
        request = await self.next_request()
        self._wire.say_bytes(self.call, pack_stage_message(reply), is_last=True)
        return request


class WireRing(NamedTuple):
    """Two stages in order, and the model's user."""

    user: AsyncCoordinator
    job: str
    first: WireStage
    last: WireStage

    async def answer(self) -> list[int]:
        """Tokens of the answer to `CALL`."""
        parts = self.user.answer("cut", CALL)
        return [part.token async for part in parts if isinstance(part, AnswerToken)]

    async def end_well(self) -> None:
        """Compute the one pass that is under way as it must be."""
        await self.first.reply(StageRows(bytes(2 * ROW_BYTES)))
        request = await self.last.next_request()
        assert isinstance(request, ComputePass)
        assert request.states == bytes(2 * ROW_BYTES)
        (segment,) = request.segments
        parts = (AnswerToken(9, "nine"), AnswerEnded("length"))
        judgement = JudgedSegment(segment.session, (9,), parts)
        body = pack_stage_message(StageJudged((judgement,)))
        self.last._wire.say_bytes(self.last.call, body, is_last=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("ring"), *NOBODY_LOST) as cluster:
        yield cluster


@asynccontextmanager
async def wire_ring(cluster: Cluster, folder: Path) -> AsyncIterator[WireRing]:
    with cluster.client() as client:
        token = client.create_token(Role.USER, ttl_s=600).token
    target = ConnectionTarget(cluster.coordinator.address, parse_token(token), 60.0)
    coordinator = cluster.coordinator
    nodes = [WireNode(coordinator.address, coordinator.node_address) for _ in range(2)]
    (folder / "blob").write_bytes(b"nobody reads it")
    async with await AsyncCoordinator.open(target) as user:
        (blob,) = await user.send_blobs([folder / "blob"], step="sending")
        files = dict.fromkeys(("base", *span_blobs(LayerSpan(0, 2), 2)), blob)
        cut = ModelCut(layers=2, hidden_size=WIDTH, layer_bytes=1, end_bytes=1, stages=2)
        job = await user.create_serve(
            ServeRequest(model="cut", files=files, engine=STAGE_KIND, cut=cut)
        )
        stages = []
        for node in nodes:
            await node.join(coordinator.node_token())
            wire = WireReplica(node, node.control([(STAGE_KIND, ENGINE_VERSION)]))
            stages.append(WireStage(wire))
        await asyncio.gather(*(stage.begin() for stage in stages))
        first, last = sorted(stages, key=lambda stage: stage.span)
        while not (await user.models())[0].ready_replicas:
            pass
        yield WireRing(user, job, first, last)
        await user.stop(job)
    for node in nodes:
        await node.close()


async def hand_back_of(ring: WireRing) -> ReplicaHandedBackEvent:
    async for event in ring.user.read_events(ring.job):
        if isinstance(event.content, ReplicaHandedBackEvent):
            return event.content
    raise AssertionError("nothing was handed back")


async def test_a_stage_that_gives_another_length_loses_its_layers_and_the_answer_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with wire_ring(cluster, tmp_path) as ring:
        answer_task = asyncio.create_task(ring.answer())
        begin = await ring.last.reply(AnswerOpened((5, 6)))
        assert isinstance(begin, BeginAnswer)
        request = await ring.first.reply(StageRows(bytes(2 * ROW_BYTES - 1)))
        assert isinstance(request, ComputePass)
        assert request.tokens == (5, 6)
        fault = await hand_back_of(ring)
        assert (fault.node, fault.reason) == (
            ring.first.node_id,
            "it gave 31 bytes for 2 tokens, not 32",
        )
        await ring.first.begin()
        await ring.end_well()
        assert await answer_task == [9]


async def test_a_stage_whose_states_are_not_finite_loses_its_layers(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with wire_ring(cluster, tmp_path) as ring:
        answer_task = asyncio.create_task(ring.answer())
        await ring.last.reply(AnswerOpened((5, 6)))
        await ring.first.reply(StageRows(b"\xff" * 2 * ROW_BYTES))
        await ring.last.reply(StageRefused("they are not finite", blames_input=True))
        fault = await hand_back_of(ring)
        assert fault.node == ring.first.node_id
        assert "they are not finite" in fault.reason
        await ring.first.begin()
        await ring.end_well()
        assert await answer_task == [9]


async def test_a_last_stage_that_judges_what_it_was_not_asked_loses_its_layers(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with wire_ring(cluster, tmp_path) as ring:
        answer_task = asyncio.create_task(ring.answer())
        await ring.last.reply(AnswerOpened((5, 6)))
        await ring.first.reply(StageRows(bytes(2 * ROW_BYTES)))
        parts = (AnswerToken(7, "x"), AnswerToken(8, "y"))
        request = await ring.last.next_request()
        assert isinstance(request, ComputePass)
        judgement = JudgedSegment(request.segments[0].session, (7, 8), parts)
        body = pack_stage_message(StageJudged((judgement,)))
        ring.last._wire.say_bytes(ring.last.call, body, is_last=True)
        fault = await hand_back_of(ring)
        assert fault.node == ring.last.node_id
        assert "2 tokens" in fault.reason
        await ring.last.begin()
        await ring.last.reply(AnswerOpened((5, 6)))
        await ring.end_well()
        assert await answer_task == [9]
