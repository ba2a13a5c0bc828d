"""Every journal there is, with a way to reopen it and to damage what it stored."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from sqlalchemy import Engine, create_engine, delete, text, update
from sqlalchemy.engine import make_url

from coordinator.shell.journal.interface import Journal
from coordinator.shell.journal.memory import MemoryJournal
from coordinator.shell.journal.sql.engine import journal_url
from coordinator.shell.journal.sql.store import SqlJournal
from coordinator.shell.journal.sql.tables import COMMITS, ENTRIES, METADATA, SNAPSHOTS
from hypergpu.ids import JobId

POSTGRES_URL = os.environ.get("HYPERGPU_TEST_POSTGRES_URL", "")


class JournalStore(Protocol):
    """One journal under test."""

    journal: Journal

    def reopen(self) -> Journal:
        """Close it and open it again, as a restart does."""

    def overwrite_body(self, job_id: JobId, sequence: int, body_json: bytes) -> None:
        """Change a stored row behind the journal's back."""

    def drop_rows(self, job_id: JobId, first: int, last: int) -> None:
        """Lose stored rows behind the journal's back."""

    def overwrite_snapshot(self, job_id: JobId, sequence: int, state_json: bytes) -> None:
        """Change a stored snapshot behind the journal's back."""


class MemoryStore:
    """The journal that forgets; reopening changes nothing."""

    def __init__(self) -> None:
        self.memory = MemoryJournal()
        self.journal: Journal = self.memory

    def reopen(self) -> Journal:
        return self.journal

    def overwrite_body(self, job_id: JobId, sequence: int, body_json: bytes) -> None:
        rows = self.memory.rows[job_id]
        rows[sequence] = rows[sequence]._replace(body_json=body_json)

    def drop_rows(self, job_id: JobId, first: int, last: int) -> None:
        del self.memory.rows[job_id][first : last + 1]

    def overwrite_snapshot(self, job_id: JobId, sequence: int, state_json: bytes) -> None:
        kept = self.memory.stored_snapshots[job_id]
        self.memory.stored_snapshots[job_id] = [
            one._replace(digest=bytes(32)) if one.snapshot.head.sequence == sequence else one
            for one in kept
        ]


class SqlStore:
    """A journal in a database, with a second connection for the damage."""

    def __init__(self, url: str, raw: Engine) -> None:
        self._url = url
        self._raw = raw
        self.journal: Journal = SqlJournal(url)

    def reopen(self) -> Journal:
        self.journal.close()
        self.journal = SqlJournal(self._url)
        return self.journal

    def overwrite_body(self, job_id: JobId, sequence: int, body_json: bytes) -> None:
        row = (ENTRIES.c.job_id == job_id) & (ENTRIES.c.sequence == sequence)
        with self._raw.begin() as connection:
            connection.execute(update(ENTRIES).where(row).values(body_json=body_json))

    def drop_rows(self, job_id: JobId, first: int, last: int) -> None:
        rows = (ENTRIES.c.job_id == job_id) & ENTRIES.c.sequence.between(first, last)
        with self._raw.begin() as connection:
            connection.execute(delete(ENTRIES).where(rows))

    def overwrite_snapshot(self, job_id: JobId, sequence: int, state_json: bytes) -> None:
        row = (SNAPSHOTS.c.job_id == job_id) & (SNAPSHOTS.c.sequence == sequence)
        with self._raw.begin() as connection:
            connection.execute(update(SNAPSHOTS).where(row).values(state_json=state_json))


@contextmanager
def memory_store(_folder: Path, _postgres_url: str) -> Iterator[JournalStore]:
    yield MemoryStore()


@contextmanager
def sqlite_store(folder: Path, _postgres_url: str) -> Iterator[JournalStore]:
    path = str(folder / "journal.sqlite3")
    raw = create_engine(journal_url(path))
    store = SqlStore(path, raw)
    yield store
    store.journal.close()
    raw.dispose()


@contextmanager
def postgres_store(_folder: Path, url: str) -> Iterator[JournalStore]:
    raw = create_engine(journal_url(url))
    store = SqlStore(url, raw)
    yield store
    store.journal.close()
    with raw.begin() as connection:
        for table in METADATA.sorted_tables:
            if table is not COMMITS:
                connection.execute(delete(table))
    raw.dispose()


@contextmanager
def postgres_schema() -> Iterator[str]:
    """The URL of an empty schema, gone afterwards."""
    name = f"hypergpu_test_{secrets.token_hex(6)}"
    server = create_engine(journal_url(POSTGRES_URL))
    with server.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    url = make_url(POSTGRES_URL).update_query_dict({"options": f"-csearch_path={name}"})
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        with server.begin() as connection:
            connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
        server.dispose()


STORES: dict[str, Callable[[Path, str], AbstractContextManager[JournalStore]]] = {
    "memory": memory_store,
    "sqlite": sqlite_store,
} | ({"postgresql": postgres_store} if POSTGRES_URL else {})
