"""Writes a change of the outbox in a transaction that is open, refusing what does not follow on."""

import msgspec
from sqlalchemy import func, insert, select, update
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
from coordinator.shell.journal.sql.tables import (
    ATTEMPTS,
    BATCHES,
    EPOCHS,
    RECEIPT_COUNTS,
    TRANSACTIONS,
)


def write_change(connection: Connection, change: OutboxChange) -> None:
    """Write all of it.

    Raises:
        JournalConflictError: as `Outbox.write`. The caller's transaction must then be given up.
    """
    account = change.account
    for nonce, row in change.retries:
        _abandon(connection, account, nonce, row.transaction.nonce)
    _seal(connection, account, tuple(row for _, row in change.retries))
    _seal(connection, account, change.sealed)
    for rewind in change.rewinds:
        _rewind(connection, rewind)
    for batch in change.batches:
        _record_batch(connection, batch)
    for nonce, attempt in change.attempts:
        _add_attempt(connection, account, nonce, attempt)
    for progress in change.progress:
        _advance(connection, account, progress)
    for epoch in change.epochs:
        _store_epoch(connection, epoch)


def _seal(connection: Connection, account: AccountName, rows: tuple[OutboxRow, ...]) -> None:
    if not rows:
        return
    of_account = (
        TRANSACTIONS.c.chain_id == account.chain_id,
        TRANSACTIONS.c.address == account.address,
    )
    last = connection.scalar(select(func.max(TRANSACTIONS.c.nonce)).where(*of_account))
    wanted = rows[0].transaction.nonce if last is None else last + 1
    for row in rows:
        transaction = row.transaction
        if transaction.nonce != wanted:
            raise JournalConflictError(
                f"transaction {transaction.nonce} of {account.address} cannot follow on "
                f"{wanted - 1}: another writer went first"
            )
        taken = select(TRANSACTIONS.c.nonce).where(
            *of_account, TRANSACTIONS.c.purpose == transaction.purpose
        )
        if (nonce := connection.scalar(taken)) is not None:
            raise JournalConflictError(
                f"{transaction.purpose} was sealed already, as transaction {nonce}"
            )
        connection.execute(insert(TRANSACTIONS), _transaction_row(account, row))
        for number, attempt in enumerate(row.attempts):
            connection.execute(
                insert(ATTEMPTS), _attempt_row(account, transaction.nonce, number, attempt)
            )
        wanted += 1


def _abandon(connection: Connection, account: AccountName, nonce: int, again: int) -> None:
    """Free the purpose of a transaction that failed, and hand its batch to the one after it."""
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
    connection.execute(update(BATCHES).where(*of_batch).values(nonce=again))


def _record_batch(connection: Connection, batch: BatchRecord) -> None:
    for span in batch.spans:
        of_node = (
            RECEIPT_COUNTS.c.job_id == batch.job_id,
            RECEIPT_COUNTS.c.node == span.node,
            RECEIPT_COUNTS.c.sealed == span.first,
            RECEIPT_COUNTS.c.kept >= span.first + span.receipts,
        )
        moved = connection.execute(
            update(RECEIPT_COUNTS).where(*of_node).values(sealed=span.first + span.receipts)
        )
        if moved.rowcount != 1:
            raise JournalConflictError(
                f"receipts {span.first} to {span.first + span.receipts - 1} of {span.node} in "
                f"{batch.job_id} are not the next to be sealed"
            )
    row = {
        "chain_id": batch.account.chain_id,
        "address": batch.account.address,
        "nonce": batch.nonce,
        "job_id": batch.job_id,
        "sequence": batch.sequence,
        "body_json": msgspec.json.encode(batch),
    }
    connection.execute(insert(BATCHES), row)


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
            f"the chain counts {rewind.sequence} receipts of {rewind.node} in {rewind.job_id}, "
            "more than there are"
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
    connection.execute(insert(ATTEMPTS), _attempt_row(account, nonce, number, attempt))


def _advance(connection: Connection, account: AccountName, progress: Progress) -> None:
    block = progress.block
    of_nonce = (
        TRANSACTIONS.c.chain_id == account.chain_id,
        TRANSACTIONS.c.address == account.address,
        TRANSACTIONS.c.nonce == progress.nonce,
    )
    values = {
        "state": progress.state.value,
        "is_sent": progress.is_sent,
        "block_number": None if block is None else block.number,
        "block_hash": None if block is None else block.hash,
        "mined_ms": progress.mined_ms,
    }
    connection.execute(update(TRANSACTIONS).where(*of_nonce).values(**values))


def _store_epoch(connection: Connection, epoch: Epoch) -> None:
    of_epoch = (EPOCHS.c.job_id == epoch.job_id) & (EPOCHS.c.number == epoch.number)
    values = {"state": epoch.state.value, "body_json": msgspec.json.encode(epoch)}
    if connection.execute(update(EPOCHS).where(of_epoch).values(**values)).rowcount == 0:
        # One that only holds what came too late for its own epoch: no receipt has opened it.
        row = {"job_id": epoch.job_id, "number": epoch.number, "is_left": True, "is_last": True}
        connection.execute(insert(EPOCHS), row | values)


def _transaction_row(account: AccountName, row: OutboxRow) -> dict[str, object]:
    return {
        "chain_id": account.chain_id,
        "address": account.address,
        "nonce": row.transaction.nonce,
        "purpose": row.transaction.purpose,
        "state": row.state.value,
        "is_sent": row.is_sent,
        "block_number": None,
        "block_hash": None,
        "mined_ms": None,
        "body": msgspec.msgpack.encode(row.transaction),
    }


def _attempt_row(
    account: AccountName, nonce: int, number: int, attempt: SignedAttempt
) -> dict[str, object]:
    return {
        "chain_id": account.chain_id,
        "address": account.address,
        "nonce": nonce,
        "number": number,
        "body": msgspec.msgpack.encode(attempt),
    }
