"""Damaged files of a job: put aside, named, and what they held is asked for again."""

from pathlib import Path

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from gpu_node.shell.link.earnings import Earnings
from gpu_node.shell.state.kept import RECEIPTS_FILE, TERMS_FILE, VOUCHER_FILE, kept_in
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import Wallet
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobKey
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import Terms, terms_of
from hypergpu.ledger.typed import Domain
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.v1 import receipt_pb2
from hypergpu.wire.ledger import receipt_message, terms_message, voucher_message
from tests.unit.node.test_wallet import (
    ELSEWHERE,
    JOB,
    NODE,
    STRANGER,
    TERMS,
    places,
    receipt,
    voucher,
    wallet,
)

__all__ = ["places", "wallet"]


def folder_of(places: Places) -> Path:
    return places.ledger_of(JOB, TERMS.coordinator)


def held_voucher(places: Places) -> SignedVoucher | None:
    kept = kept_in(folder_of(places), NODE.node_id)
    assert kept is not None
    return kept.voucher


def raised(path: Path) -> bytes:
    """Put a 9 before the amount in a file, and return what is in it then."""
    path.write_bytes(path.read_bytes().replace(b'"amount":', b'"amount":9', 1))
    return path.read_bytes()


def test_a_voucher_that_was_altered_is_put_aside_and_the_true_ones_are_taken(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take_voucher(JOB, voucher(2, 70))
    altered = raised(folder_of(places) / VOUCHER_FILE)
    with structlog.testing.capture_logs() as said:
        again = Wallet(places, NODE.node_id)
    aside = folder_of(places) / "voucher.damaged-1.json"
    assert aside.read_bytes() == altered
    assert held_voucher(places) is None
    (told,) = said
    assert (told["file"], told["put_aside"]) == (str(folder_of(places) / VOUCHER_FILE), str(aside))
    assert "did not sign it" in told["reason"]
    assert "it is asked for the voucher" in told["fix"]
    again.take_voucher(JOB, voucher(2, 70))
    assert held_voucher(places) == voucher(2, 70)


def test_each_damaged_voucher_is_kept(places: Places, wallet: Wallet) -> None:
    for number in (1, 2, 3):
        wallet.take_voucher(JOB, voucher(number, number))
        raised(folder_of(places) / VOUCHER_FILE)
        wallet = Wallet(places, NODE.node_id)
    names = sorted(path.name for path in folder_of(places).glob("voucher.*"))
    assert names == [f"voucher.damaged-{number}.json" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"voucher":{"job":"\xff"}}',
        msgspec.json.encode(voucher(2, 70, STRANGER)),
        msgspec.json.encode(voucher(2, 70, terms=ELSEWHERE)),
        msgspec.json.encode(
            SignedVoucher(replace(voucher(2, 70).voucher, job=JobKey("1" * 64)), bytes(65))
        ),
        msgspec.json.encode(voucher(2, 70)).replace(b":70", b":-70"),
        msgspec.json.encode(voucher(2, 70)).replace(b":70", b":7" + 60 * b"0"),
    ],
)
def test_what_is_no_voucher_of_this_job_is_none(
    places: Places, wallet: Wallet, content: bytes
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    (folder_of(places) / VOUCHER_FILE).write_bytes(content)
    again = Wallet(places, NODE.node_id)
    assert not (folder_of(places) / VOUCHER_FILE).exists()
    (standing,) = again.held()
    assert (standing.receipts, standing.lacks_voucher) == (2, True)


def test_another_nodes_voucher_is_none(places: Places, wallet: Wallet) -> None:
    wallet.take_voucher(JOB, voucher(2, 70))
    Wallet(places, STRANGER.node_id)
    assert not (folder_of(places) / VOUCHER_FILE).exists()


def counts_said(places: Places) -> list[int]:
    """How many receipts a hello says are held."""
    return [held.count for held in Earnings(places, NODE.node_id).held()]


def test_a_voucher_that_was_put_aside_is_asked_for_with_the_last_receipt(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take_voucher(JOB, voucher(2, 70))
    assert counts_said(places) == [2]
    raised(folder_of(places) / VOUCHER_FILE)
    assert counts_said(places) == counts_said(places) == [1]
    again = Wallet(places, NODE.node_id)
    again.take(JOB, [receipt(1)])
    (standing,) = again.held()
    assert (standing.receipts, standing.lacks_voucher) == (2, False)
    again.take_voucher(JOB, voucher(2, 70))
    assert counts_said(places) == [2]


def test_a_job_without_a_chain_that_never_had_a_voucher_is_not_asked_for_one(
    places: Places,
) -> None:
    unpaid = terms_of(TERMS.coordinator, JOB, Domain())
    wallet = Wallet(places, NODE.node_id)
    wallet.agree(JOB, unpaid)
    wallet.take(JOB, [receipt(0, terms=unpaid)])
    assert counts_said(places) == [1]


def test_a_voucher_that_is_refused_says_what_mends_it(wallet: Wallet) -> None:
    wallet.take_voucher(JOB, voucher(3, 70))
    with pytest.raises(HyperGPUError, match=r"less than 70 for 3 before\. Fix: ask its operator"):
        wallet.take_voucher(JOB, voucher(3, 69))


def test_terms_that_were_lost_are_taken_again_by_work_that_this_node_signed_for_them(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take_voucher(JOB, voucher(2, 70))
    path = folder_of(places) / TERMS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    again = Wallet(places, NODE.node_id)
    assert again.held() == ()
    again.agree_again(JOB, TERMS, receipt(0))
    assert [held.receipts for held in again.held()] == [2]
    assert held_voucher(places) == voucher(2, 70)
    assert path.with_name("terms.damaged-1.json").exists()


@pytest.mark.parametrize(
    ("terms", "shown"),
    [
        (ELSEWHERE, receipt(0)),
        (TERMS, receipt(0, terms=ELSEWHERE)),
        (TERMS, receipt(0, signer=STRANGER)),
        (TERMS, receipt(0, node=STRANGER)),
        (replace(TERMS, job=JobKey("1" * 64)), receipt(0)),
    ],
)
def test_terms_that_no_signature_of_this_node_proves_are_not_taken(
    places: Places, terms: Terms, shown: SignedReceipt
) -> None:
    wallet = Wallet(places, NODE.node_id)
    with pytest.raises(HyperGPUError, match="are not taken up again: "):
        wallet.agree_again(JOB, terms, shown)
    assert wallet.held() == ()
    assert not places.ledger.exists()


def test_terms_that_are_known_are_not_replaced_by_proven_ones(
    places: Places, wallet: Wallet
) -> None:
    wallet.agree_again(JOB, ELSEWHERE, receipt(0, terms=ELSEWHERE))
    kept = kept_in(folder_of(places), NODE.node_id)
    assert kept is not None
    assert kept.terms == TERMS


def test_terms_are_not_replaced_by_others_than_the_receipts_that_lie_there_were_made_for(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    (folder_of(places) / TERMS_FILE).unlink()
    again = Wallet(places, NODE.node_id)
    with pytest.raises(HyperGPUError, match="were made for other terms than these"):
        again.agree_again(JOB, ELSEWHERE, receipt(0, terms=ELSEWHERE))
    with pytest.raises(HyperGPUError, match="were made for other terms than these"):
        again.agree(JOB, ELSEWHERE)
    assert "were made for other terms" in again.changed_terms(JOB, ELSEWHERE)
    assert again.changed_terms(JOB, TERMS) == ""
    again.agree(JOB, TERMS)
    assert [held.receipts for held in again.held()] == [2]


def test_terms_that_no_receipt_was_made_for_rest_until_the_true_ones_come(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take_voucher(JOB, voucher(2, 70))
    path = folder_of(places) / TERMS_FILE
    path.write_bytes(path.read_bytes().replace(b":31337", b":1"))
    again = Wallet(places, NODE.node_id)
    assert again.held() == ()
    assert again.changed_terms(JOB, TERMS) == ""
    again.agree_again(JOB, TERMS, receipt(0))
    assert [held.receipts for held in again.held()] == [2]
    assert held_voucher(places) == voucher(2, 70)


def test_a_damaged_receipt_does_not_keep_terms_from_being_taken_again(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    (folder_of(places) / TERMS_FILE).unlink()
    path = folder_of(places) / RECEIPTS_FILE
    path.write_bytes(path.read_bytes().replace(b'"quality_bps":9000', b'"quality_bps":9999', 1))
    again = Wallet(places, NODE.node_id)
    again.agree_again(JOB, TERMS, receipt(0))
    assert [held.receipts for held in again.held()] == [2]


async def test_receipts_of_a_job_that_was_lost_bring_its_terms_and_its_voucher(
    places: Places,
) -> None:
    message = receipt_pb2.Receipts(
        job_id=JOB,
        receipts=[receipt_message(receipt(0))],
        voucher=voucher_message(voucher(1, 70)),
    )
    earnings = Earnings(places, NODE.node_id)
    await earnings.receipts(message)
    assert list(earnings.held()) == []
    message.terms.CopyFrom(terms_message(TERMS, epoch=0))
    await earnings.receipts(message)
    assert [held.count for held in earnings.held()] == [1]
    assert held_voucher(places) == voucher(1, 70)
