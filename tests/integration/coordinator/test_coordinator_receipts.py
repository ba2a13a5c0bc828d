"""What a node gets for its work: vouchers with the acknowledgement, receipts on the control stream,
and both again whatever dies in between.
"""

from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from hypergpu.cli.ledger.account import ledger_view
from hypergpu.cli.ledger.verifying import received, verified
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import CodecChoice, JobSpec, Pay, TrainingSettings
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import sign
from hypergpu.ledger.voucher import no_voucher, voucher_fault
from hypergpu.v1 import node_pb2, receipt_pb2
from hypergpu.wire.ledger import receipt_value, terms_value, voucher_value
from tests.node_client import NOBODY_LOST, WireNode, assigned, contribution, reason_of
from tests.processes import Cluster

PARAMETERS = 4096
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=9, inner_steps=2, batch_size=50, nodes=1),
    codec=CodecChoice("fp32", "fp32"),
    pay=Pay(unit_price=1_000, rounds_per_epoch=2),
)
"""A round costs 1,000 at most, of which 100 are guaranteed."""
UPDATE = np.full(PARAMETERS, 0.25, np.float32).tobytes()
Stream = AsyncIterator[node_pb2.ControlResponse]


class Earner:
    """A node at work on a job that pays."""

    def __init__(self, cluster: Cluster, node: WireNode, stream: Stream) -> None:
        self.cluster = cluster
        self.node = node
        self.stream = stream
        self.assignment = node_pb2.Assignment()
        self.job_id = ""

    @property
    def terms(self) -> Terms:
        return terms_value(self.assignment.terms)

    async def take_work(self) -> None:
        self.assignment = await assigned(self.stream)
        self.job_id = self.assignment.lease.job_id

    async def submit(self) -> node_pb2.SubmitUpdateResponse:
        return await self.node.submit(self.node.header(self.assignment, UPDATE), UPDATE)

    async def receipts(self) -> receipt_pb2.Receipts:
        """The next receipts on the control stream; work that comes meanwhile is taken."""
        async for message in self.stream:
            if message.HasField("assignment"):
                self.assignment = message.assignment
            if message.HasField("receipts"):
                return message.receipts
        raise AssertionError("the stream ended without a receipt")

    def dial_again(self, held: int) -> None:
        """Say hello as one who holds so many receipts."""
        self.node.held = [receipt_pb2.ReceiptsHeld(job_id=self.job_id, count=held)] if held else []
        self.stream = self.node.control([("null", 1)])

    def sound(self, receipt: receipt_pb2.Receipt) -> SignedReceipt:
        """A receipt that anybody can check with the terms alone."""
        signed = receipt_value(receipt, self.node.node_id)
        terms = self.terms
        signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
        assert ReceiptCheck(signers).fault(signed) == ""
        return signed

    def worth(self, message: receipt_pb2.Voucher) -> tuple[int, int]:
        """Receipts and amount of a voucher that is sound."""
        signed, terms = voucher_value(message, self.node.node_id), self.terms
        fault = voucher_fault(
            signed,
            separator=terms.domain.separator(),
            coordinator=terms.coordinator,
            held=no_voucher(terms.job, self.node.node_id),
        )
        assert fault == ""
        return signed.voucher.sequence, signed.voucher.amount


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("receipts"), *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture
async def earner(cluster: Cluster) -> AsyncIterator[Earner]:
    node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await node.join(cluster.coordinator.node_token())
    earner = Earner(cluster, node, node.control([("null", 1)]))
    job_id = cluster.submit(SPEC)
    await earner.take_work()
    yield earner
    await node.close()
    with cluster.coordinator.client() as client:
        client.stop(job_id)


async def test_an_assignment_names_all_that_is_signed(earner: Earner) -> None:
    assert earner.terms.is_of(JobId(earner.job_id))
    assert earner.terms.domain.chain_id == 0
    assert earner.assignment.terms.epoch == 0


async def test_an_accepted_update_is_answered_with_a_voucher_for_its_guaranteed_part(
    earner: Earner,
) -> None:
    answer = await earner.submit()
    assert answer.is_accepted
    assert earner.worth(answer.voucher) == (0, 100)


async def test_a_folded_round_brings_its_receipt_and_a_voucher_for_it(earner: Earner) -> None:
    await earner.submit()
    message = await earner.receipts()
    (receipt,) = message.receipts
    signed = earner.sound(receipt)
    assert (signed.receipt.sequence, signed.receipt.epoch, signed.receipt.round) == (0, 0, 0)
    assert signed.receipt.samples == 100
    receipts, amount = earner.worth(message.voucher)
    assert receipts == 1
    assert 100 <= amount <= 1_000


async def test_receipts_are_sent_again_to_who_lacks_them_and_to_nobody_else(
    earner: Earner,
) -> None:
    sent = []
    for _ in range(2):
        await earner.submit()
        (receipt,) = (await earner.receipts()).receipts
        sent.append(receipt)
    earner.dial_again(held=0)
    assert list((await earner.receipts()).receipts) == sent
    earner.dial_again(held=1)
    assert list((await earner.receipts()).receipts) == sent[1:]
    earner.dial_again(held=2)
    await earner.take_work()
    await earner.submit()
    (third,) = (await earner.receipts()).receipts
    assert third.sequence == 2


async def test_a_killed_coordinator_sends_the_very_same_receipts(earner: Earner) -> None:
    await earner.submit()
    before = await earner.receipts()
    earner.cluster.coordinator.kill()
    earner.cluster.coordinator.start()
    await earner.node.channel.channel_ready()
    earner.dial_again(held=0)
    again = await earner.receipts()
    assert list(again.receipts) == list(before.receipts)
    assert earner.worth(again.voucher) == earner.worth(before.voucher)


async def test_whoever_has_the_receipts_can_check_what_the_coordinator_says_that_it_owes(
    earner: Earner,
) -> None:
    for _ in range(3):
        await earner.submit()
        await earner.receipts()
    with earner.cluster.coordinator.client() as client:
        view = ledger_view(earner.job_id, client.ledger(earner.job_id))
        receipts = received(client.receipts(earner.job_id))
    found = verified(view, earner.terms, receipts)
    assert found.faults == []
    assert (found.receipts, found.nodes) == (3, 1)
    assert view.nodes[0].contributions == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 101),
        ("inner_steps", 3),
        ("epoch", 1),
        ("compute_ms", 5),
        ("update_bytes", 1),
        ("job", "0" * 64),
        ("shard", "0" * 64),
        ("model", "0" * 64),
        ("node", "0x" + "a1" * 20),
    ],
)
async def test_an_update_signed_as_other_work_is_refused_before_a_byte_is_stored(
    earner: Earner, field: str, value: int | str
) -> None:
    header = earner.node.header(earner.assignment, UPDATE)
    made = contribution(earner.node.key, earner.assignment, UPDATE, header.nonce)
    altered = replace(made, **{field: value})
    header.signature = sign(earner.node.key, earner.terms.domain.separator(), altered)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await earner.node.submit(header, UPDATE)
    assert reason_of(refused.value) == "SIGNATURE_INVALID"
    held = await earner.node.query(header)
    assert held.committed_offset == 0


async def test_an_unsigned_update_is_refused(earner: Earner) -> None:
    header = earner.node.header(earner.assignment, UPDATE)
    header.ClearField("signature")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await earner.node.submit(header, UPDATE)
    assert reason_of(refused.value) == "SIGNATURE_INVALID"
