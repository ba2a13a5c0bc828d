"""One writer and many readers on a journal's database, locked against other coordinators."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import select, update
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError

from coordinator.shell.journal.records import JournalUnreadableError
from coordinator.shell.journal.sql.engine import (
    disk_full,
    is_sqlite,
    make_engine,
    reading,
    sqlite_path,
)
from coordinator.shell.journal.sql.lock import FileLock, lock_database, unlock_database
from coordinator.shell.journal.sql.salvage import salvage_database
from coordinator.shell.journal.sql.schema import upgrade
from coordinator.shell.journal.sql.tables import COMMITS
from coordinator.shell.journal.sql.witness import Witness
from hypergpu.units import several


class Database:
    """Transactions on the journal, one writer at a time.

    Attributes:
        findings: What was found wrong, and mended, when it was opened; for people.
    """

    def __init__(self, url: URL) -> None:
        self.where = url.render_as_string(hide_password=True)
        self.findings: tuple[str, ...] = ()
        self._writing = threading.Lock()
        self._witness: Witness | None = None
        with ExitStack() as opening:
            self._open(url, opening)
            self._held = opening.pop_all()

    def _open(self, url: URL, opening: ExitStack) -> None:
        if is_sqlite(url):
            # Locked before it is looked at: mending a file that another one writes would ruin it.
            opening.callback(FileLock(sqlite_path(url)).release)
            self.findings += salvage_database(sqlite_path(url))
            self._witness = Witness(sqlite_path(url))
            opening.callback(self._witness.close)
        self._engine = make_engine(url)
        opening.callback(self._engine.dispose)
        with self._explain_errors():
            self._writer = opening.enter_context(self._engine.connect())
            if not is_sqlite(url):
                lock_database(self._writer, self.where)
                opening.callback(unlock_database, self._writer)
            upgrade(self._writer, self.where)
            self._commits = self._count_commits()

    def _count_commits(self) -> int:
        with self.reader() as connection:
            stored = connection.scalar(select(COMMITS.c.number)) or 0
        promised = self._witness.number() if self._witness else 0
        if promised > stored:
            finding = (
                f"the journal at {self.where} lost {several(promised - stored, 'transaction')} at"
                " its end: its write-ahead log was cut off or damaged. It goes on from what is left"
            )
            self.findings += (finding,)
        return max(stored, promised)

    @contextmanager
    def writer(self) -> Iterator[Connection]:
        """A transaction that is durable once the block ends without an error."""
        with self._writing, self._explain_errors():
            if self._writer.invalidated:
                # It would connect again by itself, without the lock that the old connection held.
                raise JournalUnreadableError(
                    f"the connection to the journal at {self.where} was lost, and its lock with "
                    "it: restart the coordinator"
                )
            number = self._commits + 1
            with self._writer.begin():
                yield self._writer
                self._writer.execute(update(COMMITS).values(number=number))
            self._commits = number
            if self._witness:
                self._witness.write(number)

    @contextmanager
    def reader(self) -> Iterator[Connection]:
        """A consistent view that blocks nobody."""
        with (
            self._explain_errors(),
            self._engine.connect() as connection,
            reading(connection).begin(),
        ):
            yield connection

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if refusal := disk_full(error, self.where):
                raise refusal from error
            raise JournalUnreadableError(
                f"the journal at {self.where} failed: {error.orig}. "
                "Restart the coordinator: it checks the journal and mends what it can"
            ) from error

    def close(self) -> None:
        """Close every connection; the lock goes last."""
        with self._writing:
            self._held.close()
