"""Every journal there is, with a way to reopen it and to damage what it stored."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, delete, text, update
from sqlalchemy.engine import make_url

from coordinator.shell.store.journal.engines import journal_url
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.schema import ENTRIES, JOURNAL, METADATA, SNAPSHOTS
from hypergpu.ids import JobId
from tests.programs import POSTGRES_VARIABLE

POSTGRES_URL = os.environ.get(POSTGRES_VARIABLE, "")


class JournalStore:
    """A journal in a database, with a second connection for the damage."""

    def __init__(self, url: str, raw: Engine) -> None:
        self.url = url
        self._raw = raw
        self.journal = Journal(url)

    def reopen(self) -> Journal:
        """Close it and open it again, as a restart does."""
        self.journal.close()
        self.journal = Journal(self.url)
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
def sqlite_store(folder: Path, _postgres_url: str) -> Iterator[JournalStore]:
    path = str(folder / "journal.sqlite3")
    raw = create_engine(journal_url(path))
    store = JournalStore(path, raw)
    yield store
    store.journal.close()
    raw.dispose()


@contextmanager
def postgres_store(_folder: Path, url: str) -> Iterator[JournalStore]:
    raw = create_engine(journal_url(url))
    store = JournalStore(url, raw)
    yield store
    store.journal.close()
    with raw.begin() as connection:
        for table in METADATA.sorted_tables:
            if table is not JOURNAL:
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
    "sqlite": sqlite_store,
    "postgresql": postgres_store,
}
DATABASES = ("sqlite", pytest.param("postgresql", marks=pytest.mark.needs("database")))
"""Their names, for parametrised tests."""
