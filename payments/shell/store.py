"""Receipts, the state of each job's fold, and the transactions of the coordinator's key.

A commit holds receipts and the cursor that they were made at, or a transaction's signed bytes
before anybody sees them: a start after a kill goes on from here. All methods block.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from hypergpu.ids import Address, JobId, NodeId
from hypergpu.statements.receipt import SignedReceipt
from payments.core.outbox import OutboxRow
from payments.shell.database import JOBS, RECEIPTS, TRANSACTIONS, VALUES, open_engine


class AccountName(NamedTuple):
    """One key on one chain."""

    chain_id: int
    address: Address


class JobRecord(NamedTuple):
    """A job's fold up to a row of its journal."""

    cursor: int
    """Sequence of the next row."""
    mark: str
    """Digest of the row before it."""
    state: bytes
    """JSON of the fold's state."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one commit."""

    jobs: dict[JobId, JobRecord] = {}
    receipts: Sequence[SignedReceipt] = ()
    """Of the one job in ``jobs``."""
    values: dict[str, bytes] = {}


class Store:
    """The database of the payments. Threads may share it."""

    def __init__(self, database_url: str, folder: Path) -> None:
        """Open it.

        Raises:
            HyperGPUError: FOLDER_UNUSABLE, the database cannot be used.
        """
        self._engine = open_engine(database_url, folder)
        self._readers = self._engine.execution_options(is_reader=True)
        self._encoder = msgspec.json.Encoder()
        self._receipts = msgspec.json.Decoder(SignedReceipt)
        self._rows = msgspec.json.Decoder(OutboxRow)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def write(self, change: Change) -> None:
        """Commit a change: all of it or nothing.

        Raises:
            IntegrityError: A receipt of this sequence or round is there already.
        """
        with self._engine.begin() as connection:
            for job_id, record in change.jobs.items():
                _replace(connection, JOBS, "job_id", {"job_id": job_id, **record._asdict()})
                rows = [self._receipt_row(job_id, signed) for signed in change.receipts]
                if rows:
                    connection.execute(insert(RECEIPTS), rows)
            for name, value in change.values.items():
                _replace(connection, VALUES, "name", {"name": name, "value": value})

    def jobs(self) -> dict[JobId, JobRecord]:
        """The fold of each job."""
        with self._readers.connect() as connection:
            rows = connection.execute(select(JOBS)).all()
        return {JobId(row.job_id): JobRecord(row.cursor, row.mark, row.state) for row in rows}

    def value(self, name: str) -> bytes:
        """A value by name; empty: there is none."""
        with self._readers.connect() as connection:
            wanted = select(VALUES.c.value).where(VALUES.c.name == name)
            return connection.execute(wanted).scalar() or b""

    def receipts(
        self, job_id: JobId, node: NodeId, first: int = 0, limit: int = 1_000
    ) -> list[SignedReceipt]:
        """A node's receipts in a job from a sequence on, in order."""
        wanted = (
            select(RECEIPTS.c.body)
            .where(
                RECEIPTS.c.job_id == job_id, RECEIPTS.c.node == node, RECEIPTS.c.sequence >= first
            )
            .order_by(RECEIPTS.c.sequence)
            .limit(limit)
        )
        with self._readers.connect() as connection:
            return [self._receipts.decode(body) for (body,) in connection.execute(wanted)]

    def epoch_scores(self, job_id: JobId) -> dict[NodeId, dict[int, int]]:
        """Score of each node's receipts in each epoch."""
        table = RECEIPTS.c
        wanted = (
            select(table.node, table.epoch, func.sum(table.score))
            .where(table.job_id == job_id)
            .group_by(table.node, table.epoch)
            .order_by(table.node, table.epoch)
        )
        scores: dict[NodeId, dict[int, int]] = {}
        with self._readers.connect() as connection:
            for node, epoch, score in connection.execute(wanted):
                scores.setdefault(NodeId(node), {})[epoch] = int(score)
        return scores

    def add_rows(self, account: AccountName, rows: Sequence[OutboxRow]) -> None:
        """Store transactions, signed and not sent yet.

        Raises:
            IntegrityError: A nonce or a purpose is used.
        """
        if rows:
            with self._engine.begin() as connection:
                connection.execute(insert(TRANSACTIONS), [self._row(account, row) for row in rows])

    def update_rows(
        self, account: AccountName, rows: Sequence[OutboxRow], final: Collection[int] = ()
    ) -> None:
        """Replace stored transactions; those whose nonce is in ``final`` leave the queue."""
        if not rows:
            return
        table = TRANSACTIONS.c
        replaced = (
            update(TRANSACTIONS)
            .where(
                table.chain_id == account.chain_id,
                table.account == account.address,
                table.nonce == bindparam("at_nonce"),
            )
            .values(
                purpose=bindparam("new_purpose"),
                is_final=bindparam("now_final"),
                body=bindparam("new_body"),
            )
        )
        values = [
            {
                "at_nonce": row.nonce,
                "new_purpose": _purpose(row),
                "now_final": row.nonce in final,
                "new_body": self._encoder.encode(row),
            }
            for row in rows
        ]
        with self._engine.begin() as connection:
            connection.execute(replaced, values)

    def open_rows(self, account: AccountName) -> list[OutboxRow]:
        """Transactions that are not final, by nonce."""
        return self._select_rows(account, TRANSACTIONS.c.is_final.is_(False))

    def rows_from(self, account: AccountName, nonce: int) -> list[OutboxRow]:
        """Transactions from a nonce on."""
        return self._select_rows(account, TRANSACTIONS.c.nonce >= nonce)

    def job_rows(self, account: AccountName, job_id: JobId) -> list[OutboxRow]:
        """All transactions of a job, by nonce; abandoned ones too."""
        return self._select_rows(account, TRANSACTIONS.c.job_id == job_id)

    def row(self, account: AccountName, purpose: str) -> OutboxRow | None:
        """The transaction for a purpose."""
        found = self._select_rows(account, TRANSACTIONS.c.purpose == purpose)
        return found[0] if found else None

    def next_nonce(self, account: AccountName) -> int:
        """One more than the highest stored nonce; 0: none is stored."""
        wanted = select(func.max(TRANSACTIONS.c.nonce)).where(*_of(account))
        with self._readers.connect() as connection:
            highest = connection.execute(wanted).scalar()
        return 0 if highest is None else highest + 1

    def _select_rows(self, account: AccountName, condition: ColumnElement[bool]) -> list[OutboxRow]:
        wanted = (
            select(TRANSACTIONS.c.body)
            .where(*_of(account), condition)
            .order_by(TRANSACTIONS.c.nonce)
        )
        with self._readers.connect() as connection:
            return [self._rows.decode(body) for (body,) in connection.execute(wanted)]

    def _row(self, account: AccountName, row: OutboxRow) -> dict[str, object]:
        return {
            "chain_id": account.chain_id,
            "account": account.address,
            "nonce": row.nonce,
            "purpose": _purpose(row),
            "job_id": row.job_id or "",
            "is_final": False,
            "body": self._encoder.encode(row),
        }

    def _receipt_row(self, job_id: JobId, signed: SignedReceipt) -> dict[str, object]:
        receipt = signed.receipt
        return {
            "job_id": job_id,
            "node": receipt.node,
            "sequence": receipt.sequence,
            "round": receipt.round,
            "epoch": receipt.epoch,
            "score": receipt.score,
            "body": self._encoder.encode(signed),
        }


def _of(account: AccountName) -> tuple[ColumnElement[bool], ...]:
    table = TRANSACTIONS.c
    return table.chain_id == account.chain_id, table.account == account.address


def _purpose(row: OutboxRow) -> str:
    """An abandoned row leaves its purpose to the one that replaces it."""
    return f"{row.purpose}#{row.nonce}" if row.is_abandoned else row.purpose


def _replace(connection: Connection, table: Table, key: str, row: dict[str, object]) -> None:
    connection.execute(delete(table).where(table.c[key] == row[key]))
    connection.execute(insert(table), row)
