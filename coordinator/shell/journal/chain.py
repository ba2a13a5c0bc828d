"""The hash chain of a job's rows: whatever is changed, added, dropped or moved breaks what follows.

A row's chain value is BLAKE3 over ``previous chain[32] | u64 sequence | i64 at_ms | u32 length |
kind | body``, big-endian. The chain starts at BLAKE3 of ``hypergpu/v1/journal`` and the job's id.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta

from coordinator.shell.journal.records import Entry, Head, JournalConflictError, Reading, Snapshot
from hypergpu.ids import JobId

CHAIN_BYTES = 32
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
        checked = _check_row(job_id, head, row)
        if isinstance(checked, str):
            return Reading(tuple(entries), head, damage_text(job_id, head, checked))
        entry, head = checked
        entries.append(entry)
    problem = "" if end is None else _problem_at_end(head, end)
    return Reading(tuple(entries), head, problem and damage_text(job_id, head, problem))


def damage_text(job_id: JobId, last_good: Head, problem: str) -> str:
    """Description of a problem behind ``last_good``."""
    return f"journal of {job_id}: {problem}; the last good row is {last_good.sequence}"


def _check_row(job_id: JobId, head: Head, row: Sequence[object]) -> tuple[Entry, Head] | str:
    """The row as an entry with the head behind it, or why it cannot be believed."""
    wanted = head.sequence + 1
    try:
        stored = msgspec.convert(tuple(row), StoredRow)
        kind = stored.kind.decode()
    except (msgspec.ValidationError, UnicodeDecodeError):
        return f"row {wanted} is malformed"
    if stored.sequence != wanted:
        return f"row {wanted} is missing, row {stored.sequence} follows"
    entry = Entry(job_id, stored.sequence, stored.at_ms, kind, stored.body_json)
    following = next_head(head, entry)
    if following.chain != stored.chain:
        return f"row {wanted} does not match its chain value"
    return entry, following


def _problem_at_end(head: Head, end: Head) -> str:
    if head.sequence < end.sequence:
        return f"rows {head.sequence + 1} to {end.sequence} are missing"
    if head != end:
        return f"the chain should end at row {end.sequence} with another value"
    return ""
