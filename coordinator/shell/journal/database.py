"""One writer and many readers on a journal's database, SQLite or PostgreSQL: its engine, its lock
or tenure against other coordinators, its witness, and the salvage of a damaged file's pages.

A number beside a SQLite file: how many transactions it must hold.

SQLite ends its write-ahead log at the first frame that is damaged and drops what follows without
a word. The witness tells. It is written after each commit without waiting for the disk: it may be
behind the database after a power cut, which says nothing; ahead of it, rows are gone.
"""

import fcntl
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3
from sqlalchemy import Engine, Table, create_engine, event, func, insert, select, update
from sqlalchemy.engine import URL, Connection, RootTransaction, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    NoSuchModuleError,
    OperationalError,
)

from coordinator.shell.journal.records import (
    JournalError,
    JournalLockedError,
    JournalUnreadableError,
)
from coordinator.shell.journal.schema import ENTRIES, JOBS, JOURNAL, METADATA, prepare_tables
from coordinator.shell.journal.tenure import (
    HeldTenure,
    TakenTenure,
    TenureClaim,
    boot_ms,
    nameless_claim,
    one_at_a_time,
    prepare_tenure,
    take_tenure,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import several

BUSY_TIMEOUT_MS = 30_000
_AGAIN_S = 0.2
_PRIVATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
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
    shown = url.render_as_string(hide_password=True)
    raise JournalError(
        f"the journal cannot be kept at {shown}: give a file, sqlite:///FILE or postgresql://..."
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


class FileLock:
    """An exclusive lock on ``FILE.lock``, which names the process that holds it."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            JournalLockedError: another process, or another journal of this one, holds it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_path = path.with_name(path.name + ".lock")
        self._descriptor = os.open(lock_path, _PRIVATE_FLAGS, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 20).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise JournalLockedError(
                f"the journal {path} is in use by a coordinator (process {holder}): "
                "stop that one, or give this one a data directory of its own"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would let two hold it."""
        os.close(self._descriptor)


def tenure_engine(url: URL) -> Engine:
    """An engine for a tenure's renewals, which gives up soon where the server does not answer."""
    limits = {"connect_timeout": 2, "tcp_user_timeout": 2_000}
    return create_engine(url, pool_size=1, isolation_level="AUTOCOMMIT", connect_args=limits)


_NUMBER_BYTES = 8
_CHECK_BYTES = 8


class Witness:
    """The file ``FILE.witness``."""

    def __init__(self, path: Path) -> None:
        witness_path = path.with_name(path.name + ".witness")
        self._descriptor = os.open(witness_path, _PRIVATE_FLAGS, 0o600)

    def number(self) -> int:
        """The number last written; 0 when the file is new or torn."""
        stored = os.pread(self._descriptor, _NUMBER_BYTES + _CHECK_BYTES, 0)
        number, check = stored[:_NUMBER_BYTES], stored[_NUMBER_BYTES:]
        return int.from_bytes(number, "big") if check == _check(number) else 0

    def write(self, number: int) -> None:
        """Replace the number. It only helps to detect damage, so a full disk does not stop it."""
        stored = number.to_bytes(_NUMBER_BYTES, "big")
        try:
            os.pwrite(self._descriptor, stored + _check(stored), 0)
        except OSError:
            return

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _check(number: bytes) -> bytes:
    return blake3(number).digest(length=_CHECK_BYTES)


_HEADER_BYTES = 100
_SMALL_BYTES = 64 << 20
_COMPANIONS = ("", "-wal", "-shm")


def salvage_database(path: Path) -> tuple[str, ...]:
    """Check a journal's file, and replace it by what can be saved of it when its pages are damaged.

    Raises:
        JournalUnreadableError: nothing can be saved; the file was not touched.
    """
    if not path.exists() or path.stat().st_size == 0:
        return ()
    problem = _problem(path)
    if not problem:
        return ()
    fresh = _beside(path, ".salvaged")
    _remove(fresh)
    readable = _lengthened_copy(path)
    rows = _copy_tables(readable, fresh)
    _remove(readable)
    if not rows:
        _remove(fresh)
        raise JournalUnreadableError(
            f"the journal {path} cannot be read at all ({problem}): "
            "restore a backup, or move it away to start anew"
        )
    aside = _free_name(path)
    for companion in _COMPANIONS:
        with suppress(FileNotFoundError):
            _beside(path, companion).rename(_beside(aside, companion))
    fresh.rename(path)
    finding = (
        f"the journal {path} was damaged ({problem}): {several(rows, 'row')} could be"
        f" saved, the damaged file is kept as {aside.name}"
    )
    return (finding,)


def _problem(path: Path) -> str:
    try:
        with closing(sqlite3.connect(path)) as connection:
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if answer == "ok" else str(answer).replace("\n", " ")


def _lengthened_copy(path: Path) -> Path:
    """A copy as long as its header says: SQLite does not read a file that was cut off."""
    copy = _beside(path, ".salvaging")
    shutil.copyfile(path, copy)
    with suppress(FileNotFoundError):
        shutil.copyfile(_beside(path, "-wal"), _beside(copy, "-wal"))
    with copy.open("r+b") as file:
        header = file.read(_HEADER_BYTES)
        page_bytes = int.from_bytes(header[16:18], "big")
        pages = int.from_bytes(header[28:32], "big")
        wanted_bytes = page_bytes * pages
        # A damaged header may name any size: more than the file holds twice over is not believed.
        if path.stat().st_size < wanted_bytes <= max(2 * path.stat().st_size, _SMALL_BYTES):
            file.truncate(wanted_bytes)
    return copy


def _copy_tables(damaged: Path, fresh: Path) -> int:
    """Copy every readable row. Returns how many there were."""
    engine = make_engine(URL.create("sqlite", database=str(fresh)))
    with engine.connect() as connection, closing(sqlite3.connect(damaged)) as source:
        prepare_tables(connection, str(fresh))
        with connection.begin():
            tables = [table for table in METADATA.sorted_tables if table is not JOURNAL]
            rows = sum(_copy_table(source, connection, table) for table in tables)
            _restore_heads(connection)
    # Its last connection closed, all is in the main file, so that one rename moves it.
    engine.dispose()
    return rows


def _copy_table(source: sqlite3.Connection, fresh: Connection, table: Table) -> int:
    """Copy from both ends towards the damage."""
    copied = 0
    for direction in ("ASC", "DESC"):
        for row in _readable_rows(source, table, direction):
            values = dict(zip(table.columns.keys(), row, strict=True))
            copied += fresh.execute(insert(table).prefix_with("OR IGNORE"), values).rowcount
    return copied


def _readable_rows(
    source: sqlite3.Connection, table: Table, direction: str
) -> Iterator[tuple[object, ...]]:
    columns = ", ".join(table.columns.keys())
    with suppress(sqlite3.DatabaseError):
        # By row number, which needs no index that may be damaged too. The names are our tables'.
        yield from source.execute(f"SELECT {columns} FROM {table.name} ORDER BY rowid {direction}")  # noqa: S608


def _restore_heads(connection: Connection) -> None:
    """Give jobs whose head was lost the one that their last row has."""
    newest = func.max(ENTRIES.c.sequence)
    query = select(ENTRIES.c.job_id, newest.label("last_sequence"), ENTRIES.c.chain)
    # SQLite takes the other columns of a group from the row that has the maximum.
    query = query.where(ENTRIES.c.job_id.not_in(select(JOBS.c.job_id))).group_by(ENTRIES.c.job_id)
    for job_id, sequence, chain in connection.execute(query).all():
        head = {"job_id": job_id, "last_sequence": sequence, "last_chain": chain}
        connection.execute(insert(JOBS), head)


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := _beside(path, f".damaged-{number}")).exists():
        number += 1
    return aside


def _remove(path: Path) -> None:
    for companion in _COMPANIONS:
        _beside(path, companion).unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class Database:
    """Transactions on the journal, one writer at a time.

    Attributes:
        findings: Damage of the database as a whole that was found, and repaired, at the opening.
        tenure: Leave to write to a database on a server; None: it is a file.
    """

    def __init__(self, url: URL, claim: TenureClaim | None = None) -> None:
        self.findings: tuple[str, ...] = ()
        self.tenure: HeldTenure | None = None
        self._where = url.render_as_string(hide_password=True)
        self._writing = threading.Lock()
        self._witness: Witness | None = None
        with ExitStack() as opening:
            self._open(url, claim or nameless_claim(), opening)
            self._resources = opening.pop_all()

    def _open(self, url: URL, claim: TenureClaim, opening: ExitStack) -> None:
        if is_sqlite(url):
            path = Path(str(url.database))
            # Locked before it is read: a repair of a file that another one writes would ruin it.
            opening.callback(FileLock(path).release)
            self.findings += salvage_database(path)
            self._witness = Witness(path)
            opening.callback(self._witness.close)
        engine = make_engine(url)
        self._readers = read_only(engine)
        opening.callback(engine.dispose)
        with self._explain_errors():
            self._writer = opening.enter_context(engine.connect())
            if is_sqlite(url):
                prepare_tables(self._writer, self._where)
            else:
                with one_at_a_time(self._writer):
                    prepare_tables(self._writer, self._where)
                    prepare_tenure(self._writer)
                self.tenure = self._take_tenure(tenure_engine(url), claim)
                opening.callback(self.tenure.release)
            self._commits = self._count_commits()

    def _take_tenure(self, engine: Engine, claim: TenureClaim) -> HeldTenure:
        while True:
            asked_ms = boot_ms()
            found = take_tenure(self._writer, claim.claimant)
            if isinstance(found, TakenTenure):
                return HeldTenure(engine, found, asked_ms, is_alone=claim.claimant.is_alone)
            claim.wait(found)

    def _count_commits(self) -> int:
        with self.reader() as connection:
            stored = connection.scalar(select(JOURNAL.c.commits)) or 0
        promised = self._witness.number() if self._witness else 0
        if promised > stored:
            finding = (
                f"the journal at {self._where} lost {several(promised - stored, 'transaction')} at"
                " its end: its write-ahead log was cut off or damaged. It goes on from what is left"
            )
            self.findings += (finding,)
        return max(stored, promised)

    @contextmanager
    def writer(self) -> Iterator[Connection]:
        """A transaction that is durable once the block ends without an error."""
        with self._writing, self._explain_errors():
            number = self._commits + 1
            with self._begin():
                yield self._writer
                self._writer.execute(update(JOURNAL).values(commits=number))
            self._commits = number
            if self._witness:
                self._witness.write(number)

    def _begin(self) -> RootTransaction:
        """Begin a transaction that this coordinator may write in. A server that restarts is waited
        for while the tenure lasts: nothing was written yet.
        """
        while True:
            transaction = None
            try:
                transaction = self._writer.begin()
                self.fence(self._writer)
            except BaseException as broken:
                if transaction is not None:
                    transaction.close()
                if self.tenure is None or not isinstance(broken, OperationalError):
                    raise
                self.tenure.check()
                self.tenure.wait(_AGAIN_S)
            else:
                return transaction

    def fence(self, connection: Connection) -> None:
        """Refuse a transaction on this database unless this coordinator drives until its end.

        Raises:
            TenureLostError: Another one drives, or may.
        """
        if self.tenure is not None:
            self.tenure.fence(connection)

    @property
    def takeover(self) -> str:
        """Sentence on who drove before this coordinator; empty: nobody else."""
        return "" if self.tenure is None else self.tenure.takeover

    @property
    def follows_another(self) -> bool:
        """Whether another coordinator drove before this one."""
        return self.tenure is not None and self.tenure.follows_another

    def check_driving(self) -> None:
        """Refuse once another coordinator may drive, by this machine's clock alone.

        Raises:
            TenureLostError: One may.
        """
        if self.tenure is not None:
            self.tenure.check()

    @contextmanager
    def reader(self) -> Iterator[Connection]:
        """A consistent view that blocks nobody."""
        with self._explain_errors(), self._readers.begin() as connection:
            yield connection

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            # Such as a NUL in a text, which PostgreSQL does not take. Nothing is wrong with it.
            detail = f"the journal cannot keep or look for what was asked: {error.orig}"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail) from error
        except DBAPIError as error:
            if full := disk_full_error(error, self._where):
                raise full from error
            raise JournalUnreadableError(
                f"the journal at {self._where} failed: {error.orig}. "
                "Restart the coordinator: it checks the journal and repairs what it can"
            ) from error

    def close(self) -> None:
        """Close every connection; the lock goes last."""
        with self._writing:
            self._resources.close()
