"""One writer and many readers on a journal's database, locked against other coordinators."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError

from coordinator.shell.journal.engine import disk_full_error, is_sqlite, make_engine, read_only
from coordinator.shell.journal.lock import FileLock, lock_database, unlock_database
from coordinator.shell.journal.page_salvage import salvage_database
from coordinator.shell.journal.records import JournalUnreadableError
from coordinator.shell.journal.schema import JOURNAL, prepare_tables
from coordinator.shell.journal.witness import Witness
from hypergpu.units import several


class Database:
    """Transactions on the journal, one writer at a time.

    Attributes:
        findings: Damage of the database as a whole that was found, and repaired, at the opening.
    """

    def __init__(self, url: URL) -> None:
        self.findings: tuple[str, ...] = ()
        self._where = url.render_as_string(hide_password=True)
        self._writing = threading.Lock()
        self._witness: Witness | None = None
        with ExitStack() as opening:
            self._open(url, opening)
            self._resources = opening.pop_all()

    def _open(self, url: URL, opening: ExitStack) -> None:
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
            if not is_sqlite(url):
                lock_database(self._writer, self._where)
                opening.callback(unlock_database, self._writer)
            prepare_tables(self._writer, self._where)
            self._commits = self._count_commits()

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
            if self._writer.invalidated:
                # It would connect again by itself, without the lock that the old connection held.
                raise JournalUnreadableError(
                    f"the connection to the journal at {self._where} was lost, and its lock with "
                    "it: restart the coordinator"
                )
            number = self._commits + 1
            with self._writer.begin():
                yield self._writer
                self._writer.execute(update(JOURNAL).values(commits=number))
            self._commits = number
            if self._witness:
                self._witness.write(number)

    @contextmanager
    def reader(self) -> Iterator[Connection]:
        """A consistent view that blocks nobody."""
        with self._explain_errors(), self._readers.begin() as connection:
            yield connection

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
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
