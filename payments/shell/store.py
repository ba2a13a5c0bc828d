"""Receipts, the state of each job's fold, and the transactions of the coordinator's key.

A commit holds receipts and the cursor that they were made at, or a transaction's signed bytes
before anybody sees them: a start after a kill goes on from here. A commit survives a power cut: it
is in a SQLite file of its own (WAL, synchronous = FULL, writers take the lock when they begin), or
in the coordinator's PostgreSQL. All methods block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.statements import SignedReceipt
from payments.core.transactions import OutboxRow

FILE = "payments.sqlite"
_BUSY_TIMEOUT_S = 30
_LONG = BigInteger().with_variant(Integer, "sqlite")
_METADATA = MetaData()

JOBS = Table(
    "payment_jobs",
    _METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("cursor", _LONG, nullable=False),
    Column("mark", String(64), nullable=False),
    Column("state", LargeBinary, nullable=False),
)
RECEIPTS = Table(
    "payment_receipts",
    _METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("node", String(42), primary_key=True),
    Column("sequence", _LONG, primary_key=True),
    Column("epoch", _LONG, nullable=False),
    Column("score", _LONG, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
TRANSACTIONS = Table(
    "payment_transactions",
    _METADATA,
    Column("chain_id", _LONG, primary_key=True),
    Column("account", String(42), primary_key=True),
    Column("nonce", _LONG, primary_key=True),
    Column("purpose", String(200), nullable=False),
    Column("job_id", String(32), nullable=False, index=True),
    Column("is_closed", Boolean, nullable=False),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("chain_id", "account", "purpose"),
    Index("payment_transactions_by_state", "chain_id", "account", "is_closed"),
)
VALUES = Table(
    "payment_values",
    _METADATA,
    Column("name", String(200), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)


class AccountName(NamedTuple):
    """One key on one chain."""

    chain_id: int
    address: Address

    def owns(self) -> ColumnElement[bool]:
        """Condition on `TRANSACTIONS`."""
        table = TRANSACTIONS.c
        return (table.chain_id == self.chain_id) & (table.account == self.address)


class JobRecord(NamedTuple):
    """A job's fold up to a row of its journal."""

    cursor: int
    """Sequence of the next row."""
    mark: str
    """Digest of the row before it."""
    state: bytes
    """JSON of the fold's state."""


class PaymentStore:
    """The database of the payments. Threads may share it."""

    def __init__(
        self, database_url: str, folder: Path, fence: Callable[[Connection], None] = lambda _: None
    ) -> None:
        """Open it.

        Args:
            database_url: SQLAlchemy URL; empty: a SQLite file in ``folder``.
            folder: The coordinator's data.
            fence: Raises in a transaction that this coordinator may not write in.

        Raises:
            HyperGPUError: FOLDER_UNUSABLE, the database cannot be used.
        """
        self._engine = _open_engine(database_url, folder)
        self._fence = fence
        self._readers = self._engine.execution_options(is_reader=True)
        self._encoder = msgspec.json.Encoder()
        self._receipts = msgspec.json.Decoder(SignedReceipt)
        self._rows = msgspec.json.Decoder(OutboxRow)
        # SQLAlchemy spends more time on each row's parameters than the database on the row.
        self._add_receipts = str(insert(RECEIPTS).compile(self._engine))

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    @contextmanager
    def _writer(self) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            self._fence(connection)
            yield connection

    def keep_job(
        self, job_id: JobId, record: JobRecord, receipts: Sequence[SignedReceipt] = ()
    ) -> None:
        """Replace a job's fold and add its new receipts: all of it or nothing.

        Raises:
            IntegrityError: A receipt of this sequence is there already.
        """
        with self._writer() as connection:
            _replace(connection, JOBS, {"job_id": job_id, **record._asdict()})
            if receipts:
                rows = [self._receipt_row(job_id, signed_receipt) for signed_receipt in receipts]
                connection.exec_driver_sql(self._add_receipts, rows)

    def jobs(self) -> dict[JobId, JobRecord]:
        """The fold of each job."""
        with self._readers.connect() as connection:
            rows = connection.execute(select(JOBS)).all()
        return {JobId(row.job_id): JobRecord(row.cursor, row.mark, row.state) for row in rows}

    def keep_value(self, name: str, value: bytes) -> None:
        """Replace a value by name."""
        with self._writer() as connection:
            _replace(connection, VALUES, {"name": name, "value": value})

    def value(self, name: str) -> bytes:
        """A value by name; empty: there is none."""
        with self._readers.connect() as connection:
            query = select(VALUES.c.value).where(VALUES.c.name == name)
            return connection.execute(query).scalar() or b""

    def receipts(
        self, job_id: JobId, node: NodeId, first: int = 0, limit: int = 1_000
    ) -> list[SignedReceipt]:
        """A node's receipts in a job from a sequence on, in order."""
        table = RECEIPTS.c
        query = (
            select(table.body)
            .where(table.job_id == job_id, table.node == node, table.sequence >= first)
            .order_by(table.sequence)
            .limit(limit)
        )
        with self._readers.connect() as connection:
            return [self._receipts.decode(body) for (body,) in connection.execute(query)]

    def epoch_scores(self, job_id: JobId) -> dict[NodeId, dict[int, int]]:
        """Score of each node's receipts in each epoch."""
        table = RECEIPTS.c
        query = (
            select(table.node, table.epoch, func.sum(table.score))
            .where(table.job_id == job_id)
            .group_by(table.node, table.epoch)
            .order_by(table.node, table.epoch)
        )
        scores: dict[NodeId, dict[int, int]] = {}
        with self._readers.connect() as connection:
            for node, epoch, score in connection.execute(query):
                scores.setdefault(NodeId(node), {})[epoch] = int(score)
        return scores

    def add_rows(self, account: AccountName, rows: Sequence[OutboxRow]) -> None:
        """Store transactions, signed and not sent yet.

        Raises:
            IntegrityError: A nonce or a purpose is used.
        """
        values = [
            {
                "chain_id": account.chain_id,
                "account": account.address,
                "nonce": row.nonce,
                "job_id": row.job_id or "",
                **self._changing_columns(row),
            }
            for row in rows
        ]
        with self._writer() as connection:
            connection.execute(insert(TRANSACTIONS), values)

    def update_rows(self, account: AccountName, rows: Sequence[OutboxRow]) -> None:
        """Replace stored transactions."""
        if not rows:
            return
        condition = account.owns() & (TRANSACTIONS.c.nonce == bindparam("at_nonce"))
        values = [{"at_nonce": row.nonce, **self._changing_columns(row)} for row in rows]
        with self._writer() as connection:
            connection.execute(update(TRANSACTIONS).where(condition), values)

    def open_rows(self, account: AccountName, nonce: int) -> list[OutboxRow]:
        """Transactions that are not closed, and all from a nonce on."""
        table = TRANSACTIONS.c
        return self._select_rows(account, or_(table.is_closed.is_(False), table.nonce >= nonce))

    def job_rows(self, account: AccountName, job_id: JobId) -> list[OutboxRow]:
        """All transactions of a job, by nonce; abandoned ones too."""
        return self._select_rows(account, TRANSACTIONS.c.job_id == job_id)

    def row(self, account: AccountName, purpose: str) -> OutboxRow | None:
        """The transaction for a purpose."""
        rows = self._select_rows(account, TRANSACTIONS.c.purpose == purpose)
        return rows[0] if rows else None

    def next_nonce(self, account: AccountName) -> int:
        """One more than the highest stored nonce; 0: none is stored."""
        query = select(func.max(TRANSACTIONS.c.nonce)).where(account.owns())
        with self._readers.connect() as connection:
            highest = connection.execute(query).scalar()
        return 0 if highest is None else highest + 1

    def _select_rows(self, account: AccountName, condition: ColumnElement[bool]) -> list[OutboxRow]:
        table = TRANSACTIONS.c
        query = select(table.body).where(account.owns(), condition).order_by(table.nonce)
        with self._readers.connect() as connection:
            return [self._rows.decode(body) for (body,) in connection.execute(query)]

    def _changing_columns(self, row: OutboxRow) -> dict[str, object]:
        return {
            # An abandoned row leaves its purpose to the one that replaces it.
            "purpose": f"{row.purpose}#{row.nonce}" if row.is_abandoned else row.purpose,
            "is_closed": row.is_closed,
            "body": self._encoder.encode(row),
        }

    def _receipt_row(self, job_id: JobId, signed: SignedReceipt) -> tuple[object, ...]:
        """Values of `RECEIPTS`, in the order of its columns."""
        receipt, body = signed.receipt, self._encoder.encode(signed)
        return job_id, receipt.node, receipt.sequence, receipt.epoch, receipt.score, body


def _replace(connection: Connection, table: Table, row: dict[str, object]) -> None:
    (key,) = table.primary_key
    connection.execute(delete(table).where(key == row[key.name]))
    connection.execute(insert(table), row)


def _open_engine(database_url: str, folder: Path) -> Engine:
    try:
        if "://" in database_url:
            url = make_url(database_url)
        else:
            url = URL.create("sqlite", database=database_url or str(folder / FILE))
        if url.get_backend_name() == "sqlite":
            # The journal may be any file; the payments lie in one of their own beside it.
            beside = Path(url.database or "").with_name(FILE)
            engine = _sqlite_engine(url.set(database=str(beside)))
        else:
            url = url.set(drivername="postgresql+psycopg")
            engine = create_engine(url, pool_pre_ping=True, paramstyle="format")
        _METADATA.create_all(engine)
    except ArgumentError as wrong:
        raise HyperGPUError(Reason.FOLDER_UNUSABLE, f"the payments' database: {wrong}") from None
    except (ModuleNotFoundError, NoSuchModuleError):
        raise HyperGPUError(
            Reason.FOLDER_UNUSABLE,
            "payments in PostgreSQL need psycopg",
            fix="pip install 'hypergpu[postgresql]'",
        ) from None
    return engine


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: Any, _record: object) -> None:
    # The driver must not begin transactions by itself: it would begin them as readers, and a reader
    # that wants to write is refused when another has written meanwhile.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


def _begin(connection: Connection) -> None:
    is_reader = connection.get_execution_options().get("is_reader", False)
    connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")
