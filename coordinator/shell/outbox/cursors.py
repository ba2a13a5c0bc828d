"""How far each job's journal was sent. Calls block until durable: call them from a thread.

The cursor is ours, not the receiver's: one that lost its data cannot make us forget.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import BigInteger, Column, MetaData, String, Table, delete, insert, select, update

from coordinator.shell.store.journal.engines import journal_url, make_engine, read_only
from hypergpu.ids import JobId

FILE = "events.sqlite"
_METADATA = MetaData()
_CURSORS = Table(
    "event_cursors",
    _METADATA,
    Column("job_id", String, primary_key=True),
    Column("sequence", BigInteger, nullable=False),
    Column("newest_id", String, nullable=False),
)


class SentCursor(NamedTuple):
    """How far one job's journal was sent."""

    sequence: int
    """Sequence of the next row to send."""
    newest_id: str = ""
    """Id of the newest entry that the receiver acknowledged; empty: it has none of the job."""


class CursorStore:
    """Cursors in a SQLite file of their own, or in the coordinator's PostgreSQL."""

    def __init__(self, database_url: str, folder: Path) -> None:
        """Open it, and make its table where there is none.

        Args:
            database_url: As of the journal; empty: a file in ``folder``.
            folder: The coordinator's data.
        """
        self._engine = make_engine(journal_url(database_url or str(folder / FILE)))
        self._readers = read_only(self._engine)
        _METADATA.create_all(self._engine)

    def cursors(self) -> dict[JobId, SentCursor]:
        """Every job's."""
        with self._readers.begin() as connection:
            rows = connection.execute(select(_CURSORS)).all()
        return {JobId(row.job_id): SentCursor(row.sequence, row.newest_id) for row in rows}

    def keep(self, cursors: Mapping[JobId, SentCursor]) -> None:
        """Store these jobs' cursors in place of theirs before, all or nothing."""
        with self._engine.begin() as connection:
            for job_id, cursor in cursors.items():
                values = cursor._asdict()
                is_job = _CURSORS.c.job_id == job_id
                outcome = connection.execute(update(_CURSORS).where(is_job).values(values))
                if not outcome.rowcount:
                    connection.execute(insert(_CURSORS), {"job_id": job_id, **values})

    def forget(self, job_id: JobId) -> None:
        """Drop the cursor of a job that is gone."""
        with self._engine.begin() as connection:
            connection.execute(delete(_CURSORS).where(_CURSORS.c.job_id == job_id))

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()
