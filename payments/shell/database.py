"""Tables of the payments package, and connections on which a commit survives a power cut.

SQLite in a file of its own (WAL, synchronous = FULL, writers take the lock when they begin), or the
coordinator's PostgreSQL.
"""

from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
)
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from hypergpu.errors import HyperGPUError, Reason

FILE = "payments.sqlite"
BUSY_TIMEOUT_MS = 30_000
_LONG = BigInteger().with_variant(Integer, "sqlite")
METADATA = MetaData()

JOBS = Table(
    "payment_jobs",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("cursor", _LONG, nullable=False),
    Column("mark", String(64), nullable=False),
    Column("state", LargeBinary, nullable=False),
)
RECEIPTS = Table(
    "payment_receipts",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("node", String(42), primary_key=True),
    Column("sequence", _LONG, primary_key=True),
    Column("round", _LONG, nullable=False),
    Column("epoch", _LONG, nullable=False),
    Column("score", _LONG, nullable=False),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("job_id", "node", "round"),
)
TRANSACTIONS = Table(
    "payment_transactions",
    METADATA,
    Column("chain_id", _LONG, primary_key=True),
    Column("account", String(42), primary_key=True),
    Column("nonce", _LONG, primary_key=True),
    Column("purpose", String(200), nullable=False),
    Column("job_id", String(32), nullable=False),
    Column("is_final", Boolean, nullable=False),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("chain_id", "account", "purpose"),
    Index("payment_transactions_by_state", "chain_id", "account", "is_final"),
    Index("payment_transactions_by_job", "job_id"),
)
VALUES = Table(
    "payment_values",
    METADATA,
    Column("name", String(200), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)


def open_engine(database_url: str, folder: Path) -> Engine:
    """Connect and see that the tables are there. Blocks.

    Args:
        database_url: SQLAlchemy URL; empty: a SQLite file in ``folder``.
        folder: The coordinator's data.

    Raises:
        HyperGPUError: FOLDER_UNUSABLE, the database cannot be used.
    """
    try:
        url = make_url(database_url) if "://" in database_url else _file_url(database_url, folder)
        engine = _make_engine(url)
        METADATA.create_all(engine)
    except ArgumentError as wrong:
        raise HyperGPUError(Reason.FOLDER_UNUSABLE, f"the payments' database: {wrong}") from None
    except (ModuleNotFoundError, NoSuchModuleError):
        raise HyperGPUError(
            Reason.FOLDER_UNUSABLE,
            "payments in PostgreSQL need psycopg",
            fix="pip install 'hypergpu[postgresql]'",
        ) from None
    return engine


def _file_url(path: str, folder: Path) -> URL:
    """The coordinator's journal may be any file; the payments lie in one of their own beside it."""
    return URL.create("sqlite", database=str((Path(path).parent if path else folder) / FILE))


def _make_engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        postgresql = url.set(drivername="postgresql+psycopg")
        return create_engine(postgresql, pool_pre_ping=True)
    if url.database and Path(url.database).name != FILE:
        url = url.set(database=str(Path(url.database).parent / FILE))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: Any, _record: object) -> None:
    # The driver must not begin transactions by itself: it would begin them as readers, and a reader
    # that wants to write is refused when another has written meanwhile.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _begin(connection: Connection) -> None:
    is_reader = connection.get_execution_options().get("is_reader", False)
    connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")
