"""Engines on a journal's database, and its address."""

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from coordinator.shell.store.journal.records import JournalError
from hypergpu.errors import HyperGPUError, Reason

BUSY_TIMEOUT_MS = 30_000
_READ_ONLY = "hypergpu_read_only"
_POSTGRES_DISK_FULL = "53100"
_SQLITE_FULL = frozenset(
    # A write cut short by the system is a full disk, a quota or a size limit: each heals.
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
)


def journal_url(text: str) -> URL:
    """Read a database URL; a plain path is a SQLite file.

    Raises:
        JournalError: it is neither SQLite with a file nor PostgreSQL.
    """
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise JournalError(f"the journal's URL cannot be read: {error}") from None
    if is_sqlite(url) and url.database not in (None, "", ":memory:"):
        return url.set(drivername="sqlite")
    if url.get_backend_name() in {"postgresql", "postgres"}:
        return url.set(drivername="postgresql+psycopg")
    shown_url = url.render_as_string(hide_password=True)
    raise JournalError(
        f"the journal cannot be kept at {shown_url}: give a file, sqlite:///FILE or postgresql://..."
    )


def make_engine(url: URL) -> Engine:
    """An engine whose transactions begin as writers."""
    if is_sqlite(url):
        return _sqlite_engine(url)
    try:
        return create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    except (ModuleNotFoundError, NoSuchModuleError):
        raise JournalError(
            "a journal in PostgreSQL needs psycopg: pip install 'hypergpu[postgresql]'"
        ) from None


def read_only(engine: Engine) -> Engine:
    """The same engine, whose transactions take no write lock and see one state throughout."""
    options: dict[str, Any] = {_READ_ONLY: True}
    if engine.dialect.name == "postgresql":
        # By default each statement sees what was committed before it: a head that is read after its
        # rows would be ahead of them, which looks like damage.
        options["isolation_level"] = "REPEATABLE READ"
    return engine.execution_options(**options)


def is_sqlite(url: URL) -> bool:
    """Whether the journal is a file of ours."""
    return url.get_backend_name() == "sqlite"


def disk_full_error(error: DBAPIError, where: str) -> HyperGPUError | None:
    """The error to raise for a full disk; None when a database error is about something else."""
    cause = error.orig
    code = getattr(cause, "sqlite_errorcode", None)
    if code in _SQLITE_FULL or getattr(cause, "sqlstate", None) == _POSTGRES_DISK_FULL:
        return HyperGPUError(Reason.DISK_FULL, f"the journal at {where} cannot grow: {cause}")
    return None


def _sqlite_engine(url: URL) -> Engine:
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: Any, _record: object) -> None:
    # The driver must not begin transactions by itself: it would begin them as readers, and 667 of
    # 800 concurrent read-then-write transactions were lost that way when measured.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = ON")


def _begin(connection: Connection) -> None:
    is_read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")


def tenure_engine(url: URL) -> Engine:
    """An engine for a tenure's renewals, which gives up soon where the server does not answer."""
    limits = {"connect_timeout": 2, "tcp_user_timeout": 2_000}
    return create_engine(url, pool_size=1, isolation_level="AUTOCOMMIT", connect_args=limits)
