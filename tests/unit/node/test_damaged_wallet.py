"""Damaged files of a job: put aside, named, and what they held is asked for again."""

from pathlib import Path

import msgspec
import pytest
import structlog

from gpu_node.shell.link.earnings import Earnings
from gpu_node.shell.state.kept import VOUCHER_FILE, kept_in
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import Wallet
from hypergpu.ids import JobKey
from hypergpu.ledger.terms import terms_of
from hypergpu.ledger.typed import Domain
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.refusal import RefusalError
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
            SignedVoucher(
                msgspec.structs.replace(voucher(2, 70).voucher, job=JobKey("1" * 64)), bytes(65)
            )
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
    with pytest.raises(RefusalError, match=r"less than 70 for 3 before\. Fix: ask its operator"):
        wallet.take_voucher(JOB, voucher(3, 69))
