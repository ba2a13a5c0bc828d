"""Writes a change of the outbox in a transaction that is open, refusing what does not follow on."""

from typing import NamedTuple

import msgspec
from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from coordinator.core.settlement.epoch import Epoch
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.journal.ledger.records import (
    AccountName,
    BatchRecord,
    OutboxChange,
    OutboxRow,
    Progress,
    Rewind,
    SignedAttempt,
)
from coordinator.shell.journal.records import JournalConflictError
from coordinator.shell.journal.sql.ledger.bulk import Row, insert_rows
from coordinator.shell.journal.sql.tables import (
    ATTEMPTS,
    BATCHES,
    EPOCHS,
    RECEIPT_COUNTS,
    TRANSACTIONS,
)
from hypergpu.ids import JobId, NodeId
from hypergpu.units import several

_PURPOSES_AT_ONCE = 500
# Written for many rows at once: a statement a row takes most of a pipeline's time.
_ADVANCE = (
    update(TRANSACTIONS)
    .where(
        TRANSACTIONS.c.chain_id == bindparam("of_chain"),
        TRANSACTIONS.c.address == bindparam("of_address"),
        TRANSACTIONS.c.nonce == bindparam("of_nonce"),
    )
    .values(
        state=bindparam("state"),
        is_sent=bindparam("is_sent"),
        block_number=bindparam("block_number"),
        block_hash=bindparam("block_hash"),
        mined_ms=bindparam("mined_ms"),
        mined_hash=bindparam("mined_hash"),
    )
)
_SEAL_RECEIPTS = (
    update(RECEIPT_COUNTS)
    .where(
        RECEIPT_COUNTS.c.job_id == bindparam("of_job"),
        RECEIPT_COUNTS.c.node == bindparam("of_node"),
    )
    .values(sealed=bindparam("now_sealed"))
)


class _Count(NamedTuple):
    """Of one node's receipts in a job."""

    kept: int
    sealed: int


def write_change(connection: Connection, change: OutboxChange) -> None:
    """Write all of it.

    Raises:
        JournalConflictError: as `Outbox.write`. The caller's transaction must then be given up.
    """
    account = change.account
    for nonce in change.given_up:
        _give_up(connection, account, nonce)
    _seal(connection, account, change)
    for rewind in change.rewinds:
        _rewind(connection, rewind)
    _record_batches(connection, change.batches)
    for nonce, attempt in change.attempts:
        _add_attempt(connection, account, nonce, attempt)
    _advance(connection, account, change.progress)
    for epoch in change.epochs:
        _store_epoch(connection, epoch)


def _seal(connection: Connection, account: AccountName, change: OutboxChange) -> None:
    rows = change.sealed
    if not rows:
        return
    of_account = (
        TRANSACTIONS.c.chain_id == account.chain_id,
        TRANSACTIONS.c.address == account.address,
    )
    last = connection.scalar(select(func.max(TRANSACTIONS.c.nonce)).where(*of_account))
    wanted = rows[0].transaction.nonce if last is None else max(last + 1, change.least_nonce)
    for row in rows:
        if row.transaction.nonce != wanted:
            raise JournalConflictError(
                f"transaction {row.transaction.nonce} of {account.address} cannot follow on "
                f"{wanted - 1}: another writer went first"
            )
        wanted += 1
    _check_purposes(connection, account, rows)
    insert_rows(connection, TRANSACTIONS, [_transaction_row(account, row) for row in rows])
    attempts = [
        _attempt_row(account, row.transaction.nonce, number, attempt)
        for row in rows
        for number, attempt in enumerate(row.attempts)
    ]
    insert_rows(connection, ATTEMPTS, attempts)


def _check_purposes(
    connection: Connection, account: AccountName, rows: tuple[OutboxRow, ...]
) -> None:
    purposes = [row.transaction.purpose for row in rows]
    if len(set(purposes)) < len(purposes):
        raise JournalConflictError("a purpose is sealed twice at once")
    for first in range(0, len(purposes), _PURPOSES_AT_ONCE):
        taken = select(TRANSACTIONS.c.purpose, TRANSACTIONS.c.nonce).where(
            TRANSACTIONS.c.chain_id == account.chain_id,
            TRANSACTIONS.c.address == account.address,
            TRANSACTIONS.c.purpose.in_(purposes[first : first + _PURPOSES_AT_ONCE]),
        )
        for purpose, nonce in connection.execute(taken):
            raise JournalConflictError(f"{purpose} was sealed already, as transaction {nonce}")


def _give_up(connection: Connection, account: AccountName, nonce: int) -> None:
    """Free the purpose of a transaction that failed, and forget its batch."""
    failed = (
        TRANSACTIONS.c.chain_id == account.chain_id,
        TRANSACTIONS.c.address == account.address,
        TRANSACTIONS.c.nonce == nonce,
        TRANSACTIONS.c.state == TransactionState.FAILED.value,
    )
    purpose = connection.scalar(select(TRANSACTIONS.c.purpose).where(*failed))
    if purpose is None:
        raise JournalConflictError(f"transaction {nonce} of {account.address} has not failed")
    values = {"state": TransactionState.ABANDONED.value, "purpose": f"{purpose}#{nonce}"}
    connection.execute(update(TRANSACTIONS).where(*failed).values(**values))
    of_batch = (
        BATCHES.c.chain_id == account.chain_id,
        BATCHES.c.address == account.address,
        BATCHES.c.nonce == nonce,
    )
    connection.execute(delete(BATCHES).where(*of_batch))


def _record_batches(connection: Connection, batches: tuple[BatchRecord, ...]) -> None:
    counts: dict[JobId, dict[NodeId, _Count]] = {}
    for batch in batches:
        if batch.job_id not in counts:
            counts[batch.job_id] = _counts(connection, batch.job_id)
        for span in batch.spans:
            count = counts[batch.job_id].get(span.node, _Count(0, 0))
            end = span.first + span.receipts
            if count.sealed != span.first or end > count.kept:
                raise JournalConflictError(
                    f"receipts {span.first} to {end - 1} of {span.node} in {batch.job_id} are "
                    "not the next to be sealed"
                )
            counts[batch.job_id][span.node] = _Count(count.kept, end)
    for job_id, of_job in counts.items():
        touched = {span.node for batch in batches for span in batch.spans}
        rows = [
            {"of_job": job_id, "of_node": node, "now_sealed": count.sealed}
            for node, count in of_job.items()
            if node in touched
        ]
        connection.execute(_SEAL_RECEIPTS, rows)
    insert_rows(connection, BATCHES, [_batch_row(batch) for batch in batches])


def _counts(connection: Connection, job_id: JobId) -> "dict[NodeId, _Count]":
    wanted = select(RECEIPT_COUNTS.c.node, RECEIPT_COUNTS.c.kept, RECEIPT_COUNTS.c.sealed)
    rows = connection.execute(wanted.where(RECEIPT_COUNTS.c.job_id == job_id))
    return {NodeId(row.node): _Count(row.kept, row.sealed) for row in rows}


def _batch_row(batch: BatchRecord) -> Row:
    """In the order of the table's columns, as the other rows here."""
    return (
        *batch.account,
        batch.nonce,
        batch.job_id,
        batch.sequence,
        msgspec.json.encode(batch),
    )


def _rewind(connection: Connection, rewind: Rewind) -> None:
    of_node = (
        RECEIPT_COUNTS.c.job_id == rewind.job_id,
        RECEIPT_COUNTS.c.node == rewind.node,
        RECEIPT_COUNTS.c.kept >= rewind.sequence,
    )
    moved = connection.execute(
        update(RECEIPT_COUNTS).where(*of_node).values(sealed=rewind.sequence)
    )
    if moved.rowcount != 1:
        raise JournalConflictError(
            f"the chain counts {several(rewind.sequence, 'receipt')} of {rewind.node} in"
            f" {rewind.job_id}, more than there are"
        )


def _add_attempt(
    connection: Connection, account: AccountName, nonce: int, attempt: SignedAttempt
) -> None:
    of_nonce = (
        ATTEMPTS.c.chain_id == account.chain_id,
        ATTEMPTS.c.address == account.address,
        ATTEMPTS.c.nonce == nonce,
    )
    number = connection.scalar(select(func.count()).select_from(ATTEMPTS).where(*of_nonce)) or 0
    if number == 0:
        raise JournalConflictError(f"{account.address} has no transaction {nonce}")
    insert_rows(connection, ATTEMPTS, [_attempt_row(account, nonce, number, attempt)])


def _advance(connection: Connection, account: AccountName, progress: tuple[Progress, ...]) -> None:
    if not progress:
        return
    rows = [
        {
            "of_chain": account.chain_id,
            "of_address": account.address,
            "of_nonce": one.nonce,
            "state": one.state.value,
            "is_sent": one.is_sent,
            "block_number": None if one.block is None else one.block.number,
            "block_hash": None if one.block is None else one.block.hash,
            "mined_ms": one.mined_ms,
            "mined_hash": one.mined_hash,
        }
        for one in progress
    ]
    connection.execute(_ADVANCE, rows)


def _store_epoch(connection: Connection, epoch: Epoch) -> None:
    of_epoch = (EPOCHS.c.job_id == epoch.job_id) & (EPOCHS.c.number == epoch.number)
    values = {"state": epoch.state.value, "body_json": msgspec.json.encode(epoch)}
    if connection.execute(update(EPOCHS).where(of_epoch).values(**values)).rowcount == 0:
        # One that only holds what came too late for its own epoch: no receipt has opened it.
        row = {"job_id": epoch.job_id, "number": epoch.number, "is_left": True, "is_last": True}
        connection.execute(insert(EPOCHS), row | values)


def _transaction_row(account: AccountName, row: OutboxRow) -> Row:
    transaction = row.transaction
    body = msgspec.msgpack.encode(transaction)
    place = (None, None, None)
    state = row.state.value
    return (
        *account,
        transaction.nonce,
        transaction.purpose,
        state,
        row.is_sent,
        *place,
        body,
        None,
    )


def _attempt_row(account: AccountName, nonce: int, number: int, attempt: SignedAttempt) -> Row:
    return (*account, nonce, number, msgspec.msgpack.encode(attempt))
