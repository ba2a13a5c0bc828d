"""One writer and many readers on a journal's database, SQLite or PostgreSQL, held against other
coordinators by a lock or a tenure.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import Engine, select, update
from sqlalchemy.engine import URL, Connection, RootTransaction
from sqlalchemy.exc import DataError, DBAPIError, OperationalError

from coordinator.shell.store.journal.engines import (
    disk_full_error,
    is_sqlite,
    make_engine,
    read_only,
    tenure_engine,
)
from coordinator.shell.store.journal.file_lock import FileLock
from coordinator.shell.store.journal.records import JournalUnreadableError
from coordinator.shell.store.journal.salvage import salvage_database
from coordinator.shell.store.journal.schema import JOURNAL, prepare_tables
from coordinator.shell.store.journal.tenure import (
    HeldTenure,
    TakenTenure,
    TenureClaim,
    boot_ms,
    nameless_claim,
    one_at_a_time,
    prepare_tenure,
    take_tenure,
)
from coordinator.shell.store.journal.witness import Witness
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import several

_AGAIN_S = 0.2


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
        with ExitStack() as stack:
            self._open(url, claim or nameless_claim(), stack)
            self._resources = stack.pop_all()

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
            tenure = take_tenure(self._writer, claim.claimant)
            if isinstance(tenure, TakenTenure):
                return HeldTenure(engine, tenure, asked_ms, is_alone=claim.claimant.is_alone)
            claim.wait(tenure)

    def _count_commits(self) -> int:
        with self.reader() as connection:
            stored_commits = connection.scalar(select(JOURNAL.c.commits)) or 0
        promised_commits = self._witness.number() if self._witness else 0
        if promised_commits > stored_commits:
            loss_text = several(promised_commits - stored_commits, "transaction")
            finding = (
                f"the journal at {self._where} lost {loss_text} at"
                " its end: its write-ahead log was cut off or damaged. It goes on from what is left"
            )
            self.findings += (finding,)
        return max(stored_commits, promised_commits)

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
            except BaseException as error:
                if transaction is not None:
                    transaction.close()
                if self.tenure is None or not isinstance(error, OperationalError):
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
