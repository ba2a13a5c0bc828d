"""`hypergpu ledger` over PaymentsService: what a coordinator says, shown and checked."""

# ruff: noqa: N802 - the schema names the methods
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import Result

from hypergpu.ids import Address, JobId
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.v1 import payments_pb2 as pb
from hypergpu.v1 import payments_pb2_grpc
from hypergpu.wire.messages import receipt_message, terms_message
from payments.core.verify import decode_file
from tests.properties.statements import COORDINATOR, Work, node_key, signed_receipt
from tests.unit.cli.conftest import Hypergpu
from tests.unit.cli.fake_service import JOB, FakeService, operator_token, serving

NODE = node_key(1)
LEDGER = Address("0x" + "ab" * 20)
ON_CHAIN = terms_of(COORDINATOR.address, JobId(JOB), Domain(31_337, LEDGER))
NOWHERE = terms_of(COORDINATOR.address, JobId(JOB), Domain())
TOKENS = 10**18


class FakePayments(payments_pb2_grpc.PaymentsServiceServicer):
    """One job's ledger from memory; an order of the operator takes effect at once."""

    def __init__(self) -> None:
        self.terms = NOWHERE
        self.on_chain: pb.LedgerOnChain | None = None
        self.halted = ""

    def GetLedger(
        self, request: pb.GetLedgerRequest, context: grpc.ServicerContext
    ) -> pb.GetLedgerResponse:
        assert request.job_id == JOB
        return pb.GetLedgerResponse(
            terms=terms_message(self.terms, 2),
            unit_price=str(TOKENS),
            escrow=str(1_000 * TOKENS),
            open_epoch=2,
            nodes=[
                pb.LedgerNode(
                    node_id=NODE.node_id,
                    name="attic",
                    receipts=2,
                    samples=640,
                    total_score=5_760_000,
                    worth=str(576 * TOKENS // 100),
                    allotted=str(5 * TOKENS),
                    paid="" if self.on_chain is None else str(TOKENS // 2),
                    shares=[
                        pb.LedgerShare(epoch=0, score=1, state="paid", amount="1"),
                        pb.LedgerShare(epoch=1, score=1, state="recorded", amount="1"),
                    ],
                )
            ],
            transactions=[
                pb.LedgerTransaction(hash=f"0x{at:064x}", purpose=f"pay/{JOB}/{at}", state="sent")
                for at in range(10)
            ],
            on_chain=self.on_chain,
            halted=self.halted,
        )

    def ListReceipts(
        self, request: pb.ListReceiptsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ListReceiptsResponse]:
        for number in range(2):
            receipt = signed_receipt(
                NODE,
                Work(round=number),
                sequence=number,
                before=number * 2_880_000,
                terms=self.terms,
            )
            yield pb.ListReceiptsResponse(node_id=NODE.node_id, receipts=[receipt_message(receipt)])

    def RequestReclaim(
        self, request: pb.RequestReclaimRequest, context: grpc.ServicerContext
    ) -> pb.RequestReclaimResponse:
        assert self.on_chain is not None
        self.on_chain.ends_at_unix_s = 2_000
        return pb.RequestReclaimResponse(purpose=f"request-reclaim/{JOB}")

    def Reclaim(
        self, request: pb.ReclaimRequest, context: grpc.ServicerContext
    ) -> pb.ReclaimResponse:
        assert self.on_chain is not None
        self.on_chain.free_escrow = "0"
        return pb.ReclaimResponse(purpose=f"reclaim/{JOB}")

    def RetryHalted(
        self, request: pb.RetryHaltedRequest, context: grpc.ServicerContext
    ) -> pb.RetryHaltedResponse:
        self.halted = ""
        return pb.RetryHaltedResponse(purposes=[f"batch/{JOB}/3"])


@pytest.fixture
def payments() -> FakePayments:
    return FakePayments()


@pytest.fixture
def ledger(payments: FakePayments, alone: Hypergpu) -> Iterator[Callable[..., Result]]:
    """``hypergpu ledger`` with a token for a coordinator that has payments."""
    with serving(FakeService(), payments) as port:

        def run(*words: str) -> Result:
            return alone("ledger", *words, HYPERGPU_TOKEN=operator_token(port))

        yield run


def open_job() -> pb.LedgerOnChain:
    return pb.LedgerOnChain(
        url="http://127.0.0.1:8545",
        block=77,
        block_time_unix_s=1_000,
        is_open=True,
        free_escrow=str(995 * TOKENS),
        token="0x" + "cd" * 20,
        decimals=18,
    )


def test_show_says_amounts_epochs_and_the_newest_transactions(
    ledger: Callable[..., Result], payments: FakePayments
) -> None:
    payments.terms, payments.on_chain = ON_CHAIN, open_job()
    payments.halted = "REVERTED: the ledger refused it. Fix: correct the cause"
    text = ledger("show").output
    assert "price    1 for 100 samples of full quality; escrow 1,000" in text
    assert f"{LEDGER} on chain 31337: 995 free (block 77 of http://127.0.0.1:8545)" in text
    assert "halted   REVERTED" in text
    (row,) = [line for line in text.splitlines() if line.startswith("attic ")]
    figures = ["2", "640", "5760000", "5.76", "5", "0.5"]
    assert row.split()[1:8] == [NODE.node_id[:10], *figures]
    assert row.endswith("1 paid, 1 recorded")
    assert "2 older transactions: --all" in text
    assert f"pay/{JOB}/0 " not in text
    assert f"pay/{JOB}/0 " in ledger("show", "--all").output


def test_show_without_a_chain_says_so_and_has_json(ledger: Callable[..., Result]) -> None:
    assert "none: receipts are signed for no chain" in ledger("show", JOB[:7]).output
    answer = json.loads(ledger("show", "--json").stdout)
    assert (answer["schema"], answer["job"], answer["on_chain"]) == ("hypergpu/ledger/3", JOB, None)
    assert answer["nodes"][0]["shares"][1]["state"] == "recorded"


def test_exported_receipts_are_whole_and_verified(
    ledger: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / "receipts.jsonl"
    assert "2 receipts" in ledger("export", "--out", str(path)).output
    assert len(decode_file(path.read_bytes(), source="it").receipts) == 2
    result = ledger("verify")
    assert result.exit_code == 0
    assert f"{JOB}: 2 receipts, sound; no chain was asked" in result.output
    assert ledger("export", "--out", str(tmp_path)).exit_code != 0


def test_a_receipt_of_another_coordinator_is_a_fault(
    ledger: Callable[..., Result], payments: FakePayments
) -> None:
    payments.terms = terms_of(NODE.address, JobId(JOB), Domain())
    result = ledger("verify")
    assert result.exit_code != 0
    assert "did not sign it" in result.output
    assert "2 faults" in result.output


def test_reclaim_announces_waits_and_takes(
    ledger: Callable[..., Result], payments: FakePayments
) -> None:
    assert "not open on a ledger" in ledger("reclaim", JOB, "--yes").output
    payments.terms, payments.on_chain = ON_CHAIN, open_job()
    assert "Nobody is there to answer" in ledger("reclaim", JOB).output
    announcement = json.loads(ledger("reclaim", JOB, "--yes", "--json").stdout)
    assert (announcement["purpose"], announcement["ends_at_unix_s"]) == (
        f"request-reclaim/{JOB}",
        2_000,
    )
    assert "ends at 1970-01-01 00:33:20 UTC; 995 is free now" in ledger("reclaim", JOB).output
    payments.on_chain.block_time_unix_s = 2_000
    assert f"995 of {JOB} is paid back" in ledger("reclaim", JOB).output
    assert f"nothing of {JOB} is free" in ledger("reclaim", JOB).output


def test_retry_clears_a_halt_and_names_what_is_tried_again(
    ledger: Callable[..., Result], payments: FakePayments
) -> None:
    payments.halted = "REVERTED: the ledger refused it. Fix: correct the cause"
    assert f"tried again: batch/{JOB}/3" in ledger("retry", JOB).output
    assert payments.halted == ""


def test_a_coordinator_without_payments_is_said_so(hypergpu: Hypergpu) -> None:
    result = hypergpu("ledger", "show")
    assert result.exit_code != 0
    assert "has no payments package, or is older" in result.output
