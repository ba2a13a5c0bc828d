"""The hash chain of a job's rows: whatever is changed, added, dropped or moved breaks what follows.

A row's chain value is BLAKE3 over ``previous chain[32] | u64 sequence | i64 at_ms | u32 length |
kind | body``, big-endian. The chain starts at BLAKE3 of ``hypergpu/v1/journal`` and the job's id.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blake3 import blake3

from coordinator.shell.journal.records import (
    Damage,
    Entry,
    Head,
    JournalConflictError,
    Reading,
    Snapshot,
)
from hypergpu.ids import JobId

CHAIN_BYTES = 32
_GENESIS = b"hypergpu/v1/journal\0"
_SNAPSHOT = b"hypergpu/v1/snapshot\0"
_INTEGER_MAX = 2**63


class StoredRow(NamedTuple):
    """A row as the store gave it back. Nothing about it is believed, not even its types."""

    sequence: object
    at_ms: object
    kind: object
    body_json: object
    chain: object


class Span(NamedTuple):
    """What a store found for a read."""

    rows: Sequence[StoredRow]
    """From the first wanted on, in order of sequence."""
    before: object
    """Chain value of the stored row before the first wanted; None when there is no such row."""
    end: Head
    """Where the job's chain must end."""
    is_cut: bool
    """The limit was reached: ``rows`` may stop before the end."""


def genesis(job_id: JobId) -> Head:
    """Where every job's chain starts."""
    return Head(-1, blake3(_GENESIS + job_id.encode()).digest())


def link(previous: bytes, entry: Entry) -> bytes:
    """Chain value of ``entry`` when it follows ``previous``."""
    kind = entry.kind.encode()
    hasher = blake3(previous)
    hasher.update(entry.sequence.to_bytes(8, "big"))
    hasher.update(entry.at_ms.to_bytes(8, "big", signed=True))
    hasher.update(len(kind).to_bytes(4, "big"))
    hasher.update(kind)
    hasher.update(entry.body_json)
    return hasher.digest()


def snapshot_digest(snapshot: Snapshot) -> bytes:
    """What must be stored beside a snapshot for it to be believed."""
    hasher = blake3(_SNAPSHOT)
    hasher.update(len(snapshot.job_id).to_bytes(4, "big") + snapshot.job_id.encode())
    hasher.update(snapshot.head.sequence.to_bytes(8, "big"))
    hasher.update(snapshot.head.chain)
    hasher.update(snapshot.state_json)
    return hasher.digest()


def believable(stored: Snapshot, digest: bytes, head: Head) -> Damage | None:
    """What is wrong with a stored snapshot of a job that ends at ``head``; None when it holds."""
    if snapshot_digest(stored) != digest:
        problem = "does not match its digest"
    elif stored.head.sequence > head.sequence:
        problem = f"is ahead of the journal, which ends at row {head.sequence}"
    else:
        return None
    return Damage(
        stored.job_id,
        stored.head.sequence,
        head,
        f"snapshot {stored.head.sequence} of {stored.job_id} {problem}; an older one is used",
    )


def reading(job_id: JobId, span: Span, from_sequence: int, after: Head | None) -> Reading:
    """Check what a store found, starting from ``after``, or else from the row before."""
    if from_sequence > span.end.sequence + 1:
        return Reading((), span.end)
    if after is None and from_sequence == 0:
        after = genesis(job_id)
    if after is None:
        if not isinstance(span.before, bytes):
            unknown = Head(from_sequence - 2, b"")
            problem = f"row {from_sequence - 1} is missing"
            return Reading((), unknown, damage(job_id, unknown, problem))
        after = Head(from_sequence - 1, span.before)
    return check_rows(job_id, after, span.rows, None if span.is_cut else span.end)


def check_rows(job_id: JobId, after: Head, rows: Iterable[StoredRow], end: Head | None) -> Reading:
    """Follow the chain from ``after`` as far as it holds.

    Args:
        job_id: Whose rows.
        after: The head that the first row must follow on.
        rows: In order of sequence.
        end: Where the job's chain must end; None when ``rows`` may stop before it.
    """
    entries: list[Entry] = []
    head = after
    for row in rows:
        followed = _check_row(job_id, head, row)
        if isinstance(followed, str):
            return Reading(tuple(entries), head, damage(job_id, head, followed))
        entry, head = followed
        entries.append(entry)
    problem = "" if end is None else _problem_at_end(head, end)
    return Reading(tuple(entries), head, damage(job_id, head, problem) if problem else None)


def following(job_id: JobId, head: Head, entry: Entry) -> Head:
    """The head once ``entry`` is written.

    Raises:
        JournalConflictError: it does not follow on ``head``.
    """
    if entry.sequence != head.sequence + 1:
        raise JournalConflictError(
            f"journal of {job_id}: row {entry.sequence} cannot follow on row {head.sequence}; "
            "another writer went first, or an event was lost: restart to replay"
        )
    return Head(entry.sequence, link(head.chain, entry))


def damage(job_id: JobId, last_good: Head, problem: str) -> Damage:
    """Put what is wrong behind ``last_good`` into words."""
    reason = f"journal of {job_id}: {problem}; the last good row is {last_good.sequence}"
    return Damage(job_id, last_good.sequence + 1, last_good, reason)


def _check_row(job_id: JobId, head: Head, row: StoredRow) -> tuple[Entry, Head] | str:
    """The row as an entry with the head behind it, or why it cannot be believed."""
    wanted = head.sequence + 1
    entry = _entry(job_id, row)
    if entry is None:
        return f"row {wanted} is malformed"
    if entry.sequence != wanted:
        return f"row {wanted} is missing, row {entry.sequence} follows"
    value = link(head.chain, entry)
    if value != row.chain:
        return f"row {wanted} does not match its chain value"
    return entry, Head(wanted, value)


def _entry(job_id: JobId, row: StoredRow) -> Entry | None:
    if not isinstance(row.sequence, int) or not isinstance(row.at_ms, int):
        return None
    if not isinstance(row.kind, bytes) or not isinstance(row.body_json, bytes):
        return None
    if not 0 <= row.sequence < _INTEGER_MAX or not -_INTEGER_MAX <= row.at_ms < _INTEGER_MAX:
        return None
    try:
        return Entry(job_id, row.sequence, row.at_ms, row.kind.decode(), row.body_json)
    except UnicodeDecodeError:
        return None


def _problem_at_end(head: Head, end: Head) -> str:
    if head.sequence < end.sequence:
        return f"rows {head.sequence + 1} to {end.sequence} are missing"
    if head != end:
        return f"the chain should end at row {end.sequence} with another value"
    return ""
