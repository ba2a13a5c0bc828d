"""Receipts, epochs and the outbox in SQL, written in the journal's own transactions."""

from collections.abc import Collection, Mapping, Sequence

import msgspec
from sqlalchemy import ColumnElement, and_, func, not_, select
from sqlalchemy.engine import Connection, Row

from coordinator.core.settlement.epoch import Epoch, EpochState
from coordinator.core.settlement.sending import BlockName, TransactionState
from coordinator.shell.journal.ledger.records import (
    AccountName,
    BatchRecord,
    EpochRecord,
    OutboxChange,
    OutboxRow,
    ReceiptRecord,
    SealedTransaction,
    SignedAttempt,
    UnsealedReceipt,
)
from coordinator.shell.journal.sql.database import Database
from coordinator.shell.journal.sql.ledger.writing import write_change
from coordinator.shell.journal.sql.tables import (
    ATTEMPTS,
    BATCHES,
    EPOCHS,
    RECEIPT_COUNTS,
    RECEIPTS,
    TRANSACTIONS,
)
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.units import Milliseconds

_receipts = msgspec.json.Decoder(SignedReceipt)
_epochs = msgspec.json.Decoder(Epoch)
_batches = msgspec.json.Decoder(BatchRecord)
_transactions = msgspec.msgpack.Decoder(SealedTransaction)
_attempts = msgspec.msgpack.Decoder(SignedAttempt)
_OF_NODE = and_(
    RECEIPTS.c.job_id == RECEIPT_COUNTS.c.job_id,
    RECEIPTS.c.node == RECEIPT_COUNTS.c.node,
    RECEIPTS.c.sequence >= RECEIPT_COUNTS.c.sealed,
)
"""Receipts of a node that are in no batch."""


class SqlLedger:
    """The pay half of a journal in a database."""

    def __init__(self, database: Database) -> None:
        self._ledger_database = database

    def receipt_counts(self, job_id: JobId) -> Mapping[NodeId, int]:
        wanted = select(RECEIPT_COUNTS.c.node, RECEIPT_COUNTS.c.kept)
        with self._ledger_database.reader() as connection:
            rows = connection.execute(wanted.where(RECEIPT_COUNTS.c.job_id == job_id)).all()
        return {NodeId(row.node): row.kept for row in rows}

    def receipts(
        self, job_id: JobId, *, node: NodeId | None = None, epoch: int | None = None
    ) -> tuple[ReceiptRecord, ...]:
        wanted = select(RECEIPTS.c.leaf, RECEIPTS.c.body_json).where(RECEIPTS.c.job_id == job_id)
        if node is not None:
            wanted = wanted.where(RECEIPTS.c.node == node)
        if epoch is not None:
            wanted = wanted.where(RECEIPTS.c.epoch == epoch)
        wanted = wanted.order_by(RECEIPTS.c.node, RECEIPTS.c.sequence)
        with self._ledger_database.reader() as connection:
            rows = connection.execute(wanted).all()
        return tuple(ReceiptRecord(job_id, _receipts.decode(row[1]), row[0]) for row in rows)

    def receipt(self, job_id: JobId, node: NodeId, sequence: int) -> ReceiptRecord | None:
        wanted = select(RECEIPTS.c.leaf, RECEIPTS.c.body_json).where(
            RECEIPTS.c.job_id == job_id, RECEIPTS.c.node == node, RECEIPTS.c.sequence == sequence
        )
        with self._ledger_database.reader() as connection:
            row = connection.execute(wanted).one_or_none()
        return None if row is None else ReceiptRecord(job_id, _receipts.decode(row[1]), row[0])

    def sealed_counts(self, job_id: JobId) -> Mapping[NodeId, int]:
        wanted = select(RECEIPT_COUNTS.c.node, RECEIPT_COUNTS.c.sealed)
        with self._ledger_database.reader() as connection:
            rows = connection.execute(wanted.where(RECEIPT_COUNTS.c.job_id == job_id)).all()
        return {NodeId(row.node): row.sealed for row in rows}

    def waiting_counts(self) -> Mapping[JobId, int]:
        counts = RECEIPT_COUNTS
        wanted = (
            select(counts.c.job_id, func.sum(counts.c.kept - counts.c.sealed))
            .where(counts.c.sealed < counts.c.kept)
            .group_by(counts.c.job_id)
        )
        with self._ledger_database.reader() as connection:
            rows = connection.execute(wanted).all()
        return {JobId(job_id): int(count) for job_id, count in rows}

    def unsealed(
        self, limit: int, *, without: Collection[JobId] = ()
    ) -> tuple[UnsealedReceipt, ...]:
        columns = [RECEIPTS.c[name] for name in UnsealedReceipt._fields]
        counts = RECEIPT_COUNTS
        wanted = (
            select(*columns)
            .select_from(counts.join(RECEIPTS, _OF_NODE))
            .where(counts.c.sealed < counts.c.kept, counts.c.job_id.not_in(without))
            .order_by(counts.c.job_id, counts.c.node, RECEIPTS.c.sequence)
            .limit(limit)
        )
        with self._ledger_database.reader() as connection:
            return tuple(UnsealedReceipt(*row) for row in connection.execute(wanted).all())

    def epochs(self, *, is_final_too: bool = False) -> tuple[EpochRecord, ...]:
        wanted = select(EPOCHS).order_by(EPOCHS.c.job_id, EPOCHS.c.number)
        if not is_final_too:
            is_final = EPOCHS.c.state == EpochState.FINAL.value
            wanted = wanted.where(not_(and_(is_final, EPOCHS.c.is_left)))
        with self._ledger_database.reader() as connection:
            rows = connection.execute(wanted).all()
        return tuple(
            EpochRecord(_epochs.decode(row.body_json), row.is_left, row.is_last) for row in rows
        )

    def has_ended(self, job_id: JobId) -> bool:
        wanted = select(EPOCHS.c.number).where(EPOCHS.c.job_id == job_id, EPOCHS.c.is_last)
        with self._ledger_database.reader() as connection:
            return connection.execute(wanted.limit(1)).first() is not None

    def transactions(
        self, account: AccountName, *, states: Sequence[TransactionState], limit: int = 0
    ) -> tuple[OutboxRow, ...]:
        wanted = select(TRANSACTIONS).where(
            *_of(account), TRANSACTIONS.c.state.in_([state.value for state in states])
        )
        wanted = wanted.order_by(TRANSACTIONS.c.nonce)
        with self._ledger_database.reader() as connection:
            found = connection.execute(wanted.limit(limit) if limit else wanted).all()
            return _outbox_rows(connection, account, found)

    def newest_final(self, account: AccountName, count: int) -> tuple[OutboxRow, ...]:
        wanted = select(TRANSACTIONS).where(
            *_of(account), TRANSACTIONS.c.state == TransactionState.FINAL.value
        )
        wanted = wanted.order_by(TRANSACTIONS.c.nonce.desc()).limit(count)
        with self._ledger_database.reader() as connection:
            return _outbox_rows(connection, account, connection.execute(wanted).all())

    def transaction_for(self, account: AccountName, purpose: str) -> OutboxRow | None:
        wanted = select(TRANSACTIONS).where(*_of(account), TRANSACTIONS.c.purpose == purpose)
        with self._ledger_database.reader() as connection:
            rows = _outbox_rows(connection, account, connection.execute(wanted).all())
        return rows[0] if rows else None

    def purposes(self, account: AccountName, prefix: str) -> tuple[str, ...]:
        begins = TRANSACTIONS.c.purpose.startswith(prefix, autoescape=True)
        wanted = select(TRANSACTIONS.c.purpose).where(*_of(account), begins)
        with self._ledger_database.reader() as connection:
            return tuple(connection.scalars(wanted.order_by(TRANSACTIONS.c.nonce)).all())

    def next_nonce(self, account: AccountName) -> int | None:
        wanted = select(func.max(TRANSACTIONS.c.nonce)).where(*_of(account))
        with self._ledger_database.reader() as connection:
            last: int | None = connection.scalar(wanted)
        return None if last is None else last + 1

    def next_batch(self, account: AccountName, job_id: JobId) -> int:
        wanted = select(func.max(BATCHES.c.sequence)).where(
            BATCHES.c.chain_id == account.chain_id,
            BATCHES.c.address == account.address,
            BATCHES.c.job_id == job_id,
        )
        with self._ledger_database.reader() as connection:
            last: int | None = connection.scalar(wanted)
        return 0 if last is None else last + 1

    def batches(self, job_id: JobId, *, since: int = 0) -> tuple[BatchRecord, ...]:
        wanted = select(BATCHES.c.body_json).where(
            BATCHES.c.job_id == job_id, BATCHES.c.nonce >= since
        )
        with self._ledger_database.reader() as connection:
            rows = connection.execute(wanted.order_by(BATCHES.c.nonce)).all()
        return tuple(_batches.decode(row.body_json) for row in rows)

    def waiting_score(self, job_id: JobId) -> int:
        counts = RECEIPT_COUNTS
        wanted = (
            select(func.sum(RECEIPTS.c.samples * RECEIPTS.c.quality_bps))
            .select_from(counts.join(RECEIPTS, _OF_NODE))
            .where(counts.c.job_id == job_id, counts.c.sealed < counts.c.kept)
        )
        with self._ledger_database.reader() as connection:
            return int(connection.scalar(wanted) or 0)

    def node_scores(self, job_id: JobId) -> Mapping[NodeId, int]:
        weight = func.sum(RECEIPTS.c.samples * RECEIPTS.c.quality_bps)
        wanted = select(RECEIPTS.c.node, weight).where(RECEIPTS.c.job_id == job_id)
        with self._ledger_database.reader() as connection:
            rows = connection.execute(wanted.group_by(RECEIPTS.c.node)).all()
        return {NodeId(node): int(weight) for node, weight in rows}

    def write(self, change: OutboxChange) -> None:
        with self._ledger_database.writer() as connection:
            write_change(connection, change)


def _of(account: AccountName) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return (
        TRANSACTIONS.c.chain_id == account.chain_id,
        TRANSACTIONS.c.address == account.address,
    )


def _outbox_rows(
    connection: Connection, account: AccountName, found: Sequence[Row[tuple[object, ...]]]
) -> tuple[OutboxRow, ...]:
    if not found:
        return ()
    nonces = [row.nonce for row in found]
    wanted = select(ATTEMPTS.c.nonce, ATTEMPTS.c.body).where(
        ATTEMPTS.c.chain_id == account.chain_id,
        ATTEMPTS.c.address == account.address,
        ATTEMPTS.c.nonce.between(min(nonces), max(nonces)),
    )
    attempts: dict[int, list[SignedAttempt]] = {}
    for row in connection.execute(wanted.order_by(ATTEMPTS.c.nonce, ATTEMPTS.c.number)):
        attempts.setdefault(row.nonce, []).append(_attempts.decode(row.body))
    return tuple(_outbox_row(row, tuple(attempts[row.nonce])) for row in found)


def _outbox_row(row: Row[tuple[object, ...]], attempts: tuple[SignedAttempt, ...]) -> OutboxRow:
    number = row.block_number
    return OutboxRow(
        transaction=_transactions.decode(row.body),
        attempts=attempts,
        state=TransactionState(row.state),
        is_sent=row.is_sent,
        block=None if number is None else BlockName(number, row.block_hash),
        mined_ms=None if row.mined_ms is None else Milliseconds(row.mined_ms),
        mined_hash=row.mined_hash,
    )
