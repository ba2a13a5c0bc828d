"""What a node keeps of what the coordinator signs: only what is sound, and all of it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpu_node.shell.state.kept import (
    CONFLICT_FILE,
    RECEIPTS_FILE,
    TERMS_FILE,
    VOUCHER_FILE,
    kept_in,
)
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import Wallet
from hypergpu.cli.ledger.stored import stored_receipts
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
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
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples, Wei

JOB = JobId("job-000000000001")
NODE = IdentityKey(bytes(31) + b"\x01")
COORDINATOR = IdentityKey(bytes(31) + b"\x02")
STRANGER = IdentityKey(bytes(31) + b"\x03")
TERMS = terms_of(Address(COORDINATOR.node_id), JOB, Domain(31337, Address("0x" + "c0" * 20)))
SEPARATOR = TERMS.domain.separator()


def receipt(
    sequence: int,
    *,
    signer: IdentityKey = COORDINATOR,
    node: IdentityKey = NODE,
    terms: Terms = TERMS,
) -> SignedReceipt:
    separator = terms.domain.separator()
    made = Contribution(
        job=terms.job,
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
        job=terms.job,
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
        signature=sign(signer, separator, said),
        contribution=made,
        contribution_signature=sign(node, separator, made),
    )


def voucher(
    sequence: int, amount: int, signer: IdentityKey = COORDINATOR, terms: Terms = TERMS
) -> SignedVoucher:
    said = Voucher(job=terms.job, node=NODE.node_id, sequence=sequence, amount=Wei(amount))
    return SignedVoucher(said, sign(signer, terms.domain.separator(), said))


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with Places(tmp_path / "node") as places:
        yield places


@pytest.fixture
def wallet(places: Places) -> Wallet:
    wallet = Wallet(places, NODE.node_id)
    wallet.agree(JOB, TERMS)
    return wallet


def counts(wallet: Wallet) -> dict[JobId, int]:
    """How many receipts there are of each job."""
    return {held.job_id: held.receipts for held in wallet.held()}


def test_receipts_are_there_after_a_restart(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take(JOB, [receipt(2)])
    wallet.take_voucher(JOB, voucher(3, 70))
    assert counts(Wallet(places, NODE.node_id)) == {JOB: 3}
    kept = kept_in(places.ledger_of(JOB, TERMS.coordinator), NODE.node_id)
    assert kept is not None
    assert kept.terms == TERMS
    assert kept.receipts == (receipt(0), receipt(1), receipt(2))
    assert kept.voucher == voucher(3, 70)


def test_a_receipt_that_is_held_already_is_passed_over(wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take(JOB, [receipt(0), receipt(1), receipt(2)])
    assert counts(wallet) == {JOB: 3}


def other(signed: SignedReceipt, *, signer: IdentityKey = COORDINATOR) -> SignedReceipt:
    """Something else under the same number."""
    said = replace(signed.receipt, quality_bps=BasisPoints(1))
    return replace(signed, receipt=said, signature=sign(signer, SEPARATOR, said))


def test_a_second_receipt_of_one_number_is_kept_as_a_proof(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take(JOB, [receipt(0), other(receipt(1)), receipt(2)])
    assert counts(wallet) == {JOB: 3}
    path = places.ledger_of(JOB, TERMS.coordinator) / CONFLICT_FILE
    proof = path.read_bytes()
    assert msgspec.json.decode(proof, type=SignedReceipt) == other(receipt(1))
    wallet.take(JOB, [other(receipt(0))])
    assert path.read_bytes() == proof
    assert counts(Wallet(places, NODE.node_id)) == {JOB: 3}


def test_what_the_coordinator_did_not_sign_proves_nothing(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0)])
    elsewhere = receipt(0, node=STRANGER)
    wallet.take(JOB, [receipt(0), other(receipt(0), signer=STRANGER), elsewhere])
    assert not (places.ledger_of(JOB, TERMS.coordinator) / CONFLICT_FILE).exists()


def test_a_receipt_behind_a_gap_is_not_kept(wallet: Wallet) -> None:
    with pytest.raises(HyperGPUError, match="it is number 1 where 0 is next"):
        wallet.take(JOB, [receipt(1)])
    assert counts(wallet) == {JOB: 0}


def test_what_is_sound_before_a_fault_is_kept(wallet: Wallet) -> None:
    forged = receipt(1, signer=STRANGER)
    with pytest.raises(HyperGPUError, match="did not sign it"):
        wallet.take(JOB, [receipt(0), forged, receipt(2)])
    assert counts(wallet) == {JOB: 1}


def test_anothers_receipt_is_not_kept(wallet: Wallet) -> None:
    with pytest.raises(HyperGPUError, match="another job or node"):
        wallet.take(JOB, [receipt(0, node=STRANGER)])


def test_a_receipt_for_an_update_that_this_node_did_not_sign_is_not_kept(wallet: Wallet) -> None:
    sound = receipt(0)
    made = replace(sound.contribution, samples=Samples(200))
    said = replace(sound.receipt, contribution=Keccak(struct_hash(made).hex()))
    signature = sign(COORDINATOR, SEPARATOR, said)
    with pytest.raises(HyperGPUError, match="did not sign its contribution"):
        wallet.take(JOB, [replace(sound, contribution=made, receipt=said, signature=signature)])


def test_nothing_is_kept_of_a_job_without_terms(places: Places) -> None:
    with pytest.raises(HyperGPUError, match="agreed to no terms"):
        Wallet(places, NODE.node_id).take(JOB, [receipt(0)])


def test_work_for_nobody_has_no_folder(places: Places) -> None:
    Wallet(places, NODE.node_id).agree(JOB, Terms())
    assert not places.ledger.exists()


def test_a_line_that_was_not_written_to_its_end_is_cut_off(places: Places, wallet: Wallet) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    path = places.ledger_of(JOB, TERMS.coordinator) / RECEIPTS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    again = Wallet(places, NODE.node_id)
    assert counts(again) == {JOB: 1}
    again.take(JOB, [receipt(1)])
    assert counts(Wallet(places, NODE.node_id)) == {JOB: 2}


@pytest.mark.parametrize("damage", ["a line is missing", "a line is damaged", "one comes twice"])
def test_a_damaged_file_is_mended_by_asking_again_and_loses_nothing(
    places: Places, wallet: Wallet, damage: str
) -> None:
    wallet.agree(JOB, TERMS)
    made = [receipt(number) for number in range(4)]
    wallet.take(JOB, made)
    folder = places.ledger_of(JOB, TERMS.coordinator)
    path = folder / RECEIPTS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    instead = {"a line is missing": b"", "a line is damaged": b"{\xff\n"}.get(damage, lines[0])
    path.write_bytes(b"".join([lines[0], instead, *lines[2:]]))

    mended = Wallet(places, NODE.node_id)
    assert counts(mended) == {JOB: 1}
    stored = stored_receipts(folder, 4)
    assert [one.receipt.sequence for one in stored.receipts] == [0, 2, 3]
    assert stored.missing == (range(1, 2),)
    mended.take(JOB, made[1:])
    assert counts(mended) == counts(Wallet(places, NODE.node_id)) == {JOB: 4}
    assert path.read_bytes() == b"".join(lines)
    assert stored_receipts(folder, 4).damage == ""
    assert len(stored_receipts(folder, 4).receipts) == 4


NOT_TEXT = b'{"job":"\xff"}'
"""As a bad block of a disk leaves it."""


def test_terms_that_are_no_text_rest_and_the_other_jobs_are_loaded(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0)])
    wallet.agree(JOB, OTHERS)
    path = places.ledger_of(JOB, OTHERS.coordinator) / TERMS_FILE
    path.write_bytes(NOT_TEXT)
    assert [held.receipts for held in Wallet(places, NODE.node_id).held()] == [1]
    assert path.read_bytes() == NOT_TEXT


def test_a_voucher_that_is_no_text_is_as_none_and_the_next_one_is_kept(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0)])
    folder = places.ledger_of(JOB, TERMS.coordinator)
    (folder / VOUCHER_FILE).write_bytes(b'{"voucher":{"job":"\xff"}}')
    again = Wallet(places, NODE.node_id)
    assert counts(again) == {JOB: 1}
    again.take_voucher(JOB, voucher(1, 70))
    kept = kept_in(folder, NODE.node_id)
    assert kept is not None
    assert kept.voucher == voucher(1, 70)


def test_a_voucher_that_is_worth_less_is_not_kept(wallet: Wallet) -> None:
    wallet.take_voucher(JOB, voucher(3, 70))
    with pytest.raises(HyperGPUError, match="less than 70 for 3 before"):
        wallet.take_voucher(JOB, voucher(3, 69))
    wallet.take_voucher(JOB, voucher(3, 70))


def test_a_voucher_of_somebody_else_is_not_kept(wallet: Wallet) -> None:
    with pytest.raises(HyperGPUError, match="did not sign it"):
        wallet.take_voucher(JOB, voucher(3, 70, STRANGER))
    foreign = replace(voucher(3, 70), voucher=replace(voucher(3, 70).voucher, job=JobKey("1" * 64)))
    with pytest.raises(HyperGPUError, match="another job or node"):
        wallet.take_voucher(JOB, foreign)


def test_a_voucher_for_more_receipts_than_a_ledger_counts_is_not_kept(wallet: Wallet) -> None:
    wallet.take_voucher(JOB, voucher(2**48 - 1, 70))
    for sequence in (2**48, 2**63, 2**64 - 1):
        with pytest.raises(HyperGPUError, match=f"it is for {sequence} receipts, a ledger counts"):
            wallet.take_voucher(JOB, voucher(sequence, 71))


ELSEWHERE = terms_of(Address(COORDINATOR.node_id), JOB, Domain(1, Address("0x" + "99" * 20)))
"""The same job, which is now to count on another ledger."""
OTHERS = terms_of(Address(STRANGER.node_id), JOB, TERMS.domain)
"""Another coordinator's job of the same id."""


def test_terms_that_change_are_refused_and_the_voucher_stays(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0)])
    wallet.take_voucher(JOB, voucher(1, 70))
    with pytest.raises(HyperGPUError, match=r"counts on chain 31337.* is to count on chain 1,"):
        wallet.agree(JOB, ELSEWHERE)
    with pytest.raises(HyperGPUError, match="did not sign it"):
        wallet.take_voucher(JOB, voucher(1, 71, terms=ELSEWHERE))
    kept = kept_in(places.ledger_of(JOB, TERMS.coordinator), NODE.node_id)
    assert kept is not None
    assert (kept.terms, kept.voucher) == (TERMS, voucher(1, 70))
    assert Wallet(places, NODE.node_id).changed_terms(JOB, ELSEWHERE)
    assert wallet.changed_terms(JOB, TERMS) == wallet.changed_terms(JOB, OTHERS) == ""


def test_two_coordinators_with_one_job_id_never_touch_each_others(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take_voucher(JOB, voucher(2, 70))
    wallet.agree(JOB, OTHERS)
    wallet.take(JOB, [receipt(0, signer=STRANGER, terms=OTHERS)])
    wallet.take_voucher(JOB, voucher(1, 9, STRANGER, OTHERS))
    assert [held.receipts for held in wallet.held()] == [2, 1]
    for terms, receipts, amount in ((TERMS, 2, 70), (OTHERS, 1, 9)):
        kept = kept_in(places.ledger_of(JOB, terms.coordinator), NODE.node_id)
        assert kept is not None
        assert kept.voucher is not None
        assert (kept.terms, len(kept.receipts)) == (terms, receipts)
        assert kept.voucher.voucher.amount == amount
    assert sorted(held.receipts for held in Wallet(places, NODE.node_id).held()) == [1, 2]


def test_a_folder_that_an_older_version_named_is_moved_with_all_that_is_in_it(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0), receipt(1)])
    wallet.take_voucher(JOB, voucher(2, 70))
    now = places.ledger_of(JOB, TERMS.coordinator)
    now.rename(places.ledger / JOB)

    again = Wallet(places, NODE.node_id)
    again.take(JOB, [receipt(2)])
    assert counts(again) == {JOB: 3}
    assert list(places.ledger.iterdir()) == [now]
    kept = kept_in(now, NODE.node_id)
    assert kept is not None
    assert (len(kept.receipts), kept.voucher) == (3, voucher(2, 70))


def test_a_folder_of_an_older_name_beside_its_new_one_stays_as_it_is(
    places: Places, wallet: Wallet
) -> None:
    wallet.take(JOB, [receipt(0)])
    old = places.ledger / JOB
    shutil.copytree(places.ledger_of(JOB, TERMS.coordinator), old)
    os.utime(old, (0, 0))
    again = Wallet(places, NODE.node_id)
    again.take(JOB, [receipt(1)])
    assert counts(again) == {JOB: 2}
    assert len(list(places.ledger.iterdir())) == 2
