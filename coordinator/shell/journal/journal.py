"""The journal proper: jobs' rows, heads, snapshots and request ids.

Calls block until durable: call them from a thread, in any number. A full disk raises
`HyperGPUError` (DISK_FULL) and leaves the journal as it was. Any other error leaves it open whether
the last call took effect: stop and start again, a replay finds out.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import LargeBinary, cast, delete, insert, select, update
from sqlalchemy.engine import Connection

from coordinator.shell.journal.chain import (
    check_rows,
    damage_text,
    genesis,
    next_head,
    snapshot_damage,
    snapshot_digest,
)
from coordinator.shell.journal.database import Database
from coordinator.shell.journal.engine import journal_url
from coordinator.shell.journal.records import (
    Entry,
    Head,
    JournalConflictError,
    Reading,
    Recovery,
    RequestClaim,
    Snapshot,
)
from coordinator.shell.journal.registry import Registry
from coordinator.shell.journal.schema import ENTRIES, JOBS, REQUESTS, SNAPSHOTS
from hypergpu.ids import JobId

SNAPSHOTS_KEPT = 2


class Journal(Registry):
    """A journal in a SQLite file or a PostgreSQL database, for one coordinator at a time.

    Attributes:
        findings: Damage of the database as a whole that was found, and repaired, at the opening.
    """

    def __init__(self, url: str) -> None:
        """Lock and check the database, making its tables when they are not there.

        Args:
            url: A file's path, ``sqlite:///FILE`` or ``postgresql://...``.

        Raises:
            JournalError: it is locked by another coordinator, of another version, or unreadable.
        """
        super().__init__(Database(journal_url(url)))
        self.findings = self._database.findings

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        """Write entries of one or several jobs in one transaction. A new job starts at sequence 0.

        Args:
            entries: Entries, each job's in order.
            claims: Request ids that are taken from now on.

        Raises:
            JournalConflictError: an entry does not follow on its job's last, or a request id is
                taken. Nothing was written.
        """
        heads: dict[JobId, Head] = {}
        rows: list[dict[str, Any]] = []
        with self._database.writer() as connection:
            for entry in entries:
                job_id = entry.job_id
                head = heads.get(job_id) or _stored_head(connection, job_id)
                heads[job_id] = next_head(head, entry)
                rows.append(asdict(entry) | {"chain": heads[job_id].chain})
            _store_claims(connection, claims)
            if rows:
                connection.execute(insert(ENTRIES), rows)
            for job_id, head in heads.items():
                _store_head(connection, job_id, head)

    def read(self, job_id: JobId, from_sequence: int = 0, *, limit: int = 0) -> Reading:
        """Rows from ``from_sequence`` on, each checked against the chain. An unknown job has none.

        Args:
            job_id: The job.
            from_sequence: The first wanted.
            limit: At most so many; 0 is all.
        """
        with self._database.reader() as connection:
            end = _stored_head(connection, job_id)
            if from_sequence > end.sequence + 1:
                return Reading((), end)
            after = _head_at(connection, job_id, from_sequence - 1)
            if after is None:
                last_good = Head(from_sequence - 2, b"")
                problem = f"row {from_sequence - 1} is missing"
                return Reading((), last_good, damage_text(job_id, last_good, problem))
            return _read_behind(connection, job_id, after, limit)

    def jobs(self) -> tuple[JobId, ...]:
        """Every job, in order of creation."""
        with self._database.reader() as connection:
            names = connection.scalars(select(JOBS.c.job_id).order_by(JOBS.c.number)).all()
        return tuple(JobId(name) for name in names)

    def remove_job(self, job_id: JobId) -> None:
        """Forget the job wholly, its request ids too."""
        with self._database.writer() as connection:
            for table in (ENTRIES, SNAPSHOTS, REQUESTS, JOBS):
                connection.execute(delete(table).where(table.c.job_id == job_id))

    def request(self, request_id: str) -> RequestClaim | None:
        """The claim to a request id; None while it is free."""
        rows = self._rows(select(REQUESTS).where(REQUESTS.c.request_id == request_id))
        return RequestClaim(**rows[0]) if rows else None

    def save_snapshot(self, job_id: JobId, sequence: int, state_json: bytes) -> None:
        """Keep the state after event ``sequence``; the two newest snapshots of a job are kept.

        Raises:
            JournalConflictError: the job has no such row.
        """
        is_of_job = SNAPSHOTS.c.job_id == job_id
        with self._database.writer() as connection:
            head = _head_at(connection, job_id, sequence)
            if head is None:
                raise JournalConflictError(f"journal of {job_id}: there is no row {sequence}")
            digest = snapshot_digest(Snapshot(job_id, head, state_json))
            row = asdict(head) | {"job_id": job_id, "state_json": state_json, "digest": digest}
            connection.execute(delete(SNAPSHOTS).where(is_of_job, SNAPSHOTS.c.sequence == sequence))
            connection.execute(insert(SNAPSHOTS), row)
            newest = select(SNAPSHOTS.c.sequence).where(is_of_job)
            newest = newest.order_by(SNAPSHOTS.c.sequence.desc()).limit(SNAPSHOTS_KEPT)
            kept = connection.scalars(newest).all()
            connection.execute(
                delete(SNAPSHOTS).where(is_of_job, SNAPSHOTS.c.sequence.not_in(kept))
            )

    def recover(self, job_id: JobId) -> Recovery:
        """Find the newest snapshot that holds and the rows behind it that hold; cut off the rest.

        Rows before the snapshot are not read: damage there shows when somebody watches the job from
        its beginning, and does not stop the job.
        """
        with self._database.reader() as connection:
            snapshot, damages = _newest_snapshot(connection, job_id)
            after = snapshot.head if snapshot else genesis(job_id)
            reading = _read_behind(connection, job_id, after)
        if reading.damage:
            self._cut_back(job_id, reading.head)
            damages.append(reading.damage)
        return Recovery(snapshot, reading.entries, tuple(damages))

    def close(self) -> None:
        """Let go of files, connections and the lock."""
        self._database.close()

    def _cut_back(self, job_id: JobId, head: Head) -> None:
        """Forget every row and snapshot behind ``head``, which becomes the job's end."""
        with self._database.writer() as connection:
            for table in (ENTRIES, SNAPSHOTS):
                is_behind = (table.c.job_id == job_id) & (table.c.sequence > head.sequence)
                connection.execute(delete(table).where(is_behind))
            _store_head(connection, job_id, head)


def _read_behind(connection: Connection, job_id: JobId, after: Head, limit: int = 0) -> Reading:
    query = select(
        ENTRIES.c.sequence,
        ENTRIES.c.at_ms,
        # As bytes: a damaged character must reach the chain's check, not fail in the driver.
        cast(ENTRIES.c.kind, LargeBinary),
        ENTRIES.c.body_json,
        ENTRIES.c.chain,
    ).where(ENTRIES.c.job_id == job_id, ENTRIES.c.sequence > after.sequence)
    query = query.order_by(ENTRIES.c.sequence)
    rows = connection.execute(query.limit(limit + 1) if limit else query).all()
    if 0 < limit < len(rows):
        return check_rows(job_id, after, rows[:limit], None)
    return check_rows(job_id, after, rows, _stored_head(connection, job_id))


def _newest_snapshot(connection: Connection, job_id: JobId) -> tuple[Snapshot | None, list[str]]:
    """The newest snapshot that holds, and the damages of newer ones."""
    query = select(SNAPSHOTS).where(SNAPSHOTS.c.job_id == job_id)
    head = _stored_head(connection, job_id)
    damages: list[str] = []
    for row in connection.execute(query.order_by(SNAPSHOTS.c.sequence.desc())).all():
        snapshot = Snapshot(job_id, Head(row.sequence, row.chain), row.state_json)
        damage = snapshot_damage(snapshot, row.digest, head)
        if not damage:
            return snapshot, damages
        damages.append(damage)
    return None, damages


def _stored_head(connection: Connection, job_id: JobId) -> Head:
    query = select(JOBS.c.last_sequence, JOBS.c.last_chain).where(JOBS.c.job_id == job_id)
    row = connection.execute(query).one_or_none()
    return genesis(job_id) if row is None else Head(row.last_sequence, row.last_chain)


def _head_at(connection: Connection, job_id: JobId, sequence: int) -> Head | None:
    """The head after row ``sequence``; None when there is no such row."""
    if sequence < 0:
        return genesis(job_id)
    query = select(ENTRIES.c.chain).where(ENTRIES.c.job_id == job_id)
    chain: bytes | None = connection.scalar(query.where(ENTRIES.c.sequence == sequence))
    return None if chain is None else Head(sequence, chain)


def _store_head(connection: Connection, job_id: JobId, head: Head) -> None:
    values = {"last_sequence": head.sequence, "last_chain": head.chain}
    changed = connection.execute(update(JOBS).where(JOBS.c.job_id == job_id).values(**values))
    if not changed.rowcount:
        connection.execute(insert(JOBS), {"job_id": job_id} | values)


def _store_claims(connection: Connection, claims: Sequence[RequestClaim]) -> None:
    for claim in claims:
        taken = select(REQUESTS.c.job_id).where(REQUESTS.c.request_id == claim.request_id)
        if job_id := connection.scalar(taken):
            raise JournalConflictError(f"request id {claim.request_id!r} is taken by {job_id}")
        connection.execute(insert(REQUESTS), asdict(claim))
