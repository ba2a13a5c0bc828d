"""What a node keeps of what the coordinator signs: only what is sound, and all of it."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import CONFLICT_FILE, RECEIPTS_FILE, Wallet, kept_in
from hypergpu.digest import digest_of
from hypergpu.ids import Address, JobId, JobKey, Keccak
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import Terms, terms_of
from hypergpu.ledger.typed import (
    Contribution,
    Domain,
    Receipt,
    Voucher,
    keccak_of,
    sign,
    struct_hash,
)
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.refusal import RefusalError
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples, Wei

JOB = JobId("job-000000000001")
NODE = IdentityKey(bytes(31) + b"\x01")
COORDINATOR = IdentityKey(bytes(31) + b"\x02")
STRANGER = IdentityKey(bytes(31) + b"\x03")
TERMS = terms_of(Address(COORDINATOR.node_id), JOB, Domain(31337, Address("0x" + "c0" * 20)))
SEPARATOR = TERMS.domain.separator()


def receipt(
    sequence: int, *, signer: IdentityKey = COORDINATOR, node: IdentityKey = NODE
) -> SignedReceipt:
    made = Contribution(
        job=TERMS.job,
        epoch=0,
        round=sequence,
        node=node.node_id,
        shard=digest_of(b"shard"),
        model=digest_of(b"model"),
        update=digest_of(b"update"),
        samples=Samples(100),
        inner_steps=2,
        compute_ms=Milliseconds(5),
        update_bytes=Bytes(400),
        lease=sequence + 1,
        nonce=sequence + 1,
    )
    said = Receipt(
        job=TERMS.job,
        epoch=0,
        round=sequence,
        node=node.node_id,
        sequence=sequence,
        contribution=Keccak(struct_hash(made).hex()),
        samples=Samples(100),
        quality_bps=BasisPoints(9_000),
        evaluator=keccak_of("quality/1 agreement"),
    )
    return SignedReceipt(
        receipt=said,
        signature=sign(signer, SEPARATOR, said),
        contribution=made,
        contribution_signature=sign(node, SEPARATOR, made),
    )


def voucher(sequence: int, amount: int, signer: IdentityKey = COORDINATOR) -> SignedVoucher:
    said = Voucher(job=TERMS.job, node=NODE.node_id, sequence=sequence, amount=Wei(amount))
    return SignedVoucher(said, sign(signer, SEPARATOR, said))


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with Places(tmp_path / "node") as places:
        yield places


@pytest.fixture
def wallet(places: Places) -> Wallet:
    wallet = Wallet(places, NODE.node_id)
    wallet.agree(JOB, TERMS)
    return wallet


def test_receipts_are_there_after_a_restart(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take(JOB, [receipt(2)])
    wallet.take_voucher(JOB, voucher(3, 70))
    assert Wallet(places, NODE.node_id).held() == {JOB: 3}
    kept = kept_in(places.ledger_of(JOB))
    assert kept is not None
    assert kept.terms == TERMS
    assert kept.receipts == (receipt(0), receipt(1), receipt(2))
    assert kept.voucher == voucher(3, 70)


def test_a_receipt_that_is_held_already_is_passed_over(wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take(JOB, [receipt(0), receipt(1), receipt(2)])
    assert wallet.held() == {JOB: 3}


def other(signed: SignedReceipt, *, signer: IdentityKey = COORDINATOR) -> SignedReceipt:
    """Something else under the same number."""
    said = replace(signed.receipt, quality_bps=BasisPoints(1))
    return replace(signed, receipt=said, signature=sign(signer, SEPARATOR, said))


def test_a_second_receipt_of_one_number_is_kept_as_a_proof(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take(JOB, [receipt(0), other(receipt(1)), receipt(2)])
    assert wallet.held() == {JOB: 3}
    path = places.ledger_of(JOB) / CONFLICT_FILE
    proof = path.read_bytes()
    assert msgspec.json.decode(proof, type=SignedReceipt) == other(receipt(1))
    wallet.take(JOB, [other(receipt(0))])
    assert path.read_bytes() == proof
    assert Wallet(places, NODE.node_id).held() == {JOB: 3}


def test_what_the_coordinator_did_not_sign_proves_nothing(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0)])
    elsewhere = receipt(0, node=STRANGER)
    wallet.take(JOB, [receipt(0), other(receipt(0), signer=STRANGER), elsewhere])
    assert not (places.ledger_of(JOB) / CONFLICT_FILE).exists()


def test_a_receipt_behind_a_gap_is_not_kept(wallet: Wallet) -> None:
    with pytest.raises(RefusalError, match="it is number 1 where 0 is next"):
        wallet.take(JOB, [receipt(1)])
    assert wallet.held() == {JOB: 0}


def test_what_is_sound_before_a_fault_is_kept(wallet: Wallet) -> None:
    forged = receipt(1, signer=STRANGER)
    with pytest.raises(RefusalError, match="did not sign it"):
        wallet.take(JOB, [receipt(0), forged, receipt(2)])
    assert wallet.held() == {JOB: 1}


def test_anothers_receipt_is_not_kept(wallet: Wallet) -> None:
    with pytest.raises(RefusalError, match="another job or node"):
        wallet.take(JOB, [receipt(0, node=STRANGER)])


def test_a_receipt_for_an_update_that_this_node_did_not_sign_is_not_kept(wallet: Wallet) -> None:
    sound = receipt(0)
    made = replace(sound.contribution, samples=Samples(200))
    said = replace(sound.receipt, contribution=Keccak(struct_hash(made).hex()))
    signature = sign(COORDINATOR, SEPARATOR, said)
    with pytest.raises(RefusalError, match="did not sign its contribution"):
        wallet.take(JOB, [replace(sound, contribution=made, receipt=said, signature=signature)])


def test_nothing_is_kept_of_a_job_without_terms(places: Places) -> None:
    with pytest.raises(RefusalError, match="agreed to no terms"):
        Wallet(places, NODE.node_id).take(JOB, [receipt(0)])


def test_work_for_nobody_has_no_folder(places: Places) -> None:
    Wallet(places, NODE.node_id).agree(JOB, Terms())
    assert not places.ledger.exists()


def test_a_line_that_was_not_written_to_its_end_is_cut_off(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    path = places.ledger_of(JOB) / RECEIPTS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    again = Wallet(places, NODE.node_id)
    assert again.held() == {JOB: 1}
    again.take(JOB, [receipt(1)])
    assert Wallet(places, NODE.node_id).held() == {JOB: 2}


def test_a_voucher_that_is_worth_less_is_not_kept(wallet: Wallet) -> None:
    wallet.take_voucher(JOB, voucher(3, 70))
    with pytest.raises(RefusalError, match="less than 70 for 3 before"):
        wallet.take_voucher(JOB, voucher(3, 69))
    wallet.take_voucher(JOB, voucher(3, 70))


def test_a_voucher_of_somebody_else_is_not_kept(wallet: Wallet) -> None:
    with pytest.raises(RefusalError, match="did not sign it"):
        wallet.take_voucher(JOB, voucher(3, 70, STRANGER))
    foreign = replace(voucher(3, 70), voucher=replace(voucher(3, 70).voucher, job=JobKey("1" * 64)))
    with pytest.raises(RefusalError, match="another job or node"):
        wallet.take_voucher(JOB, foreign)
