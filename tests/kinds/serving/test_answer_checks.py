"""Secret checks by the wire: who is given what, and what becomes of the window."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import (
    MARGIN_MOST,
    AnswerBegun,
    AnswerClaim,
    AnswerEnded,
    AnswerToken,
    CheckFigures,
    CheckResult,
    ModelCall,
    ReplicaReady,
    unpack_call,
)
from hypergpu.user.client import AsyncCoordinator
from tests.kinds.serving.wire_replica import WireReplica, replicas, stop_and_wait
from tests.node_client import NOBODY_LOST
from tests.processes import Cluster

TOKENS = 40
PROMPT = (1,) * 8
CALL = ModelCall(tokens=PROMPT, new_tokens_most=TOKENS)
UNITS = TOKENS + 2
READY = ReplicaReady(tokens_most=64, fingerprint="f", device="cpu", takes_checks=True)
ANSWERS_MOST = 40
"""Half of a new node's answers are checked."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("checks"), *NOBODY_LOST) as cluster:
        yield cluster


class ScriptedReplicas:
    """Replicas that answer whatever comes, and score answers as a test says."""

    def __init__(self, user: AsyncCoordinator, wires: list[WireReplica]) -> None:
        self.user = user
        self.wires = wires
        self.liar_margin = 0
        """Margin of a token of the node that answers first, whoever scores it; of others 0."""
        self.liar = ""
        """The node that answered first: calls go where the pace is known."""
        self.checks: list[tuple[str, str]] = []
        """Who answered, and who scored."""
        self.counts: dict[str, int] = {}
        """Units that were signed, by node."""
        self._answered_by: dict[int, str] = {}

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """All of them work as long as the block lasts, which ends with what fails in them."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._work(wire)) for wire in self.wires]
            for wire in self.wires:
                wire.say(0, READY)
            yield
            for task in tasks:
                task.cancel()

    async def _work(self, wire: WireReplica) -> None:
        while True:
            message = await wire.next_work()
            if message.HasField("work_count"):
                count = message.work_count
                self.counts[wire.node_id] = self.counts.get(wire.node_id, 0) + count.units
                await wire.sign(count)
            elif not message.work_call.is_cancelled:
                self._answer(wire, message.work_call.call, unpack_call(message.work_call.body))

    def _answer(self, wire: WireReplica, number: int, call: ModelCall) -> None:
        if call.claim is None:
            self._answered_by[call.sampling.seed] = wire.node_id
            self.liar = self.liar or wire.node_id
            tokens = [AnswerToken(7) for _ in range(TOKENS - len(call.tokens_out))]
            wire.say(number, AnswerBegun(len(PROMPT)), *tokens)
            wire.say(number, AnswerEnded("length"), is_last=True)
            return
        assert set(call.tokens_out) == {7}
        assert call.tokens == PROMPT
        pair = self._answered_by[call.sampling.seed], wire.node_id
        assert pair[0] != pair[1]
        self.checks.append(pair)
        count = len(call.tokens_out) - call.claim.first
        margin = count * self.liar_margin if pair[0] == self.liar else 0
        figures = CheckFigures(count, margin, len(PROMPT))
        wire.say(number, CheckResult(figures), is_last=True)

    async def ask(self) -> None:
        """Have one call answered."""
        parts = [part async for part in self.user.answer("small", CALL)]
        assert sum(isinstance(part, AnswerToken) for part in parts) == TOKENS

    async def ask_until_one_is_banned(self) -> None:
        """Have calls answered until a replica is there no more."""
        for _ in range(ANSWERS_MOST):
            await self.ask()
            if (await self.user.models())[0].ready_replicas < len(self.wires):
                return


async def test_a_liar_that_two_nodes_find_is_banned_and_loses_its_open_window(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 3) as (user, wires):
        script = ScriptedReplicas(user, wires)
        script.liar_margin = MARGIN_MOST
        async with script.at_work():
            await script.ask_until_one_is_banned()
            liar = script.liar
            checkers = {checker for node, checker in script.checks if node == liar}
            assert checkers == {wire.node_id for wire in wires} - {liar}
            model = (await user.models())[0]
            assert model.ready_replicas == 2
            await stop_and_wait(user, model.job)
            assert liar not in script.counts
            assert all(units % UNITS == 0 for units in script.counts.values())


async def test_without_another_owner_s_replica_nothing_is_checked_and_all_is_paid(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 1) as (user, wires):
        script = ScriptedReplicas(user, wires)
        async with script.at_work():
            for _ in range(4):
                await script.ask()
            model = (await user.models())[0]
            await stop_and_wait(user, model.job)
            assert script.checks == []
            assert script.counts == {wires[0].node_id: 4 * UNITS}


async def test_a_user_cannot_have_an_answer_scored(cluster: Cluster, tmp_path: Path) -> None:
    async with replicas(cluster, tmp_path, 1) as (user, _):
        call = ModelCall(text="a", tokens_out=(1,), claim=AnswerClaim(0))
        with pytest.raises(HyperGPUError, match="no claim"):
            await anext(aiter(user.answer("small", call)))
