"""From an answer to a receipt by the wire: what is counted, signed and paid, also after kills."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    ModelCall,
    unpack_call,
)
from hypergpu.statements import SignedReceipt
from hypergpu.units import Wei
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.models import AnswerRoute
from hypergpu.wire.messages import receipt_value, terms_value
from payments.core.verify import ReceiptFile, verify
from tests.kinds.serving.wire_replica import WireReplica, first_model, replicas, stop_and_wait
from tests.node_client import NOBODY_LOST, reason_of
from tests.polling import first_true_of
from tests.processes import Cluster

CALL = ModelCall(tokens=(1,) * 10, new_tokens_most=3)
ANSWER: list[AnswerPart] = [AnswerBegun(10), *(AnswerToken(token) for token in (5, 6, 7))]
UNITS = 3 + 3
"""Ten tokens of a prompt are three units."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("token-pay"), *NOBODY_LOST) as cluster:
        yield cluster


async def answer_parts(user: AsyncCoordinator) -> list[AnswerPart | AnswerRoute]:
    """All parts of an answer."""
    return [part async for part in user.answer("small", CALL)]


async def answer_once(user: AsyncCoordinator, wire: WireReplica, parts: list[AnswerPart]) -> int:
    """Have one call answered by a replica; gives the number of tokens that came."""
    task = asyncio.create_task(answer_parts(user))
    call = await wire.next_call()
    seed = unpack_call(call.body).sampling.seed
    assert seed >= 0
    wire.say(call.call, *parts, AnswerEnded("length"), is_last=True)
    return sum(isinstance(part, AnswerToken) for part in await task)


async def signed_receipts(user: AsyncCoordinator, job: str, count: int) -> None:
    """Wait until a job has so many receipts, and check them as `ledger verify` does."""

    async def enough_receipts() -> list[SignedReceipt]:
        receipts = [each async for each in user.receipts(job)]
        return receipts if len(receipts) >= count else []

    receipts = await first_true_of(enough_receipts)
    ledger = await user.ledger(job)
    assert isinstance(ledger.terms, Terms)
    assert ledger.unit == "tokens"
    file = ReceiptFile(JobId(job), ledger.terms, Wei(int(ledger.unit_price)), tuple(receipts))
    assert verify(file).faults == ()


async def test_an_answer_becomes_a_receipt_once_the_model_is_stopped_and_the_node_has_signed(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 1) as (user, (wire,)):
        assert await answer_once(user, wire, ANSWER) == 3
        (model,) = await user.models()
        assert (model.paid_units, model.due_units) == (0, 0)
        await user.stop(model.job)
        count = await wire.next_count()
        assert (count.units, count.number) == (UNITS, 1)
        assert terms_value(count.terms).unit.value == "tokens"
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await wire.sign(count, signature=bytes(65))
        assert reason_of(refusal.value) == "SIGNATURE_INVALID"
        await wire.sign(count)
        await wire.sign(count)
        receipt = await wire.next_receipt()
        value = receipt_value(receipt, NodeId(wire.node_id)).receipt
        assert (value.samples, value.round, value.total_score) == (UNITS, 1, UNITS * 10_000)
        await signed_receipts(user, model.job, 1)


async def test_a_replica_cannot_inflate_what_it_read_or_say_it_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 1) as (user, (wire,)):
        assert await answer_once(user, wire, [AnswerBegun(10), AnswerBegun(10), *ANSWER]) == 3
        task = asyncio.create_task(answer_parts(user))
        call = await wire.next_call()
        wire.say(call.call, AnswerBegun(11), AnswerToken(1))
        await first_model(user, lambda model: model.waiting_calls)
        task.cancel()
        (model,) = await user.models()
        await user.stop(model.job)
        count = await wire.next_count()
        assert count.units == UNITS
        await wire.sign(count)


@pytest.mark.parametrize(
    ("failpoint", "is_lost"),
    [
        ("window.counted:1", True),
        ("persist.written:1", False),
        ("act.command:1", False),
        ("contribution.accepted:1", False),
        ("", False),
    ],
)
async def test_a_kill_between_a_window_s_end_and_its_receipt_pays_it_once_or_loses_it_unjournalled(
    failpoint: str, *, is_lost: bool, tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster", *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        async with replicas(cluster, tmp_path, 1, stops=False) as (user, (wire,)):
            job = (await user.models())[0].job
            # Whatever begins before is journalled: the armed point is passed by the count alone.
            coordinator.kill()
            coordinator.start(failpoints=failpoint)
            wire.dial()
            wire.say(0, wire.ready)
            await first_model(user, lambda model: model.ready_replicas)
            await answer_once(user, wire, ANSWER)
            wire.say(0, wire.ready)  # Its worker started anew, so that the window is over.
            try:
                await wire.sign(await wire.next_count())
            except (grpc.aio.AioRpcError, AssertionError):
                assert failpoint
            coordinator.kill()
            coordinator.start()
            wire.dial()
            wire.say(0, wire.ready)
            await first_model(user, lambda model: model.ready_replicas)
            if not is_lost:
                if not (await user.models())[0].paid_units:
                    await wire.sign(await wire.next_count())
                await signed_receipts(user, job, 1)
            (model,) = await user.models()
            assert model.paid_units == (0 if is_lost else UNITS)
            assert model.due_units == 0


async def test_a_node_that_signs_no_counts_answers_without_receipts(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 1, stops=False, signs_counts=False) as (user, (wire,)):
        assert await answer_once(user, wire, ANSWER) == 3
        (model,) = await user.models()
        await stop_and_wait(user, model.job)
        assert [each async for each in user.receipts(model.job)] == []


async def test_a_model_with_a_price_needs_a_ledger_and_says_so(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(HyperGPUError, match="pays"):
        async with replicas(cluster, tmp_path, 1, unit_price=Wei(10), budget=Wei(100)):
            pass
