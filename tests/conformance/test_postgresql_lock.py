from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text

from coordinator.shell.journal.database import journal_url
from coordinator.shell.journal.journal import Journal
from coordinator.shell.journal.records import Entry, JournalUnreadableError
from hypergpu.ids import JobId
from tests.conformance.journal_stores import postgres_schema

JOB = JobId("job-00000000000a")


@pytest.fixture
def url() -> Iterator[str]:
    with postgres_schema() as made:
        yield made


def cut_connections(url: str) -> None:
    """End every other session that holds an advisory lock, as a restart of the server does."""
    holders = text(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND (classid, "
        "objid) IN (SELECT (key >> 32 & 4294967295)::bigint::oid, (key & 4294967295)::bigint::oid "
        "FROM (SELECT hashtextextended('hypergpu journal ' || current_schema(), 0) AS key) AS k)"
    )
    engine = create_engine(journal_url(url))
    with engine.begin() as connection:
        connection.execute(holders)
    engine.dispose()


def test_a_coordinator_that_lost_its_lock_writes_no_more(url: str) -> None:
    journal = Journal(url)
    cut_connections(url)
    for _ in range(2):
        with pytest.raises(JournalUnreadableError, match=r"(?i)restart the coordinator"):
            journal.append([Entry(JOB, 0, 0, "RoundRecorded", b"{}")])
    successor = Journal(url)
    successor.append([Entry(JOB, 0, 0, "RoundRecorded", b"{}")])
    assert len(successor.read(JOB).entries) == 1
    successor.close()
    journal.close()
