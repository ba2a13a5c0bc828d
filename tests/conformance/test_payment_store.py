"""The payments' database keeps the same in SQLite and in PostgreSQL."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from benchmarks.ours.metering.host import COORDINATOR, JobPlan
from hypergpu.statements.domain import Domain, terms_of
from hypergpu.statements.receipt import SignedReceipt
from payments.core.outbox import Inclusion, OutboxRow, Variant
from payments.shell.store import AccountName, Change, JobRecord, Store
from tests.conformance.journal_stores import POSTGRES_URL, postgres_schema

PLAN = JobPlan(nodes=2, rounds_per_epoch=2)
JOB = PLAN.job_id
TERMS = terms_of(COORDINATOR.address, JOB, Domain())
ACCOUNT = AccountName(31337, COORDINATOR.address)
DATABASES = ["sqlite", "postgresql"] if POSTGRES_URL else ["sqlite"]


@pytest.fixture(params=DATABASES)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with ExitStack() as owner:
        is_file = request.param == "sqlite"
        url = "" if is_file else owner.enter_context(postgres_schema())
        opened = Store(url, tmp_path)
        owner.callback(opened.close)
        yield opened


def receipts(round_: int) -> list[SignedReceipt]:
    _, fact = PLAN.measured(round_, TERMS)
    return [PLAN.signed(work, COORDINATOR, TERMS, sequence=round_) for work in fact.updates]


def change(cursor: int, new: list[SignedReceipt]) -> Change:
    return Change(jobs={JOB: JobRecord(cursor, "mark", b"state %d" % cursor)}, receipts=new)


def row(nonce: int, purpose: str) -> OutboxRow:
    variant = Variant(b"h%d" % nonce, b"raw", 2, 1, 21_000, 5)
    return OutboxRow(nonce=nonce, purpose=purpose, job_id=JOB, variants=(variant,))


def test_receipts_and_cursor_are_one_commit(kept: Store) -> None:
    first = receipts(0)
    kept.write(change(3, first))
    with pytest.raises(IntegrityError):
        kept.write(change(4, [*receipts(1), first[0]]))
    assert kept.jobs() == {JOB: JobRecord(3, "mark", b"state 3")}
    node = PLAN.keys[0].node_id
    assert kept.receipts(JOB, node) == [first[0]]


def test_a_round_gives_a_node_one_receipt(kept: Store) -> None:
    kept.write(change(3, receipts(0)))
    _, fact = PLAN.measured(0, TERMS)
    again = PLAN.signed(fact.updates[0], COORDINATOR, TERMS, sequence=7)
    with pytest.raises(IntegrityError):
        kept.write(change(4, [again]))


def test_receipts_come_in_order_from_a_sequence_on(kept: Store) -> None:
    for round_ in (2, 0, 1):
        kept.write(change(round_, receipts(round_)))
    node = PLAN.keys[1].node_id
    found = kept.receipts(JOB, node, first=1)
    assert [signed.receipt.sequence for signed in found] == [1, 2]
    assert len(kept.receipts(JOB, node, limit=1)) == 1
    score = found[0].receipt.score
    assert kept.epoch_scores(JOB)[node] == {0: 2 * score, 1: score}


def test_values_are_replaced(kept: Store) -> None:
    kept.write(Change(values={"a": b"1", "b": b"2"}))
    kept.write(Change(values={"a": b"3"}))
    assert (kept.value("a"), kept.value("b"), kept.value("c")) == (b"3", b"2", b"")


def test_a_nonce_and_a_purpose_are_used_once(kept: Store) -> None:
    kept.add_rows(ACCOUNT, [row(0, "open"), row(1, "batch")])
    for used in (row(0, "other"), row(2, "batch")):
        with pytest.raises(IntegrityError):
            kept.add_rows(ACCOUNT, [row(5, "fine"), used])
    assert kept.next_nonce(ACCOUNT) == 2


def test_final_rows_leave_the_queue_and_stay_stored(kept: Store) -> None:
    first, second = row(0, "open"), row(1, "batch")
    kept.add_rows(ACCOUNT, [second, first])
    mined = OutboxRow(
        nonce=0,
        purpose="open",
        job_id=JOB,
        variants=first.variants,
        inclusion=Inclusion(b"h0", 7, b"hash", is_success=True),
    )
    kept.update_rows(ACCOUNT, [mined], final={0})
    assert kept.open_rows(ACCOUNT) == [second]
    assert kept.job_rows(ACCOUNT, JOB) == [mined, second]
    assert kept.rows_from(ACCOUNT, 1) == [second]
    assert kept.row(ACCOUNT, "open") == mined


def test_an_abandoned_row_leaves_its_purpose(kept: Store) -> None:
    kept.add_rows(ACCOUNT, [row(0, "batch")])
    abandoned = OutboxRow(
        nonce=0, purpose="batch", job_id=JOB, variants=row(0, "batch").variants, is_abandoned=True
    )
    kept.update_rows(ACCOUNT, [abandoned])
    kept.add_rows(ACCOUNT, [row(1, "batch")])
    assert kept.row(ACCOUNT, "batch") == row(1, "batch")


def test_accounts_are_kept_apart(kept: Store) -> None:
    other = AccountName(1, COORDINATOR.address)
    kept.add_rows(ACCOUNT, [row(0, "open")])
    kept.add_rows(other, [row(0, "open")])
    assert kept.next_nonce(other) == 1
    assert len(kept.open_rows(ACCOUNT)) == 1
