"""The payments' database keeps the same in SQLite and in PostgreSQL."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from sqlalchemy.exc import IntegrityError

from benchmarks.ours.metering.host import COORDINATOR, JobPlan
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.statements import SignedReceipt
from payments.core.transactions import Inclusion, OutboxRow, Variant
from payments.shell.store import AccountName, JobRecord, PaymentStore
from tests.conformance.journal_stores import DATABASES, postgres_schema

PLAN = JobPlan(nodes=2, rounds_per_epoch=2)
JOB = PLAN.job_id
TERMS = terms_of(COORDINATOR.address, JOB, Domain())
ACCOUNT = AccountName(31337, COORDINATOR.address)


@pytest.fixture(params=DATABASES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PaymentStore]:
    with ExitStack() as owner:
        is_file = request.param == "sqlite"
        url = "" if is_file else owner.enter_context(postgres_schema())
        payment_store = PaymentStore(url, tmp_path)
        owner.callback(payment_store.close)
        yield payment_store


def receipts(round_: int) -> list[SignedReceipt]:
    _, fact = PLAN.round_row(round_, TERMS)
    return [PLAN.receipt(work, COORDINATOR, TERMS, sequence=round_) for work in fact.updates]


def keep(store: PaymentStore, cursor: int, new: list[SignedReceipt]) -> None:
    store.keep_job(JOB, JobRecord(cursor, "mark", b"state %d" % cursor), new)


def row(nonce: int, purpose: str) -> OutboxRow:
    variant = Variant(b"h%d" % nonce, b"raw", 21_000, 5)
    return OutboxRow(nonce=nonce, purpose=purpose, job_id=JOB, variants=(variant,))


def test_receipts_and_cursor_are_one_commit(store: PaymentStore) -> None:
    first = receipts(0)
    keep(store, 3, first)
    with pytest.raises(IntegrityError):
        keep(store, 4, [*receipts(1), first[0]])
    assert store.jobs() == {JOB: JobRecord(3, "mark", b"state 3")}
    node = PLAN.keys[0].node_id
    assert store.receipts(JOB, node) == [first[0]]


def test_receipts_come_in_order_from_a_sequence_on(store: PaymentStore) -> None:
    for round_ in (2, 0, 1):
        keep(store, round_, receipts(round_))
    node = PLAN.keys[1].node_id
    later_receipts = store.receipts(JOB, node, first=1)
    assert [signed_receipt.receipt.sequence for signed_receipt in later_receipts] == [1, 2]
    assert len(store.receipts(JOB, node, limit=1)) == 1
    score = later_receipts[0].receipt.score
    assert store.epoch_scores(JOB)[node] == {0: 2 * score, 1: score}


def test_values_are_replaced(store: PaymentStore) -> None:
    for name, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        store.keep_value(name, value)
    assert (store.value("a"), store.value("b"), store.value("c")) == (b"3", b"2", b"")


def test_a_nonce_and_a_purpose_are_used_once(store: PaymentStore) -> None:
    store.add_rows(ACCOUNT, [row(0, "open"), row(1, "batch")])
    for used_row in (row(0, "other"), row(2, "batch")):
        with pytest.raises(IntegrityError):
            store.add_rows(ACCOUNT, [row(5, "fine"), used_row])
    assert store.next_nonce(ACCOUNT) == 2


def test_closed_rows_come_back_only_from_a_nonce_on(store: PaymentStore) -> None:
    first, second = row(0, "open"), row(1, "batch")
    store.add_rows(ACCOUNT, [second, first])
    inclusion = Inclusion(b"h0", 7, is_success=True)
    closed_row = msgspec.structs.replace(first, inclusion=inclusion, is_closed=True)
    store.update_rows(ACCOUNT, [closed_row])
    assert store.open_rows(ACCOUNT, 1) == [second]
    assert store.open_rows(ACCOUNT, 0) == [closed_row, second]
    assert store.job_rows(ACCOUNT, JOB) == [closed_row, second]
    assert store.row(ACCOUNT, "open") == closed_row


def test_an_abandoned_row_leaves_its_purpose(store: PaymentStore) -> None:
    store.add_rows(ACCOUNT, [row(0, "batch")])
    store.update_rows(ACCOUNT, [msgspec.structs.replace(row(0, "batch"), is_abandoned=True)])
    store.add_rows(ACCOUNT, [row(1, "batch")])
    assert store.row(ACCOUNT, "batch") == row(1, "batch")


def test_accounts_are_kept_apart(store: PaymentStore) -> None:
    other = AccountName(1, COORDINATOR.address)
    store.add_rows(ACCOUNT, [row(0, "open")])
    store.add_rows(other, [row(0, "open")])
    assert store.next_nonce(other) == 1
    assert len(store.open_rows(ACCOUNT, 5)) == 1
