"""The pay half of the journal that forgets."""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.settlement.epoch import Epoch, EpochState
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.journal.ledger.records import (
    AccountName,
    BatchRecord,
    Earnings,
    EpochEnd,
    EpochRecord,
    OutboxChange,
    OutboxRow,
    ReceiptRecord,
    UnsealedReceipt,
)
from coordinator.shell.journal.records import JournalConflictError
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger import pay
from hypergpu.units import several

Key = tuple[JobId, NodeId]


class _Shelves(NamedTuple):
    """All that is kept; a change works on a copy, so that it takes effect whole or not at all."""

    sealed: dict[Key, int]
    outbox: dict[AccountName, list[OutboxRow]]
    batches: list[BatchRecord]
    epochs: dict[tuple[JobId, int], EpochRecord]

    def copy(self) -> "_Shelves":
        outbox = {account: list(rows) for account, rows in self.outbox.items()}
        return _Shelves(dict(self.sealed), outbox, list(self.batches), dict(self.epochs))


class MemoryLedger:
    """Receipts and the outbox in dictionaries. Copies all of the outbox for each change."""

    def __init__(self, lock: threading.RLock) -> None:
        self._ledger_lock = lock
        self._receipts: dict[Key, list[ReceiptRecord]] = {}
        self._shelves = _Shelves({}, {}, [], {})

    def receipt_counts(self, job_id: JobId) -> Mapping[NodeId, int]:
        with self._ledger_lock:
            return {key[1]: len(kept) for key, kept in self._receipts.items() if key[0] == job_id}

    def receipts(
        self, job_id: JobId, *, node: NodeId | None = None, epoch: int | None = None
    ) -> tuple[ReceiptRecord, ...]:
        with self._ledger_lock:
            return tuple(
                record
                for key in sorted(self._receipts)
                if key[0] == job_id and node in {None, key[1]}
                for record in self._receipts[key]
                if epoch in {None, record.signed.receipt.epoch}
            )

    def receipt(self, job_id: JobId, node: NodeId, sequence: int) -> ReceiptRecord | None:
        with self._ledger_lock:
            kept = self._receipts.get((job_id, node), [])
            return kept[sequence] if 0 <= sequence < len(kept) else None

    def sealed_counts(self, job_id: JobId) -> Mapping[NodeId, int]:
        with self._ledger_lock:
            sealed = self._shelves.sealed
            return {key[1]: sealed.get(key, 0) for key in self._receipts if key[0] == job_id}

    def waiting_counts(self) -> Mapping[JobId, int]:
        with self._ledger_lock:
            counts: dict[JobId, int] = {}
            for key, kept in self._receipts.items():
                if waiting := len(kept) - self._shelves.sealed.get(key, 0):
                    counts[key[0]] = counts.get(key[0], 0) + waiting
        return counts

    def unsealed(
        self, limit: int, *, without: Collection[JobId] = ()
    ) -> tuple[UnsealedReceipt, ...]:
        with self._ledger_lock:
            waiting = [
                UnsealedReceipt.of(record)
                for key in sorted(self._receipts)
                if key[0] not in without
                for record in self._receipts[key][self._shelves.sealed.get(key, 0) :]
            ]
        return tuple(waiting[:limit])

    def epochs(self, *, is_final_too: bool = False) -> tuple[EpochRecord, ...]:
        with self._ledger_lock:
            return tuple(
                record
                for _, record in sorted(self._shelves.epochs.items())
                if is_final_too or not record.is_left or record.epoch.state is not EpochState.FINAL
            )

    def has_ended(self, job_id: JobId) -> bool:
        with self._ledger_lock:
            epochs = self._shelves.epochs.items()
            return any(record.is_last for (of_job, _), record in epochs if of_job == job_id)

    def transactions(
        self, account: AccountName, *, states: Sequence[TransactionState], limit: int = 0
    ) -> tuple[OutboxRow, ...]:
        with self._ledger_lock:
            kept = self._shelves.outbox.get(account, [])
            found = [row for row in kept if row.state in states]
        return tuple(found[:limit] if limit else found)

    def newest_final(self, account: AccountName, count: int) -> tuple[OutboxRow, ...]:
        return self.transactions(account, states=[TransactionState.FINAL])[::-1][:count]

    def transaction_for(self, account: AccountName, purpose: str) -> OutboxRow | None:
        with self._ledger_lock:
            kept = self._shelves.outbox.get(account, [])
            return next((row for row in kept if row.transaction.purpose == purpose), None)

    def purposes(self, account: AccountName, prefix: str) -> tuple[str, ...]:
        with self._ledger_lock:
            kept = self._shelves.outbox.get(account, [])
            purposes = [row.transaction.purpose for row in kept]
        return tuple(each for each in purposes if each.startswith(prefix))

    def next_nonce(self, account: AccountName) -> int | None:
        with self._ledger_lock:
            kept = self._shelves.outbox.get(account)
            return kept[-1].transaction.nonce + 1 if kept else None

    def next_batch(self, account: AccountName, job_id: JobId) -> int:
        with self._ledger_lock:
            numbers = [
                batch.sequence
                for batch in self._shelves.batches
                if batch.account == account and batch.job_id == job_id
            ]
        return max((number + 1 for number in numbers if number is not None), default=0)

    def batches(self, job_id: JobId, *, since: int = 0) -> tuple[BatchRecord, ...]:
        with self._ledger_lock:
            batches = self._shelves.batches
            return tuple(one for one in batches if one.job_id == job_id and one.nonce >= since)

    def waiting_score(self, job_id: JobId) -> int:
        with self._ledger_lock:
            waiting = [
                record.signed.receipt
                for key, kept in self._receipts.items()
                if key[0] == job_id
                for record in kept[self._shelves.sealed.get(key, 0) :]
            ]
        return sum(one.samples * one.quality_bps for one in waiting)

    def node_scores(self, job_id: JobId) -> Mapping[NodeId, int]:
        with self._ledger_lock:
            of_job = {
                key[1]: list(kept) for key, kept in self._receipts.items() if key[0] == job_id
            }
        return {
            node: sum(pay.scores(one.signed.receipt for one in kept).values())
            for node, kept in of_job.items()
            if kept
        }

    def write(self, change: OutboxChange) -> None:
        with self._ledger_lock:
            shelves = self._shelves.copy()
            _give_up(shelves, change)
            _seal(shelves, change)
            for rewind in change.rewinds:
                key = (rewind.job_id, rewind.node)
                if rewind.sequence > len(self._receipts.get(key, [])):
                    raise JournalConflictError(
                        f"the chain counts {several(rewind.sequence, 'receipt')} of"
                        f" {rewind.node} in {rewind.job_id}, more than there are"
                    )
                shelves.sealed[key] = rewind.sequence
            for batch in change.batches:
                self._record_batch(shelves, batch)
            _advance(shelves, change)
            self._shelves = shelves

    def _record_batch(self, shelves: _Shelves, batch: BatchRecord) -> None:
        for span in batch.spans:
            key, end = (batch.job_id, span.node), span.first + span.receipts
            is_next = shelves.sealed.get(key, 0) == span.first
            if not is_next or end > len(self._receipts.get(key, [])):
                raise JournalConflictError(
                    f"receipts {span.first} to {end - 1} of {span.node} in {batch.job_id} are "
                    "not the next to be sealed"
                )
            shelves.sealed[key] = end
        shelves.batches.append(batch)

    def _check_earnings(self, earnings: Earnings) -> None:
        counts: dict[Key, int] = {}
        for record in earnings.receipts:
            receipt = record.signed.receipt
            key = (record.job_id, receipt.node)
            wanted = counts.get(key, len(self._receipts.get(key, [])))
            if receipt.sequence != wanted:
                raise JournalConflictError(
                    f"receipt {receipt.sequence} of {receipt.node} in {record.job_id} cannot be "
                    f"kept: its next is {wanted}"
                )
            counts[key] = wanted + 1

    def _keep_earnings(self, earnings: Earnings) -> None:
        for record in earnings.receipts:
            receipt = record.signed.receipt
            self._receipts.setdefault((record.job_id, receipt.node), []).append(record)
            self._open_epoch(record.job_id, receipt.epoch)
        for end in earnings.ends:
            self._leave(end)

    def _open_epoch(self, job_id: JobId, number: int) -> EpochRecord:
        fresh = EpochRecord(Epoch(job_id=job_id, number=number))
        return self._shelves.epochs.setdefault((job_id, number), fresh)

    def _leave(self, end: EpochEnd) -> None:
        known = self._open_epoch(end.job_id, end.number)
        self._shelves.epochs[end.job_id, end.number] = replace(
            known, is_left=True, is_last=known.is_last or end.is_last
        )

    def _leave_all(self, job_id: JobId) -> None:
        numbers = sorted(number for of_job, number in self._shelves.epochs if of_job == job_id)
        for number in numbers:
            self._leave(EpochEnd(job_id, number, is_last=number == numbers[-1]))


def _give_up(shelves: _Shelves, change: OutboxChange) -> None:
    kept = shelves.outbox.get(change.account, [])
    for nonce in change.given_up:
        place = next(
            (
                place
                for place, row in enumerate(kept)
                if row.transaction.nonce == nonce and row.state is TransactionState.FAILED
            ),
            None,
        )
        if place is None:
            raise JournalConflictError(
                f"transaction {nonce} of {change.account.address} has not failed"
            )
        row = kept[place]
        freed = replace(row.transaction, purpose=f"{row.transaction.purpose}#{nonce}")
        kept[place] = replace(row, transaction=freed, state=TransactionState.ABANDONED)
        shelves.batches[:] = [
            batch
            for batch in shelves.batches
            if (batch.account, batch.nonce) != (change.account, nonce)
        ]


def _seal(shelves: _Shelves, change: OutboxChange) -> None:
    if not change.sealed:
        return
    kept = shelves.outbox.setdefault(change.account, [])
    for row in change.sealed:
        transaction = row.transaction
        wanted = max(kept[-1].transaction.nonce + 1, change.least_nonce) if kept else 0
        if kept and transaction.nonce != wanted:
            raise JournalConflictError(
                f"transaction {transaction.nonce} of {change.account.address} cannot follow on "
                f"{kept[-1].transaction.nonce}: another writer went first"
            )
        for other in kept:
            if other.transaction.purpose == transaction.purpose:
                raise JournalConflictError(
                    f"{transaction.purpose} was sealed already, as transaction "
                    f"{other.transaction.nonce}"
                )
        kept.append(row)


def _advance(shelves: _Shelves, change: OutboxChange) -> None:
    kept = shelves.outbox.get(change.account, [])
    places = {row.transaction.nonce: place for place, row in enumerate(kept)}
    for nonce, attempt in change.attempts:
        if nonce not in places:
            raise JournalConflictError(f"{change.account.address} has no transaction {nonce}")
        row = kept[places[nonce]]
        kept[places[nonce]] = replace(row, attempts=(*row.attempts, attempt))
    for progress in change.progress:
        if progress.nonce in places:
            kept[places[progress.nonce]] = replace(
                kept[places[progress.nonce]],
                state=progress.state,
                is_sent=progress.is_sent,
                block=progress.block,
                mined_ms=progress.mined_ms,
                mined_hash=progress.mined_hash,
            )
    for epoch in change.epochs:
        key = (epoch.job_id, epoch.number)
        known = shelves.epochs.get(key, EpochRecord(epoch, is_left=True, is_last=True))
        shelves.epochs[key] = replace(known, epoch=epoch)
