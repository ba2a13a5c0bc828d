import pytest

from coordinator.core.settlement.epoch import Epoch, EpochState, Tally
from coordinator.core.settlement.sending import Attempt, BlockName, TransactionState
from coordinator.shell.journal.ledger.records import (
    AccountName,
    BatchRecord,
    Earnings,
    EpochEnd,
    OutboxChange,
    OutboxRow,
    Progress,
    ReceiptRecord,
    Rewind,
    SealedTransaction,
    SignedAttempt,
    Span,
)
from coordinator.shell.journal.records import Entry, JournalConflictError
from hypergpu.ids import Address, JobId
from hypergpu.units import Milliseconds
from tests.conformance.journal_stores import JournalStore
from tests.signed_receipts import Work, node_key, receipt_record

JOB = JobId("job-00000000000a")
OTHER = JobId("job-00000000000b")
ACCOUNT = AccountName(31337, Address("0x" + "ab" * 20))
ONE, TWO = sorted((node_key(1), node_key(2)), key=lambda key: key.node_id)
DONE = Tally(1, 1, 1, 1)
ENDED = Epoch(job_id=JOB, number=0, is_ended=True, batch=DONE, close=DONE, payment=DONE)
WAITING = [TransactionState.WAITING]


def records(*sequences: int, epoch: int = 0) -> tuple[ReceiptRecord, ...]:
    return tuple(
        receipt_record(JOB, Work(node=ONE, sequence=sequence, epoch=epoch))
        for sequence in sequences
    )


def keep(store: JournalStore, *sequences: int, epoch: int = 0) -> None:
    store.journal.append([], (), Earnings(records(*sequences, epoch=epoch)))


def row(nonce: int, purpose: str) -> OutboxRow:
    transaction = SealedTransaction(
        account=ACCOUNT,
        nonce=nonce,
        purpose=purpose,
        job_id=JOB,
        to=bytes(20),
        call=b"call",
        gas=21_000,
        sealed_ms=Milliseconds(5),
    )
    attempt = Attempt(hash=bytes([nonce]) * 32, max_fee_wei=10**10, tip_wei=10**9)
    return OutboxRow(transaction=transaction, attempts=(SignedAttempt(attempt, b"raw %d" % nonce),))


def batch(nonce: int, first: int, receipts: int, sequence: int | None = 0) -> BatchRecord:
    span = Span(ONE.node_id, first, receipts, 320 * receipts, 320 * 9_000 * receipts)
    return BatchRecord(
        account=ACCOUNT,
        nonce=nonce,
        job_id=JOB,
        epoch=0,
        sequence=sequence,
        root=bytes(32),
        spans=(span,),
    )


def seal(store: JournalStore, *nonces: int) -> None:
    sealed = tuple(row(nonce, f"test/{nonce}") for nonce in nonces)
    store.journal.write(OutboxChange(account=ACCOUNT, sealed=sealed))


def test_receipts_come_back_with_their_signatures_after_a_restart(store: JournalStore) -> None:
    keep(store, 0, 1)
    journal = store.reopen()
    assert journal.receipts(JOB) == records(0, 1)
    assert journal.receipt(JOB, ONE.node_id, 1) == records(1)[0]
    assert journal.receipt(JOB, ONE.node_id, 2) is None
    assert journal.receipt_counts(JOB) == {ONE.node_id: 2}


def test_receipts_are_listed_by_node_and_by_epoch(store: JournalStore) -> None:
    other = receipt_record(JOB, Work(node=TWO, sequence=0))
    store.journal.append([], (), Earnings((other,)))
    keep(store, 0)
    keep(store, 1, epoch=1)
    assert store.journal.receipts(JOB) == (*records(0), *records(1, epoch=1), other)
    assert store.journal.receipts(JOB, node=TWO.node_id) == (other,)
    assert store.journal.receipts(JOB, epoch=1) == records(1, epoch=1)
    assert store.journal.receipts(OTHER) == ()


def test_the_score_of_what_waits_is_summed(store: JournalStore) -> None:
    keep(store, 0, 1)
    keep(store, 2, epoch=1)
    assert store.journal.waiting_score(JOB) == 3 * 320 * 9_000
    assert store.journal.waiting_score(OTHER) == 0
    sealed = OutboxChange(account=ACCOUNT, sealed=(row(0, "b0"),), batches=(batch(0, 0, 2),))
    store.journal.write(sealed)
    assert store.journal.waiting_score(JOB) == 320 * 9_000
    assert store.journal.node_scores(JOB) == {ONE.node_id: 3 * 320 * 9_000}
    assert store.journal.node_scores(OTHER) == {}


@pytest.mark.parametrize("sequence", [0, 2])
def test_a_receipt_that_is_not_its_nodes_next_takes_its_rows_with_it(
    store: JournalStore, sequence: int
) -> None:
    keep(store, 0)
    earned = Entry(JOB, 0, 1, "RoundRecorded", b"{}")
    with pytest.raises(JournalConflictError, match="its next is 1"):
        store.journal.append([earned], (), Earnings(records(sequence)))
    assert store.journal.head(JOB) is None
    assert store.journal.receipt_counts(JOB) == {ONE.node_id: 1}


def test_rows_that_do_not_follow_on_take_their_receipts_with_them(store: JournalStore) -> None:
    late = Entry(JOB, 7, 1, "RoundRecorded", b"{}")
    with pytest.raises(JournalConflictError, match="row 7 cannot follow"):
        store.journal.append([late], (), Earnings(records(0), (EpochEnd(JOB, 0),)))
    assert store.journal.receipts(JOB) == ()
    assert store.journal.epochs() == ()


def test_a_receipt_of_an_epoch_that_was_left_is_kept_and_the_epoch_stays_left(
    store: JournalStore,
) -> None:
    store.journal.append([], (), Earnings(records(0), (EpochEnd(JOB, 0),)))
    keep(store, 1)
    keep(store, 2, epoch=1)
    journal = store.reopen()
    first, second = journal.epochs()
    assert (first.is_left, first.is_last) == (True, False)
    assert not second.is_left
    assert [(one.sequence, one.epoch) for one in journal.unsealed(9)] == [(0, 0), (1, 0), (2, 1)]


def test_an_epoch_without_receipts_can_end_and_be_the_last(store: JournalStore) -> None:
    keep(store, 0)
    store.journal.append([], (), Earnings(ends=(EpochEnd(JOB, 0),)))
    assert not store.reopen().has_ended(JOB)
    store.journal.append([], (), Earnings(ends=(EpochEnd(JOB, 3, is_last=True),)))
    assert store.reopen().has_ended(JOB)
    assert not store.journal.has_ended(JobId("job-00000000000f"))


def test_an_epoch_can_be_the_last_and_the_only_one(store: JournalStore) -> None:
    store.journal.append([], (), Earnings(ends=(EpochEnd(JOB, 3, is_last=True),)))
    (record,) = store.journal.epochs()
    assert (record.epoch.number, record.is_left, record.is_last) == (3, True, True)


def test_receipts_wait_until_they_are_in_a_batch(store: JournalStore) -> None:
    keep(store, 0, 1, 2)
    assert [one.sequence for one in store.journal.unsealed(10)] == [0, 1, 2]
    assert [one.sequence for one in store.journal.unsealed(2)] == [0, 1]
    (job_id,) = store.journal.waiting_counts()
    assert store.journal.unsealed(10, without={job_id}) == ()
    change = OutboxChange(account=ACCOUNT, sealed=(row(4, "b0"),), batches=(batch(4, 0, 2),))
    store.journal.write(change)
    (left,) = store.reopen().unsealed(10)
    receipt = records(2)[0].signed.receipt
    assert left.leaf == records(2)[0].leaf
    assert left.contribution.hex() == receipt.contribution
    assert (left.samples, left.quality_bps, left.epoch) == (320, 9_000, 0)
    assert store.journal.batches(JOB, since=4) == store.journal.batches(JOB) == (batch(4, 0, 2),)
    assert store.journal.batches(JOB, since=5) == ()
    assert store.journal.sealed_counts(JOB) == {ONE.node_id: 2}
    assert store.journal.next_batch(ACCOUNT, JOB) == 1
    assert store.journal.next_batch(ACCOUNT, OTHER) == 0


def test_what_waits_is_counted_by_job(store: JournalStore) -> None:
    assert store.journal.waiting_counts() == {}
    keep(store, 0, 1, 2)
    other = receipt_record(JOB, Work(node=TWO, sequence=0))
    foreign = receipt_record(OTHER, Work(node=TWO, sequence=0))
    store.journal.append([], (), Earnings((other, foreign)))
    assert store.journal.waiting_counts() == {JOB: 4, OTHER: 1}
    change = OutboxChange(account=ACCOUNT, sealed=(row(0, "b0"),), batches=(batch(0, 0, 3),))
    store.journal.write(change)
    assert store.reopen().waiting_counts() == {JOB: 1, OTHER: 1}


def test_many_receipts_of_many_nodes_are_kept_at_once(store: JournalStore) -> None:
    keys = [node_key(number) for number in range(30)]
    rounds = [
        tuple(receipt_record(JOB, Work(node=key, sequence=sequence)) for key in keys)
        for sequence in range(9)
    ]
    first = [record for made in rounds[:8] for record in made]
    store.journal.append([], (), Earnings(tuple(first)))
    store.journal.append([], (), Earnings(rounds[8]))
    journal = store.reopen()
    in_order = sorted(
        (*first, *rounds[8]),
        key=lambda one: (one.signed.receipt.node, one.signed.receipt.sequence),
    )
    assert journal.receipts(JOB) == tuple(in_order)
    assert journal.receipt_counts(JOB) == {key.node_id: 9 for key in keys}


def test_a_receipt_that_comes_twice_at_once_is_refused_with_all(store: JournalStore) -> None:
    with pytest.raises(JournalConflictError, match="its next is 1"):
        keep(store, 0, 0)
    assert store.journal.receipt_counts(JOB) == {}


@pytest.mark.parametrize(("first", "receipts"), [(0, 1), (2, 1), (1, 3)])
def test_receipts_are_sealed_once_in_order_and_only_when_they_are_there(
    store: JournalStore, first: int, receipts: int
) -> None:
    keep(store, 0, 1, 2)
    seal_one = OutboxChange(account=ACCOUNT, sealed=(row(0, "b0"),), batches=(batch(0, 0, 1),))
    store.journal.write(seal_one)
    again = OutboxChange(
        account=ACCOUNT, sealed=(row(1, "b1"),), batches=(batch(1, first, receipts, 1),)
    )
    with pytest.raises(JournalConflictError, match="not the next to be sealed"):
        store.journal.write(again)
    assert store.journal.transaction_for(ACCOUNT, "b1") is None
    assert store.journal.next_nonce(ACCOUNT) == 1
    assert [one.sequence for one in store.journal.unsealed(10)] == [1, 2]


def test_what_the_chain_does_not_count_waits_again(store: JournalStore) -> None:
    keep(store, 0, 1, 2)
    seal_all = OutboxChange(account=ACCOUNT, sealed=(row(0, "b0"),), batches=(batch(0, 0, 3),))
    store.journal.write(seal_all)
    store.journal.write(OutboxChange(account=ACCOUNT, rewinds=(Rewind(JOB, ONE.node_id, 1),)))
    assert [one.sequence for one in store.journal.unsealed(10)] == [1, 2]
    with pytest.raises(JournalConflictError, match="more than there are"):
        store.journal.write(OutboxChange(account=ACCOUNT, rewinds=(Rewind(JOB, ONE.node_id, 4),)))


def test_transactions_are_stored_before_they_are_sent(store: JournalStore) -> None:
    assert store.journal.next_nonce(ACCOUNT) is None
    seal(store, 7, 8)
    journal = store.reopen()
    assert journal.next_nonce(ACCOUNT) == 9
    waiting = journal.transactions(ACCOUNT, states=WAITING)
    assert waiting == (row(7, "test/7"), row(8, "test/8"))
    assert journal.transactions(ACCOUNT, states=WAITING, limit=1) == waiting[:1]
    assert journal.transaction_for(ACCOUNT, "test/8") == waiting[1]
    assert journal.purposes(ACCOUNT, "test/") == ("test/7", "test/8")
    assert journal.purposes(ACCOUNT, "t%/8") == ()
    assert journal.transactions(AccountName(1, ACCOUNT.address), states=WAITING) == ()


@pytest.mark.parametrize("nonce", [7, 9])
def test_a_nonce_that_does_not_follow_on_is_refused(store: JournalStore, nonce: int) -> None:
    seal(store, 7)
    with pytest.raises(JournalConflictError, match=f"transaction {nonce} of 0xabab"):
        seal(store, nonce)


def test_a_purpose_is_sealed_once(store: JournalStore) -> None:
    seal(store, 0)
    with pytest.raises(JournalConflictError, match="test/0 was sealed already, as transaction 0"):
        store.journal.write(OutboxChange(account=ACCOUNT, sealed=(row(1, "test/0"),)))
    assert store.journal.next_nonce(ACCOUNT) == 1


def test_a_transaction_keeps_every_signing_and_where_it_is(store: JournalStore) -> None:
    seal(store, 0, 1)
    again = SignedAttempt(Attempt(b"h" * 32, 2 * 10**10, 2 * 10**9), b"dearer")
    block = BlockName(12, b"b" * 32)
    mined = Progress(0, TransactionState.MINED, True, block, Milliseconds(99), b"\0" * 32)
    change = OutboxChange(account=ACCOUNT, attempts=((0, again),), progress=(mined,))
    store.journal.write(change)
    (first,) = store.reopen().transactions(ACCOUNT, states=[TransactionState.MINED])
    assert first.attempts == (*row(0, "test/0").attempts, again)
    assert (first.block, first.mined_ms, first.is_sent) == (block, 99, True)
    assert first.hash == row(0, "test/0").hash == b"\0" * 32
    fallen_out = Progress(0, TransactionState.WAITING, True, None, None)
    store.journal.write(OutboxChange(account=ACCOUNT, progress=(fallen_out,)))
    (first, _) = store.reopen().transactions(ACCOUNT, states=WAITING)
    assert (first.mined_hash, first.hash) == (None, b"h" * 32)
    final = mined._replace(state=TransactionState.FINAL)
    store.journal.write(OutboxChange(account=ACCOUNT, progress=(final,)))
    assert [one.transaction.nonce for one in store.journal.newest_final(ACCOUNT, 5)] == [0]


def test_a_transaction_that_failed_is_sealed_again_under_its_purpose(store: JournalStore) -> None:
    keep(store, 0)
    sealed = OutboxChange(account=ACCOUNT, sealed=(row(0, "b0"),), batches=(batch(0, 0, 1),))
    store.journal.write(sealed)
    again = OutboxChange(
        account=ACCOUNT,
        given_up=(0,),
        sealed=(row(1, "b0"),),
        rewinds=(Rewind(JOB, ONE.node_id, 0),),
    )
    with pytest.raises(JournalConflictError, match=r"transaction 0 of .* has not failed"):
        store.journal.write(again)
    failed = Progress(0, TransactionState.FAILED, True, BlockName(3, b"b" * 32), Milliseconds(1))
    store.journal.write(OutboxChange(account=ACCOUNT, progress=(failed,)))
    store.journal.write(again)
    journal = store.reopen()
    assert journal.transactions(ACCOUNT, states=[TransactionState.FAILED]) == ()
    found = journal.transaction_for(ACCOUNT, "b0")
    assert found is not None
    assert found.transaction.nonce == 1
    assert journal.batches(JOB) == ()
    assert journal.next_batch(ACCOUNT, JOB) == 0
    assert [one.sequence for one in journal.unsealed(9)] == [0]


def test_nonces_that_somebody_else_has_spent_are_left_out(store: JournalStore) -> None:
    seal(store, 0)
    left_out = OutboxChange(account=ACCOUNT, sealed=(row(3, "x"),), least_nonce=3)
    with pytest.raises(JournalConflictError, match="another writer went first"):
        store.journal.write(OutboxChange(account=ACCOUNT, sealed=(row(3, "x"),)))
    store.journal.write(left_out)
    assert store.reopen().next_nonce(ACCOUNT) == 4


def test_an_attempt_needs_its_transaction(store: JournalStore) -> None:
    attempt = row(0, "x").attempts[0]
    with pytest.raises(JournalConflictError, match="has no transaction 0"):
        store.journal.write(OutboxChange(account=ACCOUNT, attempts=((0, attempt),)))


def test_an_epoch_that_is_final_is_no_longer_on_its_way(store: JournalStore) -> None:
    store.journal.append([], (), Earnings(records(0), (EpochEnd(JOB, 0),)))
    assert ENDED.state is EpochState.FINAL
    store.journal.write(OutboxChange(account=ACCOUNT, epochs=(ENDED,)))
    assert store.reopen().epochs() == ()
    (record,) = store.journal.epochs(is_final_too=True)
    assert record.epoch == ENDED


def test_an_epoch_that_others_closed_is_on_its_way_until_its_job_leaves_it(
    store: JournalStore,
) -> None:
    store.journal.append([], (), Earnings(records(0)))
    store.journal.write(OutboxChange(account=ACCOUNT, epochs=(ENDED,)))
    (record,) = store.reopen().epochs()
    assert (record.epoch.state, record.is_left) == (EpochState.FINAL, False)
    store.journal.append([], (), Earnings(ends=(EpochEnd(JOB, 0),)))
    assert store.journal.epochs() == ()


def test_an_epoch_for_what_came_too_late_has_been_left(store: JournalStore) -> None:
    late = Epoch(job_id=JOB, number=9)
    store.journal.write(OutboxChange(account=ACCOUNT, epochs=(late,)))
    (record,) = store.reopen().epochs()
    assert (record.epoch, record.is_left, record.is_last) == (late, True, True)


def test_what_a_removed_job_earned_is_still_owed(store: JournalStore) -> None:
    entry = Entry(JOB, 0, 1, "JobCreated", b"{}")
    store.journal.append([entry], (), Earnings(records(0)))
    store.journal.remove_job(JOB)
    journal = store.reopen()
    assert journal.jobs() == ()
    assert len(journal.unsealed(10)) == 1


def test_a_removed_job_has_left_its_epochs_and_the_last_of_them_is_its_last(
    store: JournalStore,
) -> None:
    keep(store, 0)
    keep(store, 1, epoch=3)
    store.journal.append([], (), Earnings((receipt_record(OTHER, Work(node=TWO, sequence=0)),)))
    store.journal.remove_job(JOB)
    journal = store.reopen()
    assert [(one.epoch.number, one.is_left, one.is_last) for one in journal.epochs()] == [
        (0, True, False),
        (3, True, True),
        (0, False, False),
    ]
    assert (journal.has_ended(JOB), journal.has_ended(OTHER)) == (True, False)
