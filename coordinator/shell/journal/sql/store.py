"""The journal proper: jobs' rows, heads, snapshots and request ids in SQL."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import LargeBinary, cast, delete, insert, select, update
from sqlalchemy.engine import Connection

from coordinator.shell.journal.chain import (
    Span,
    StoredRow,
    believable,
    following,
    genesis,
    reading,
    snapshot_digest,
)
from coordinator.shell.journal.records import (
    Damage,
    Entry,
    Head,
    JournalConflictError,
    Reading,
    RequestClaim,
    Snapshot,
    SnapshotReading,
)
from coordinator.shell.journal.sql.database import Database
from coordinator.shell.journal.sql.engine import journal_url
from coordinator.shell.journal.sql.registry import SqlRegistry
from coordinator.shell.journal.sql.tables import ENTRIES, JOBS, REQUESTS, SNAPSHOTS
from hypergpu.ids import Digest, JobId

SNAPSHOTS_KEPT = 2


class SqlJournal(SqlRegistry):
    """A journal in a SQLite file or a PostgreSQL database, for one coordinator at a time.

    Attributes:
        findings: What was wrong with the database as a whole when it was opened, and what was done.
    """

    def __init__(self, url: str) -> None:
        """Lock, check and migrate the database, making it when it is not there.

        Args:
            url: A file's path, ``sqlite:///FILE`` or ``postgresql://...``.

        Raises:
            JournalError: it is locked by another coordinator, too new, or unreadable.
        """
        self._database = Database(journal_url(url))
        SqlRegistry.__init__(self, self._database)
        self.findings = self._database.findings

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        with self._database.writer() as connection:
            known = {
                job_id: _head(connection, job_id) for job_id in {one.job_id for one in entries}
            }
            heads: dict[JobId, Head] = {}
            rows: list[dict[str, Any]] = []
            for entry in entries:
                job_id = entry.job_id
                head = heads.get(job_id) or known[job_id] or genesis(job_id)
                heads[job_id] = following(job_id, head, entry)
                rows.append(_row(entry, heads[job_id].chain))
            _claim(connection, claims)
            if rows:
                connection.execute(insert(ENTRIES), rows)
            for job_id, head in heads.items():
                _store_head(connection, job_id, head, is_new=known[job_id] is None)

    def read(
        self, job_id: JobId, from_sequence: int = 0, *, limit: int = 0, after: Head | None = None
    ) -> Reading:
        wanted = select(
            ENTRIES.c.sequence,
            ENTRIES.c.at_ms,
            # As bytes: a damaged character must reach the chain's check, not fail in the driver.
            cast(ENTRIES.c.kind, LargeBinary),
            ENTRIES.c.body_json,
            ENTRIES.c.chain,
        ).where(ENTRIES.c.job_id == job_id, ENTRIES.c.sequence >= from_sequence)
        wanted = wanted.order_by(ENTRIES.c.sequence)
        with self._database.reader() as connection:
            end = _head(connection, job_id) or genesis(job_id)
            before = _chain_at(connection, job_id, from_sequence - 1)
            found = connection.execute(wanted.limit(limit + 1) if limit else wanted).all()
        rows = [StoredRow(*row) for row in found]
        is_cut = 0 < limit < len(rows)
        span = Span(rows[:limit] if is_cut else rows, before, end, is_cut)
        return reading(job_id, span, from_sequence, after)

    def head(self, job_id: JobId) -> Head | None:
        with self._database.reader() as connection:
            return _head(connection, job_id)

    def jobs(self) -> tuple[JobId, ...]:
        with self._database.reader() as connection:
            names = connection.scalars(select(JOBS.c.job_id).order_by(JOBS.c.number)).all()
        return tuple(JobId(name) for name in names)

    def cut_back(self, job_id: JobId, head: Head) -> None:
        with self._database.writer() as connection:
            for table in (ENTRIES, SNAPSHOTS):
                behind = (table.c.job_id == job_id) & (table.c.sequence > head.sequence)
                connection.execute(delete(table).where(behind))
            is_new = _head(connection, job_id) is None
            _store_head(connection, job_id, head, is_new=is_new)

    def remove_job(self, job_id: JobId) -> None:
        with self._database.writer() as connection:
            for table in (ENTRIES, SNAPSHOTS, REQUESTS, JOBS):
                connection.execute(delete(table).where(table.c.job_id == job_id))

    def request(self, request_id: str) -> RequestClaim | None:
        wanted = select(REQUESTS).where(REQUESTS.c.request_id == request_id)
        with self._database.reader() as connection:
            row = connection.execute(wanted).one_or_none()
        if row is None:
            return None
        return RequestClaim(row.request_id, JobId(row.job_id), Digest(row.fingerprint))

    def save_snapshot(self, job_id: JobId, sequence: int, state_json: bytes) -> None:
        with self._database.writer() as connection:
            chain = _chain_at(connection, job_id, sequence)
            if chain is None:
                raise JournalConflictError(f"journal of {job_id}: there is no row {sequence}")
            snapshot = Snapshot(job_id, Head(sequence, chain), state_json)
            of_job = SNAPSHOTS.c.job_id == job_id
            connection.execute(delete(SNAPSHOTS).where(of_job, SNAPSHOTS.c.sequence == sequence))
            connection.execute(insert(SNAPSHOTS), _snapshot_row(snapshot))
            newest = select(SNAPSHOTS.c.sequence).where(of_job)
            newest = newest.order_by(SNAPSHOTS.c.sequence.desc()).limit(SNAPSHOTS_KEPT)
            kept = connection.scalars(newest).all()
            connection.execute(delete(SNAPSHOTS).where(of_job, SNAPSHOTS.c.sequence.not_in(kept)))

    def snapshot(self, job_id: JobId) -> SnapshotReading:
        wanted = select(SNAPSHOTS).where(SNAPSHOTS.c.job_id == job_id)
        with self._database.reader() as connection:
            head = _head(connection, job_id) or genesis(job_id)
            rows = connection.execute(wanted.order_by(SNAPSHOTS.c.sequence.desc())).all()
        damages: list[Damage] = []
        for row in rows:
            snapshot = Snapshot(job_id, Head(row.sequence, row.chain), row.state_json)
            damage = believable(snapshot, row.digest, head)
            if damage is None:
                return SnapshotReading(snapshot, tuple(damages))
            damages.append(damage)
        return SnapshotReading(None, tuple(damages))

    def close(self) -> None:
        self._database.close()


def _row(entry: Entry, chain: bytes) -> dict[str, Any]:
    return {
        "job_id": entry.job_id,
        "sequence": entry.sequence,
        "at_ms": entry.at_ms,
        "kind": entry.kind,
        "body_json": entry.body_json,
        "chain": chain,
    }


def _snapshot_row(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "job_id": snapshot.job_id,
        "sequence": snapshot.head.sequence,
        "chain": snapshot.head.chain,
        "state_json": snapshot.state_json,
        "digest": snapshot_digest(snapshot),
    }


def _head(connection: Connection, job_id: JobId) -> Head | None:
    wanted = select(JOBS.c.last_sequence, JOBS.c.last_chain).where(JOBS.c.job_id == job_id)
    row = connection.execute(wanted).one_or_none()
    return None if row is None else Head(row.last_sequence, row.last_chain)


def _chain_at(connection: Connection, job_id: JobId, sequence: int) -> bytes | None:
    wanted = select(ENTRIES.c.chain).where(ENTRIES.c.job_id == job_id)
    chain: bytes | None = connection.scalar(wanted.where(ENTRIES.c.sequence == sequence))
    return chain


def _store_head(connection: Connection, job_id: JobId, head: Head, *, is_new: bool) -> None:
    values = {"last_sequence": head.sequence, "last_chain": head.chain}
    if is_new:
        connection.execute(insert(JOBS), {"job_id": job_id} | values)
    else:
        connection.execute(update(JOBS).where(JOBS.c.job_id == job_id).values(**values))


def _claim(connection: Connection, claims: Sequence[RequestClaim]) -> None:
    for claim in claims:
        taken = select(REQUESTS.c.job_id).where(REQUESTS.c.request_id == claim.request_id)
        if job_id := connection.scalar(taken):
            raise JournalConflictError(f"request id {claim.request_id!r} is taken by {job_id}")
        connection.execute(
            insert(REQUESTS),
            {
                "request_id": claim.request_id,
                "job_id": claim.job_id,
                "fingerprint": claim.fingerprint,
            },
        )
