"""Conversations of a ring that are computed again: who is told what, and what comes of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.serving.stage_honesty import DISTANCE_MOST
from hypergpu.journal.serving_events import (
    AnswerDoubtedEvent,
    StageCheckedEvent,
    StagesContradictedEvent,
)
from hypergpu.rings.state_digests import digest_of_rows, row_digests
from hypergpu.serving.calls import AnswerEnded, AnswerToken, CheckFigures
from hypergpu.serving.check_messages import (
    HandStates,
    RecomputeStage,
    StageCompared,
    StageFigures,
    StateDigests,
    TakeStates,
    TellDigests,
)
from hypergpu.serving.stage_messages import (
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    JoinRing,
    JudgedSegment,
    StageJudged,
    StageReply,
    StageRequest,
    StageRows,
    pack_stage_message,
)
from tests.kinds.serving.test_wire_ring import ROW_BYTES, STATES, WireRing, WireStage, wire_ring
from tests.node_client import NOBODY_LOST
from tests.processes import Cluster

ANSWERS_MOST = 60
"""Half of a new node's conversations are checked."""
RIGHT_DIGEST = digest_of_rows(row_digests(STATES, ROW_BYTES), 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("stage-checks"), *NOBODY_LOST) as cluster:
        yield cluster


class ScriptedRing:
    """Two stages and a node that stands by, which say what a test wants said."""

    def __init__(self, ring: WireRing) -> None:
        assert ring.standby is not None
        self.ring, self.standby = ring, ring.standby
        self.distance_ppm = 0
        """What the checker finds of the first stage."""
        self.received = RIGHT_DIGEST
        """What the last stage says that it received."""
        self.others_answer = False
        """Whether stages answer for the checker, too."""
        self.is_silent = False
        """Whether the checker never tells what it found of the first stage."""
        self.asked = asyncio.Event()
        """Set once it was asked, and is silent."""
        self.recomputed: list[RecomputeStage] = []
        self.opened: list[bytes] = []
        """States that the checker could open."""
        self.bodies: list[bytes] = []
        """All that came to the checker."""

    async def work(self, stage: WireStage) -> None:
        """Answer whatever comes."""
        while True:
            request = stage.request_of(await stage._wire.next_call())
            if isinstance(request, JoinRing):
                stage.join(request)
                continue
            if isinstance(request, RecomputeStage) and request.call is None and self.is_silent:
                self.asked.set()
                continue
            body = pack_stage_message(self._reply(stage, request))
            stage._wire.say_bytes(stage.call, body, is_last=True)

    def _reply(self, stage: WireStage, request: StageRequest) -> StageReply:
        match request:
            case BeginAnswer():
                return AnswerOpened((5, 6))
            case ComputePass() if stage is self.ring.first:
                return stage.link.seal_states(request.place, StageRows(STATES))
            case ComputePass():
                parts = (AnswerToken(9, "nine"), AnswerEnded("length"))
                return StageJudged((JudgedSegment(request.segments[0].session, (9,), parts),))
            case TellDigests(count=count):
                assert count == 2
                is_first = stage is self.ring.first
                return StateDigests(b"" if is_first else self.received, RIGHT_DIGEST)
            case HandStates():
                return stage.link.seal_for_checker(request, StageRows(STATES))
            case TakeStates() | RecomputeStage():
                return self._check(stage, request)
            case _:
                return StageRows()

    def _check(self, stage: WireStage, request: TakeStates | RecomputeStage) -> StageReply:
        assert stage is self.standby
        self.bodies.append(stage.body)
        if isinstance(request, TakeStates):
            self.opened.append(stage.link.open_for_check(request))
            return StageRows()
        self.recomputed.append(request)
        for stranger in (self.ring.first, self.ring.last) if self.others_answer else ():
            wrong_figures = StageFigures(2, 9 * DISTANCE_MOST)
            body = pack_stage_message(StageCompared(wrong_figures, b"", RIGHT_DIGEST))
            stranger._wire.say_bytes(stage.call, body, is_last=True)
        if request.call is None:
            return StageCompared(StageFigures(2, self.distance_ppm), b"", RIGHT_DIGEST)
        score = CheckFigures(1, 0, 2)
        return StageCompared(StageFigures(1, scored=score), RIGHT_DIGEST, b"")

    async def answer_until(self, kind: type[Any]) -> Any:
        """Have calls answered until the journal has an event of a kind."""
        found_event = asyncio.create_task(self._first(kind))
        for _ in range(ANSWERS_MOST):
            if found_event.done():
                break
            assert await self.ring.answer() == [9]
        async with asyncio.timeout(60):
            return await found_event

    async def _first(self, kind: type[Any]) -> Any:
        async for event in self.ring.user.read_events(self.ring.job):
            if isinstance(event.content, kind):
                return event.content
        raise AssertionError(f"no {kind.__name__}")


@asynccontextmanager
async def scripted_ring(cluster: Cluster, folder: Path, **more: Any) -> AsyncIterator[ScriptedRing]:
    async with wire_ring(cluster, folder, 3, **more) as ring:
        script = ScriptedRing(ring)
        await script.standby.echo()
        stages = (ring.first, ring.last, script.standby)
        tasks = [asyncio.create_task(script.work(stage)) for stage in stages]
        yield script
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results), results


async def test_a_checker_gets_sealed_states_and_what_it_finds_right_is_noted(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with scripted_ring(cluster, tmp_path) as script:
        event = await script.answer_until(StageCheckedEvent)
        assert event.checker == script.standby.node_id
        request = script.recomputed[0]
        assert request.count == 2
        if request.call is None:
            assert event.node == script.ring.first.node_id
            assert (request.span, request.tokens) == (script.ring.first.span, (5, 6))
        else:
            assert event.node == script.ring.last.node_id
            assert (request.call.tokens, request.call.tokens_out) == ((5, 6), (9,))
        assert script.opened[0] == STATES
        assert not any(STATES in body for body in script.bodies)


async def test_a_stage_that_one_checker_finds_wrong_is_not_paid_and_keeps_its_layers(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with scripted_ring(cluster, tmp_path) as script:
        script.distance_ppm = 3 * DISTANCE_MOST
        event = await script.answer_until(AnswerDoubtedEvent)
        assert event.node == script.ring.first.node_id
        assert "15.0% from those of its layers" in event.reason
        assert await script.ring.answer() == [9]


async def test_neighbours_whose_digests_differ_contradict_each_other_and_no_state_is_asked_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with scripted_ring(cluster, tmp_path) as script:
        script.received = bytes(32)
        event = await script.answer_until(StagesContradictedEvent)
        nodes = (script.ring.first.node_id, script.ring.last.node_id)
        assert (event.node, event.other) == nodes
        assert "two digests" in event.reason
        assert not script.opened


async def test_nobody_but_the_checker_says_what_came_of_a_check(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with scripted_ring(cluster, tmp_path) as script:
        script.others_answer = True
        while len(script.recomputed) < 4:
            assert await script.ring.answer() == [9]
        script.distance_ppm = 3 * DISTANCE_MOST
        event = await script.answer_until(AnswerDoubtedEvent)
        assert "15.0% from those of its layers" in event.reason  # 45 % is what others said.


async def test_a_stage_that_is_being_checked_when_its_model_is_stopped_is_paid(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with scripted_ring(cluster, tmp_path, signs_counts=True) as script:
        script.is_silent = True
        while not script.asked.is_set():
            assert await script.ring.answer() == [9]
        await script.ring.user.stop(script.ring.job)
        kinds: list[str] = []
        async with asyncio.timeout(60):
            async for event in script.ring.user.read_events(script.ring.job):
                kinds.append(event.kind)
                if event.kind == "CountsClosed":
                    break
        assert kinds.count("WindowCounted") == 2
        assert "WindowRefused" not in kinds
