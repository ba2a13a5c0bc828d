"""A ring of nodes that say what a test wants said: two stages, of which one does wrong."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from gpu_node.shell.worker.protocol import RingKey
from gpu_node.shell.worker.serving.stage_link import StageLink
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.journal.serving_events import (
    ReplicaHandedBackEvent,
    StageMovedEvent,
    StagesContradictedEvent,
)
from hypergpu.packed_work import PackedWork, unpack_work
from hypergpu.rings.frame_cipher import SealedFrameError, generate_ring_secret, public_ring_key
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import sign_ring_key
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, StageWork, span_blobs
from hypergpu.serving.calls import AnswerEnded, AnswerToken, ModelCall
from hypergpu.serving.serve_request import STAGE_VERSION, ServeRequest
from hypergpu.serving.stage_messages import (
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    JoinRing,
    JudgedSegment,
    RingJoined,
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
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.credentials import Role, parse_token
from tests.kinds.serving.wire_replica import WireReplica, first_model
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
STATES = bytes(range(2 * ROW_BYTES))
CALL = ModelCall(tokens=(5, 6), new_tokens_most=1)


class WireStage:
    """A node that holds one of two layers, reduced to its wire."""

    def __init__(self, wire: WireReplica) -> None:
        self._wire = wire
        self.node_id = wire.node_id
        self.span = LayerSpan(0, 0)
        self.call = 0
        self.body = b""
        """What it was told last, as it came."""
        self.link: StageLink
        self.stands_by = False

    async def begin(self, *, has_key: bool = True, signs_job: str = "") -> None:
        """Wait for layers, and say that they are there.

        Args:
            has_key: False: it is of the version before, and knows of no key.
            signs_job: The job that its key is signed for; empty: the one that it works for.
        """
        message = await self._wire._next("work_assignment")
        self._wire._work = message.work_assignment
        self.say_ready(has_key=has_key, signs_job=signs_job)

    def say_ready(self, *, has_key: bool = True, signs_job: str = "") -> None:
        """Say that the layers of its lease are there; see `begin`."""
        assignment = self._wire._work
        work_message, lease = assignment.work, assignment.lease
        work = unpack_work(PackedWork(work_message.kind, work_message.body), STAGE_KIND, StageWork)
        self.span = work.span
        self.stands_by = not {*span_blobs(LayerSpan(0, 2), 2)}.isdisjoint(
            work.files.keys() - span_blobs(work.span, 2)
        )
        secret, job = generate_ring_secret(), JobId(signs_job or lease.job_id)
        key = public_ring_key(secret)
        signature = sign_ring_key(self._wire._node.key, job, lease.number, key)
        ring_key = RingKey(secret, signature)
        self.link = StageLink(JobId(lease.job_id), lease.number, work.span, 2, ring_key)
        ready = replace(READY, key=key, key_signature=signature) if has_key else READY
        self._wire.say_bytes(0, pack_stage_message(ready))

    async def echo(self) -> None:
        """Wait until the coordinator has read all that it said."""
        self._wire._node.say(node_pb2.ControlRequest(heartbeat=node_pb2.Heartbeat(sequence=1)))
        await self._wire._next("heartbeat_echo")

    def lose_all(self, *, is_back: bool) -> None:
        """Lose what it has: its stream ends, and it dials in anew at once or stays away."""
        if is_back:
            self._wire._stream = self._wire._node.control([(STAGE_KIND, STAGE_VERSION)])
        else:
            self._wire._node._outbox.put_nowait(None)

    async def next_request(self) -> StageRequest:
        """What it is told next, beside who is in its ring."""
        while True:
            request = self.request_of(await self._wire.next_call())
            if not isinstance(request, JoinRing):
                return request
            self.join(request)

    async def next_count(self) -> work_pb2.WorkCount:
        """The next count that it is to sign."""
        return await self._wire.next_count()

    async def sign(self, count: work_pb2.WorkCount) -> None:
        """Answer with its signature of a count."""
        await self._wire.sign(count)

    def request_of(self, call: work_pb2.WorkCall) -> StageRequest:
        """A call that came, which the next reply answers."""
        self.call, self.body = call.call, call.body
        return unpack_stage_request(call.body)

    def join(self, request: JoinRing) -> None:
        """Take the place in the ring that it was told of."""
        assert not self.link.join(request)
        self._wire.say_bytes(self.call, pack_stage_message(RingJoined()), is_last=True)

    async def reply(self, reply: StageReply) -> StageRequest:
        """Take in what it is told next, and answer with this; hidden states are sealed."""
        request = await self.next_request()
        if isinstance(reply, StageRows) and isinstance(request, ComputePass):
            reply = self.link.seal_states(request.place, reply)
        self._wire.say_bytes(self.call, pack_stage_message(reply), is_last=True)
        return request


class WireRing(NamedTuple):
    """Two stages in order, and the model's user."""

    user: AsyncCoordinator
    job: str
    first: WireStage
    last: WireStage
    standby: WireStage | None = None

    async def answer(self) -> list[int]:
        """Tokens of the answer to `CALL`."""
        parts = self.user.answer("cut", CALL)
        return [part.token async for part in parts if isinstance(part, AnswerToken)]

    async def end_well(self) -> None:
        """Compute the one pass that is under way as it must be."""
        await self.first.reply(StageRows(STATES))
        request = await self.last.next_request()
        assert isinstance(request, ComputePass)
        assert STATES not in self.last.body
        assert self.last.link.open_states(request).states == STATES
        (segment,) = request.segments
        parts = (AnswerToken(9, "nine"), AnswerEnded("length"))
        judgement = JudgedSegment(segment.session, (9,), parts)
        body = pack_stage_message(StageJudged((judgement,)))
        self.last._wire.say_bytes(self.last.call, body, is_last=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("ring"), *NOBODY_LOST) as cluster:
        yield cluster


class CutModel(NamedTuple):
    """A model of two layers, and the nodes that are to hold one each."""

    user: AsyncCoordinator
    job: str
    stages: list[WireStage]


@asynccontextmanager
async def cut_model(
    cluster: Cluster, folder: Path, count: int = 2, *, signs_counts: bool = False, **more: Any
) -> AsyncIterator[CutModel]:
    with cluster.client() as client:
        token = client.create_token(Role.USER, ttl_s=600).token
    target = ConnectionTarget(cluster.coordinator.address, parse_token(token), 60.0)
    coordinator = cluster.coordinator
    nodes = [WireNode(coordinator.address, coordinator.node_address) for _ in range(count)]
    (folder / "blob").write_bytes(b"nobody reads it")
    async with await AsyncCoordinator.open(target) as user:
        (blob,) = await user.send_blobs([folder / "blob"], step="sending")
        files = dict.fromkeys(("base", *span_blobs(LayerSpan(0, 2), 2)), blob)
        cut = ModelCut(layers=2, hidden_size=WIDTH, layer_bytes=1, end_bytes=1, stages=2)
        job = await user.create_serve(
            ServeRequest(model="cut", files=files, engine=STAGE_KIND, cut=cut, **more)
        )
        stages = []
        for node in nodes:
            node.signs_counts = signs_counts
            await node.join(coordinator.node_token())
            wire = WireReplica(node, node.control([(STAGE_KIND, STAGE_VERSION)]))
            stages.append(WireStage(wire))
        yield CutModel(user, job, stages)
        with suppress(HyperGPUError):  # A test may have stopped it.
            await user.stop(job)
    for node in nodes:
        await node.close()


@asynccontextmanager
async def wire_ring(
    cluster: Cluster, folder: Path, count: int = 2, **more: Any
) -> AsyncIterator[WireRing]:
    async with cut_model(cluster, folder, count, **more) as model:
        await asyncio.gather(*(stage.begin() for stage in model.stages))
        holders = [stage for stage in model.stages if not stage.stands_by]
        first, last = sorted(holders, key=lambda stage: stage.span)
        standby = next((stage for stage in model.stages if stage.stands_by), None)
        await first_model(model.user, lambda model: model.ready_replicas)
        yield WireRing(model.user, model.job, first, last, standby)


async def hand_back_of(ring: WireRing | CutModel) -> ReplicaHandedBackEvent:
    async for event in ring.user.read_events(ring.job):
        if isinstance(event.content, ReplicaHandedBackEvent):
            return event.content
    raise AssertionError("nothing was handed back")


async def contradictions_of(ring: WireRing, count: int) -> list[StagesContradictedEvent]:
    contradictions: list[StagesContradictedEvent] = []
    async for event in ring.user.read_events(ring.job):
        if isinstance(event.content, StagesContradictedEvent):
            contradictions.append(event.content)
            if len(contradictions) == count:
                return contradictions
    raise AssertionError("nobody contradicted anybody")


async def move_of(ring: WireRing) -> StageMovedEvent:
    async for event in ring.user.read_events(ring.job):
        if isinstance(event.content, StageMovedEvent):
            return event.content
    raise AssertionError("nothing was moved")


async def test_a_stage_that_gives_more_than_its_pass_has_loses_its_layers_and_the_answer_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with wire_ring(cluster, tmp_path) as ring:
        answer_task = asyncio.create_task(ring.answer())
        begin = await ring.last.reply(AnswerOpened((5, 6)))
        assert isinstance(begin, BeginAnswer)
        request = await ring.first.reply(StageRows(bytes(2 * ROW_BYTES + 1)))
        assert isinstance(request, ComputePass)
        assert request.tokens == (5, 6)
        fault = await hand_back_of(ring)
        assert (fault.node, fault.reason) == (
            ring.first.node_id,
            "it gave 57 sealed bytes for 2 tokens, and 56 at most",
        )
        await ring.first.begin()
        await ring.end_well()
        assert await answer_task == [9]


async def test_of_a_stage_and_the_one_that_blames_it_the_first_goes_first_and_the_other_next(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with wire_ring(cluster, tmp_path) as ring:
        answer_task = asyncio.create_task(ring.answer())
        await ring.last.reply(AnswerOpened((5, 6)))
        await ring.first.reply(StageRows(b"\xff" * 2 * ROW_BYTES))
        refusal = StageRefused("they are not finite", blames_input=True)
        await ring.last.reply(refusal)
        await ring.first.begin()
        await ring.first.reply(StageRows(bytes(2 * ROW_BYTES)))
        await ring.last.reply(refusal)
        # Nobody can tell who of both is right: this time it costs the one that blames.
        await ring.last.begin()
        for contradiction in await contradictions_of(ring, 2):
            nodes = (contradiction.node, contradiction.other)
            assert nodes == (ring.first.node_id, ring.last.node_id)
            assert "they are not finite" in contradiction.reason
        await ring.last.reply(AnswerOpened((5, 6)))
        await ring.end_well()
        assert await answer_task == [9]


async def test_a_stage_whose_frame_does_not_open_loses_its_layers(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with wire_ring(cluster, tmp_path) as ring:
        answer_task = asyncio.create_task(ring.answer())
        await ring.last.reply(AnswerOpened((5, 6)))
        request = await ring.first.next_request()
        assert isinstance(request, ComputePass)
        other_place = request.place._replace(number=request.number + 1)
        frame = ring.first.link.seal_states(other_place, StageRows(STATES))
        ring.first._wire.say_bytes(ring.first.call, pack_stage_message(frame), is_last=True)
        request = await ring.last.next_request()
        assert isinstance(request, ComputePass)
        with pytest.raises(SealedFrameError) as error:
            ring.last.link.open_states(request)
        refusal = StageRefused(str(error.value), blames_input=True)
        ring.last._wire.say_bytes(ring.last.call, pack_stage_message(refusal), is_last=True)
        (contradiction,) = await contradictions_of(ring, 1)
        assert contradiction.node == ring.first.node_id
        assert "not sealed for this pass" in contradiction.reason
        await ring.first.begin()
        await ring.end_well()
        assert await answer_task == [9]


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        ({"has_key": False}, "pip install --upgrade hypergpu"),
        ({"signs_job": "another"}, "has not signed the key"),
    ],
)
async def test_a_stage_without_a_key_of_its_node_is_in_no_ring(
    cluster: Cluster, tmp_path: Path, begin: dict[str, Any], reason: str
) -> None:
    async with cut_model(cluster, tmp_path) as model:
        await asyncio.gather(model.stages[0].begin(**begin), model.stages[1].begin())
        fault = await hand_back_of(model)
        assert fault.node == model.stages[0].node_id
        assert reason in fault.reason
        assert not (await model.user.models())[0].ready_replicas


@pytest.mark.parametrize("is_back", [False, True])
async def test_layers_that_a_node_has_lost_go_to_the_one_that_stands_by(
    cluster: Cluster, tmp_path: Path, *, is_back: bool
) -> None:
    async with wire_ring(cluster, tmp_path, 3) as ring:
        assert ring.standby is not None
        assert ring.standby.span == ring.last.span
        await ring.standby.echo()
        answer_task = asyncio.create_task(ring.answer())
        await ring.last.reply(AnswerOpened((5, 6)))
        await ring.first.next_request()
        ring.first.lose_all(is_back=is_back)
        await ring.standby.begin()
        assert ring.standby.span == ring.first.span
        await ring._replace(first=ring.standby).end_well()
        assert await answer_task == [9]
        move = await move_of(ring)
        assert (move.node, move.to) == (ring.first.node_id, ring.standby.node_id)
        reason = "it has started anew without them" if is_back else "it was away for 0.25 s"
        assert move.reason == reason
        while is_back and not ring.first.stands_by:
            await ring.first.begin()  # It is told its old work first, and that it is void.


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
