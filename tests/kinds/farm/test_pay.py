"""Accepted results become receipts at a real coordinator: once each, whatever is killed when."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace

from hypergpu.farm.bundles import Bundle
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.packed_work import unpack_work
from hypergpu.statements import SignedReceipt, receipt_fault
from hypergpu.units import Wei
from hypergpu.user.client.blocking import wait_for
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.messages import receipt_value, terms_value
from hypergpu.wire.work import work_assignment_value
from hypergpu.work_units import WorkUnit
from payments.core.verify import ReceiptFile, verify
from tests.kinds.farm.wire_bundles import (
    KIND,
    ask,
    contribute,
    create,
    next_bundle,
    report_of,
    result_bytes,
    result_signature,
    return_bundle,
    send_blob,
)
from tests.node_client import NOBODY_LOST, WireNode, reason_of
from tests.processes import Cluster

ITEMS = [f"text {number}" for number in range(40)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("farm-pay"), *NOBODY_LOST) as cluster:
        yield cluster


@asynccontextmanager
async def wire_node(cluster: Cluster) -> AsyncIterator[WireNode]:
    """A node that has joined."""
    coordinator = cluster.coordinator
    node = WireNode(coordinator.address, coordinator.node_address)
    await node.join(coordinator.node_token())
    try:
        yield node
    finally:
        await node.close()


async def next_receipts(
    stream: AsyncIterator[node_pb2.ControlResponse], node: NodeId
) -> list[SignedReceipt]:
    """The next receipts on a control stream."""
    async with asyncio.timeout(60):
        async for message in stream:
            if message.HasField("receipts"):
                return [receipt_value(each, node) for each in message.receipts.receipts]
    raise AssertionError("the stream ended without a receipt")


def stored_receipts(cluster: Cluster, job_id: str) -> list[SignedReceipt]:
    """All receipts of a job, as its coordinator lists them."""

    async def list_receipts() -> list[SignedReceipt]:
        calls = client.asynchronous
        return [each async for each in calls.receipts(job_id)]

    with cluster.client() as client:
        return wait_for(list_receipts())


async def test_a_result_becomes_a_receipt_in_the_unit_of_the_job(cluster: Cluster) -> None:
    changes = {"unit": WorkUnit.TOKENS, "units_per_item_most": 100}
    job_id = create(cluster, ITEMS, **changes)
    async with wire_node(cluster) as node:
        stream = node.control([(KIND, 1)])
        work, bundle = await next_bundle(stream)
        terms = work_assignment_value(work).terms
        assert terms is not None
        assert terms.unit is WorkUnit.TOKENS
        content = result_bytes(bundle, ITEMS)
        report = report_of(bundle, content, units=777)
        await send_blob(node, work, content)
        await contribute(node, work, report, result_signature(node, work, report))
        (receipt,) = await next_receipts(stream, node.node_id)
        assert receipt.receipt.samples == 777
        assert receipt.receipt.total_score == 7_770_000
        assert receipt_fault(receipt, terms.domain, terms.coordinator) == ""
        summary = ask(cluster, "GetJob", job_pb2.GetJobRequest(job_id=job_id)).job.bundles
        assert (summary.paid_units, summary.unit, summary.cost) == (777, "tokens", "0")
        await check_ledger(cluster, job_id, terms, {node.node_id: 777})
    ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))


async def check_ledger(
    cluster: Cluster, job_id: str, terms: Terms, units: dict[NodeId, int]
) -> None:
    """Check receipts of a job: sound, and so many units of each node."""
    receipts = stored_receipts(cluster, job_id)
    with cluster.client() as client:
        ledger = client.ledger(job_id)
    assert (ledger.unit, ledger.terms) == (terms.unit.value, terms)
    assert {NodeId(each.node_id): each.samples for each in ledger.nodes} == units
    file = ReceiptFile(JobId(ledger.job), terms, Wei(int(ledger.unit_price)), tuple(receipts))
    assert verify(file).faults == ()


async def test_a_signature_over_anything_else_is_refused_and_none_gives_no_receipt(
    cluster: Cluster,
) -> None:
    job_id = create(cluster, ITEMS)
    async with wire_node(cluster) as node, wire_node(cluster) as other:
        work, bundle = await next_bundle(node.control([(KIND, 1)]))
        content = result_bytes(bundle, ITEMS)
        report = report_of(bundle, content)
        await send_blob(node, work, content)
        signature = result_signature(node, work, report)
        longer = result_signature(node, work, replace(report, compute_ms=5))
        for wrong in (b"x", longer, result_signature(other, work, report), signature[:-1]):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await contribute(node, work, report, wrong)
            assert reason_of(refusal.value) == "SIGNATURE_INVALID"
        # A node of the version before signs nothing: its work counts, and has no receipt.
        await contribute(node, work, report)
        assert unpack_work(work_assignment_value(work).work, KIND, type(bundle)) == bundle
        summary = ask(cluster, "GetJob", job_pb2.GetJobRequest(job_id=job_id)).job.bundles
        assert summary.units == bundle.items
        assert stored_receipts(cluster, job_id) == []
    ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))


@pytest.mark.parametrize("failpoint", ["contribution.accepted:1", "persist.written:4", ""])
async def test_a_kill_between_acceptance_and_receipt_pays_each_result_once(
    failpoint: str, tmp_path: Path
) -> None:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        async with wire_node(cluster) as node:
            job_id = create(cluster, ITEMS)
            coordinator.kill()
            coordinator.start(failpoints=failpoint)
            stream = node.control([(KIND, 1)])
            work, bundle = await next_bundle(stream)
            terms = terms_value(work.terms)
            try:
                await return_bundle(node, work, bundle, ITEMS)
            except grpc.aio.AioRpcError:
                assert failpoint
            coordinator.kill()
            coordinator.start()
            await return_unless_accepted(node, work, bundle.items)
            stream = node.control([(KIND, 1)], [work.lease])
            receipts = await next_receipts(stream, node.node_id)
            assert [each.receipt.samples for each in receipts] == [bundle.items]
            coordinator.kill()
            coordinator.start()
            await check_ledger(cluster, job_id, terms, {node.node_id: bundle.items})


async def return_unless_accepted(node: WireNode, work: node_pb2.WorkAssignment, items: int) -> None:
    """Send a result again, as a node does that had no answer."""
    bundle = unpack_work(work_assignment_value(work).work, KIND, Bundle)
    assert bundle.items == items
    content = result_bytes(bundle, ITEMS)
    report = report_of(bundle, content)
    signature = result_signature(node, work, report)
    try:
        await contribute(node, work, report, signature)
    except grpc.aio.AioRpcError as refusal:
        if reason_of(refusal) != "OFFSET_MISMATCH":
            raise
        await return_bundle(node, work, bundle, ITEMS)


async def test_a_new_job_has_its_ledger_at_once(cluster: Cluster) -> None:
    for _ in range(3):  # Receipts follow the journal some tenths of a second later.
        job_id = create(cluster, ITEMS, unit=WorkUnit.TOKENS, units_per_item_most=100)
        with cluster.client() as client:
            assert client.ledger(job_id).unit == "tokens"
        assert stored_receipts(cluster, job_id) == []
        ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))
