"""The coordinator's key, and what is said with it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.core.events import EpochEnded, MeasuredUpdate, RoundMetered
from coordinator.core.job import Account, DueReceipt
from coordinator.shell.metering.desk import KEY_FILE, LedgerDesk, coordinator_key
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import Pay
from hypergpu.keys.keyfile import place_beside
from hypergpu.ledger.receipt import ReceiptCheck, Signers, leaf
from hypergpu.ledger.typed import Contribution, sign
from hypergpu.ledger.voucher import no_voucher, voucher_fault
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples, Wei
from tests.scenarios.test_metering import FREE, PAID, training

JOB = JobId("job-000000000001")
NODE = IdentityKey(bytes(31) + b"\x01")
DESK = LedgerDesk(IdentityKey(bytes(31) + b"\x02"))
TERMS = DESK.terms(JOB, Pay())


def measured() -> MeasuredUpdate:
    made = Contribution(
        job=TERMS.job,
        epoch=0,
        round=4,
        node=NODE.node_id,
        shard=digest_of(b"shard"),
        model=digest_of(b"model"),
        update=digest_of(b"update"),
        samples=Samples(100),
        inner_steps=2,
        compute_ms=Milliseconds(5),
        update_bytes=Bytes(400),
        lease=7,
        nonce=8,
    )
    signature = sign(NODE, TERMS.domain.separator(), made)
    due = DueReceipt(made, signature, took_ms=Milliseconds(9), allowed_ms=Milliseconds(0))
    return MeasuredUpdate(
        sequence=3, quality_bps=BasisPoints(9_000), evaluator="quality/1", reason="", due=due
    )


def test_a_measured_update_becomes_a_receipt_that_anybody_can_check() -> None:
    record = RoundMetered(at_ms=Milliseconds(1), round=4, epoch=0, updates=(measured(),))
    earned = DESK.countersigned([(TERMS, JOB, record)])
    (receipt,) = earned.receipts
    signers = Signers(coordinator=DESK.address, domain=TERMS.domain, made_in=TERMS.domain)
    assert ReceiptCheck(signers).fault(receipt.signed) == ""
    assert receipt.leaf == leaf(receipt.signed.receipt)
    assert (receipt.signed.receipt.sequence, receipt.signed.receipt.quality_bps) == (3, 9_000)


def test_the_same_facts_are_signed_with_the_same_bytes() -> None:
    record = RoundMetered(at_ms=Milliseconds(1), round=4, epoch=0, updates=(measured(),))
    once, again = (DESK.countersigned([(TERMS, JOB, record)]) for _ in range(2))
    assert once == again


def test_the_end_of_an_epoch_is_told_to_the_journal() -> None:
    record = EpochEnded(
        at_ms=Milliseconds(1), epoch=2, is_last=True, scores={}, pool=Wei(0), rewards={}
    )
    (end,) = DESK.countersigned([(TERMS, JOB, record)]).ends
    assert (end.job_id, end.number, end.is_last) == (JOB, 2, True)


def test_a_voucher_says_what_the_account_says() -> None:
    job = training(PAID)
    accounts = {NODE.node_id: Account(receipts=4, vouched=Wei(70))}
    job = replace(job, metering=replace(job.metering, accounts=accounts))
    assert job.terms is not None
    voucher = DESK.voucher(job, NODE.node_id)
    assert voucher is not None
    assert (voucher.voucher.sequence, voucher.voucher.amount) == (4, 70)
    fault = voucher_fault(
        voucher,
        separator=job.terms.domain.separator(),
        coordinator=DESK.address,
        held=no_voucher(job.terms.job, NODE.node_id),
    )
    assert fault == ""


def test_where_nothing_is_paid_there_is_no_voucher() -> None:
    assert DESK.voucher(training(FREE), NODE.node_id) is None


def test_the_key_is_made_once_and_lies_there_encrypted(tmp_path: Path) -> None:
    folder = tmp_path / "coordinator"
    first = coordinator_key(folder)
    path = folder / KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.secret.hex() not in path.read_text()
    assert place_beside(folder).exists()
    assert coordinator_key(folder).node_id == first.node_id


def test_the_key_may_have_a_passphrase_of_the_operators(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("correct horse battery staple\n")
    words.chmod(0o600)
    first = coordinator_key(tmp_path / "coordinator", words)
    assert coordinator_key(tmp_path / "coordinator", words).node_id == first.node_id
    assert not place_beside(tmp_path / "coordinator").exists()
    with pytest.raises(HyperGPUError, match="cannot be read"):
        coordinator_key(tmp_path / "coordinator")


def test_a_plain_key_of_an_older_version_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "coordinator" / KEY_FILE
    path.parent.mkdir(parents=True)
    path.write_text("ab" * 32 + "\n")
    path.chmod(0o600)
    assert coordinator_key(tmp_path / "coordinator").secret.hex() == "ab" * 32
    assert "abab" not in path.read_text()


def test_a_damaged_key_is_named_and_not_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "coordinator"
    coordinator_key(folder)
    (folder / KEY_FILE).write_text("ab" * 31 + "\n")
    with pytest.raises(HyperGPUError, match="is damaged") as refused:
        coordinator_key(folder)
    assert "abab" not in str(refused.value)
