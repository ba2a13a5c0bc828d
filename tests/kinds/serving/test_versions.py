"""Versions of a training's model among replicas: an answer is never of two of them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    ModelCall,
    ReplicaReady,
    unpack_call,
)
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.models import AnswerRoute
from tests.kinds.serving.wire_replica import READY, WireReplica, replicas
from tests.node_client import NOBODY_LOST
from tests.processes import Cluster

CALL = ModelCall(text="hello", new_tokens_most=3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("versions"), *NOBODY_LOST) as cluster:
        yield cluster


def ready_with(*versions: int, updates: int = 0) -> ReplicaReady:
    return ReplicaReady(
        tokens_most=READY.tokens_most,
        fingerprint=READY.fingerprint,
        device=READY.device,
        versions=versions,
        updates=updates,
    )


class AnswerUnderWay:
    """An answer under way, of which a test sees the parts so far."""

    def __init__(self, user: AsyncCoordinator) -> None:
        self.parts: list[AnswerPart | AnswerRoute] = []
        self.tokens: asyncio.Queue[int] = asyncio.Queue()
        self._user = user
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for part in self._user.answer("small", CALL):
            self.parts.append(part)
            if isinstance(part, AnswerToken):
                self.tokens.put_nowait(part.token)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of the routes so far."""
        return [part.fingerprint for part in self.parts if isinstance(part, AnswerRoute)]


async def next_call(wire: WireReplica) -> tuple[int, ModelCall]:
    """The number of a replica's next call, and the call."""
    message = await wire.next_call()
    return message.call, unpack_call(message.body)


async def test_an_answer_states_the_version_that_it_began_with(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 1, ready=ready_with(3)) as (user, wires):
        (wire,) = wires
        before = AnswerUnderWay(user)
        number, call = await next_call(wire)
        assert call.version == 3
        wire.say(0, ready_with(3, 4, updates=1))
        wire.say(number, AnswerBegun(1), AnswerToken(1, "a"))
        await before.tokens.get()
        after = AnswerUnderWay(user)
        next_number, newer_call = await next_call(wire)
        assert newer_call.version == 4
        for each in (number, next_number):
            wire.say(each, AnswerEnded("stop"), is_last=True)
        await asyncio.gather(before.task, after.task)
        assert before.fingerprints == ["f-cpu-similar-r3"]
        assert after.fingerprints == ["f-cpu-similar-r4"]


async def test_a_lost_answer_goes_on_by_its_own_version_or_not_at_all(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 2, ready=ready_with(3)) as (user, wires):
        answer = AnswerUnderWay(user)
        call_tasks = {asyncio.create_task(next_call(wire)): wire for wire in wires}
        (first_task,), (second_task,) = await asyncio.wait(
            call_tasks, return_when=asyncio.FIRST_COMPLETED
        )
        first, second = call_tasks[first_task], call_tasks[second_task]
        number, _ = first_task.result()
        second.say(0, ready_with(3, 4, updates=1))
        first.say(number, AnswerBegun(1), AnswerToken(1, "a"))
        await answer.tokens.get()
        first.say_bytes(number, b"", is_last=True)
        number, call = await second_task
        assert (call.version, call.tokens_out) == (3, (1,))
        second.say(0, ready_with(4, 5, updates=2))
        second.say(number, AnswerBegun(1), AnswerToken(2, "b"))
        await answer.tokens.get()
        second.say_bytes(number, b"", is_last=True)
        first.say(0, ready_with(5, updates=3))
        with pytest.raises(HyperGPUError, match="began with the model of round 3") as refusal:
            await answer.task
        assert refusal.value.reason is Reason.NOT_READY
