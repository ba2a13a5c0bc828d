"""From an answer of a ring to receipts in layer-tokens, by the wire."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypergpu.ids import JobId
from hypergpu.ledger_terms import Terms, terms_of
from hypergpu.serving.stage_messages import AnswerOpened
from hypergpu.statements import SignedReceipt
from hypergpu.units import Wei
from hypergpu.user.client import AsyncCoordinator
from hypergpu.wire.messages import terms_value
from hypergpu.work_units import WorkUnit
from payments.core.verify import ReceiptFile, verify
from tests.kinds.serving.test_wire_ring import wire_ring
from tests.node_client import NOBODY_LOST
from tests.polling import first_true_of
from tests.processes import Cluster

UNITS = 1
"""Two tokens that were read and one that was written are one unit of a stage of one layer."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("ring-pay"), *NOBODY_LOST) as cluster:
        yield cluster


async def receipt_file(user: AsyncCoordinator, job: str, count: int) -> ReceiptFile:
    """What `ledger export` writes of a job, once it has so many receipts."""

    async def enough_receipts() -> list[SignedReceipt]:
        receipts = [each async for each in user.receipts(job)]
        return receipts if len(receipts) >= count else []

    receipts = await first_true_of(enough_receipts)
    ledger = await user.ledger(job)
    assert isinstance(ledger.terms, Terms)
    return ReceiptFile(JobId(job), ledger.terms, Wei(int(ledger.unit_price)), tuple(receipts))


async def test_stages_sign_layer_tokens_and_their_receipts_verify_in_no_other_unit(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with wire_ring(cluster, tmp_path, signs_counts=True, unit=WorkUnit.LAYER_TOKENS) as ring:
        answer_task = asyncio.create_task(ring.answer())
        await ring.last.reply(AnswerOpened((5, 6)))
        await ring.end_well()
        assert await answer_task == [9]
        (model,) = await ring.user.models()
        assert model.unit == "layer-tokens"
        await ring.user.stop(ring.job)
        for stage in (ring.first, ring.last):
            count = await stage.next_count()
            assert (count.units, terms_value(count.terms).unit) == (UNITS, WorkUnit.LAYER_TOKENS)
            await stage.sign(count)
        file = await receipt_file(ring.user, ring.job, 2)
        assert verify(file).faults == ()
        assert {each.receipt.samples for each in file.receipts} == {UNITS}
        assert {each.receipt.node for each in file.receipts} == {
            ring.first.node_id,
            ring.last.node_id,
        }
        tokens_terms = terms_of(
            file.terms.coordinator, file.job_id, file.terms.domain, WorkUnit.TOKENS
        )
        assert verify(replace(file, terms=tokens_terms)).faults


async def test_a_ring_of_before_goes_on_in_tokens(cluster: Cluster, tmp_path: Path) -> None:
    async with wire_ring(cluster, tmp_path, signs_counts=True) as ring:
        (model,) = [each for each in await ring.user.models() if each.job == ring.job]
        assert model.unit == "tokens"
