"""Calls to a served model by nodes that say what a test wants said."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace

from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    ModelCall,
    unpack_call,
)
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.models import AnswerRoute
from tests.kinds.serving.wire_replica import READY, replicas
from tests.node_client import NOBODY_LOST, reason_of
from tests.processes import Cluster

CALL = ModelCall(text="hello", new_tokens_most=3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("desk"), *NOBODY_LOST) as cluster:
        yield cluster


async def parts_of(
    user: AsyncCoordinator, parts: list[AnswerPart | AnswerRoute], call: ModelCall = CALL
) -> None:
    parts.extend([part async for part in user.answer("small", call)])


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


async def test_the_next_turn_goes_where_the_one_before_was_read_and_no_further_than_its_scope(
    cluster: Cluster, tmp_path: Path
) -> None:
    ready = replace(READY, keeps_prefixes=True)
    async with replicas(cluster, tmp_path, 2, ready=ready) as (user, wires):
        call = ModelCall(text="hello " * 200, new_tokens_most=3, prefix_scope="key-1")
        longer = replace(call, text=f"{call.text}and more")
        parts: list[AnswerPart | AnswerRoute] = []
        scopes = []
        call_tasks = {asyncio.create_task(wire.next_call()): wire for wire in wires}
        for each in (call, longer, replace(longer, prefix_scope="key-2")):
            answer_task = asyncio.create_task(parts_of(user, parts, each))
            (task,), _ = await asyncio.wait(call_tasks, return_when=asyncio.FIRST_COMPLETED)
            wire, work = call_tasks.pop(task), task.result()
            call_tasks[asyncio.create_task(wire.next_call())] = wire
            scopes.append(unpack_call(work.body).prefix_scope)
            wire.say(work.call, AnswerBegun(300), AnswerToken(7, "x"))
            wire.say(work.call, AnswerEnded("stop"), is_last=True)
            await answer_task
        routes = [part for part in parts if isinstance(part, AnswerRoute)]
        for task in call_tasks:
            task.cancel()
    assert routes[0].node == routes[1].node
    assert "about 256 of 302 prompt tokens are held there" in routes[1].reason
    assert [route.reason.count("held there") for route in routes] == [0, 1, 0]
    assert scopes[0] == scopes[1] != scopes[2]
    assert "key" not in scopes[0]
