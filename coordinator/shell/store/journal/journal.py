"""The journal proper: jobs' rows in a hash chain, heads, snapshots, request ids.
Calls block until durable: call them from a thread. A full disk leaves the journal as it was.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta
from msgspec.structs import asdict
from sqlalchemy import LargeBinary, cast, delete, insert, select, update
from sqlalchemy.engine import Connection

from coordinator.shell.store.journal.database import Database
from coordinator.shell.store.journal.engines import journal_url
from coordinator.shell.store.journal.records import (
    Entry,
    Head,
    JournalConflictError,
    Reading,
    Recovery,
    RequestClaim,
    Snapshot,
)
from coordinator.shell.store.journal.registry import Registry
from coordinator.shell.store.journal.schema import (
    ENTRIES,
    JOBS,
    REQUESTS,
    SNAPSHOTS,
)
from coordinator.shell.store.journal.tenure import TenureClaim
from hypergpu.ids import JobId

_GENESIS = b"hypergpu/v1/journal\0"
_SNAPSHOT = b"hypergpu/v1/snapshot\0"
_LEAST, _MOST = -(2**63), 2**63 - 1


class StoredRow(NamedTuple):
    """Columns of a stored row. A damaged store may give back other types than these."""

    sequence: Annotated[int, Meta(ge=0, le=_MOST)]
    at_ms: Annotated[int, Meta(ge=_LEAST, le=_MOST)]
    kind: bytes
    body_json: bytes
    chain: bytes


def genesis(job_id: JobId) -> Head:
    """Start of a job's chain."""
    return Head(-1, blake3(_GENESIS + job_id.encode()).digest())


def next_head(head: Head, entry: Entry) -> Head:
    """Head of the chain once ``entry`` is written.

    Raises:
        JournalConflictError: it does not follow on ``head``.
    """
    if entry.sequence != head.sequence + 1:
        raise JournalConflictError(
            f"journal of {entry.job_id}: row {entry.sequence} cannot follow on row {head.sequence};"
            " another writer went first, or an event was lost: restart to replay"
        )
    kind = entry.kind.encode()
    hasher = blake3(head.chain)
    hasher.update(entry.sequence.to_bytes(8, "big"))
    hasher.update(entry.at_ms.to_bytes(8, "big", signed=True))
    hasher.update(len(kind).to_bytes(4, "big"))
    hasher.update(kind)
    hasher.update(entry.body_json)
    return Head(entry.sequence, hasher.digest())


def snapshot_digest(snapshot: Snapshot) -> bytes:
    """Digest that is stored beside a snapshot and must match it."""
    hasher = blake3(_SNAPSHOT)
    hasher.update(len(snapshot.job_id).to_bytes(4, "big") + snapshot.job_id.encode())
    hasher.update(snapshot.head.sequence.to_bytes(8, "big"))
    hasher.update(snapshot.head.chain)
    hasher.update(snapshot.state_json)
    return hasher.digest()


def snapshot_damage(stored: Snapshot, digest: bytes, head: Head) -> str:
    """Damage of a stored snapshot of a job that ends at ``head``; empty when it holds."""
    if snapshot_digest(stored) != digest:
        problem = "does not match its digest"
    elif stored.head.sequence > head.sequence:
        problem = f"is ahead of the journal, which ends at row {head.sequence}"
    else:
        return ""
    snapshot = f"snapshot {stored.head.sequence} of {stored.job_id}"
    return f"{snapshot} {problem}; an older one is used"


def check_rows(
    job_id: JobId, after: Head, rows: Iterable[Sequence[object]], end: Head | None
) -> Reading:
    """Follow the chain from ``after`` as far as it holds.

    Args:
        job_id: The job whose rows these are.
        after: The head that the first row must follow on.
        rows: Columns as in `StoredRow`, of any type, in order of sequence.
        end: Where the job's chain must end; None when ``rows`` may stop before it.
    """
    entries: list[Entry] = []
    head = after
    for row in rows:
        outcome = _check_row(job_id, head, row)
        if isinstance(outcome, str):
            return Reading(tuple(entries), head, damage_text(job_id, head, outcome))
        entry, head = outcome
        entries.append(entry)
    problem = "" if end is None else _problem_at_end(head, end)
    return Reading(tuple(entries), head, problem and damage_text(job_id, head, problem))


def damage_text(job_id: JobId, last_good: Head, problem: str) -> str:
    """Description of a problem behind ``last_good``."""
    return f"journal of {job_id}: {problem}; the last good row is {last_good.sequence}"


def _check_row(job_id: JobId, head: Head, row: Sequence[object]) -> tuple[Entry, Head] | str:
    """The row as an entry with the head behind it, or why it cannot be believed."""
    next_sequence = head.sequence + 1
    try:
        stored_row = msgspec.convert(tuple(row), StoredRow)
        kind = stored_row.kind.decode()
    except (msgspec.ValidationError, UnicodeDecodeError):
        return f"row {next_sequence} is malformed"
    if stored_row.sequence != next_sequence:
        return f"row {next_sequence} is missing, row {stored_row.sequence} follows"
    entry = Entry(job_id, stored_row.sequence, stored_row.at_ms, kind, stored_row.body_json)
    head_after = next_head(head, entry)
    if head_after.chain != stored_row.chain:
        return f"row {next_sequence} does not match its chain value"
    return entry, head_after


def _problem_at_end(head: Head, end: Head) -> str:
    if head.sequence < end.sequence:
        return f"rows {head.sequence + 1} to {end.sequence} are missing"
    if head != end:
        return f"the chain should end at row {end.sequence} with another value"
    return ""


SNAPSHOTS_KEPT = 2


class Journal(Registry):
    """A journal in a SQLite file or a PostgreSQL database, for one coordinator at a time.

    Attributes:
        database: Where it lies.
        findings: Damage of the database as a whole that was found and mended at the opening.
    """

    def __init__(self, url: str, claim: TenureClaim | None = None) -> None:
        """Lock and check the database, making its tables when they are not there.

        Args:
            url: A file's path, ``sqlite:///FILE`` or ``postgresql://...``.
            claim: Who drives the jobs of a database on a server; None: somebody who does not wait.

        Raises:
            JournalError: it is locked by another coordinator, of another version, or unreadable.
        """
        self.database = Database(journal_url(url), claim)
        super().__init__(self.database)
        self.findings = self.database.findings

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        """Write entries of one or several jobs in one transaction. A new job starts at sequence 0.

        Args:
            entries: Entries, each job's in order.
            claims: Request ids that are taken from now on.

        Raises:
            JournalConflictError: an entry does not follow or a request id is taken. None is kept.
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
            kept_sequences = connection.scalars(newest).all()
            connection.execute(
                delete(SNAPSHOTS).where(is_of_job, SNAPSHOTS.c.sequence.not_in(kept_sequences))
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
    outcome = connection.execute(update(JOBS).where(JOBS.c.job_id == job_id).values(**values))
    if not outcome.rowcount:
        connection.execute(insert(JOBS), {"job_id": job_id} | values)


def _store_claims(connection: Connection, claims: Sequence[RequestClaim]) -> None:
    for claim in claims:
        query = select(REQUESTS.c.job_id).where(REQUESTS.c.request_id == claim.request_id)
        if job_id := connection.scalar(query):
            raise JournalConflictError(f"request id {claim.request_id!r} is taken by {job_id}")
        connection.execute(insert(REQUESTS), asdict(claim))
