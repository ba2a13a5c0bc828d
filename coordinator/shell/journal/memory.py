"""A journal that forgets when the process ends: for simulations, tests and throw-away jobs."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from coordinator.shell.journal.chain import (
    Span,
    StoredRow,
    believable,
    following,
    genesis,
    reading,
    snapshot_digest,
)
from coordinator.shell.journal.memory_registry import MemoryRegistry
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
from hypergpu.ids import JobId

SNAPSHOTS_KEPT = 2


class StoredSnapshot(NamedTuple):
    """A snapshot beside the digest it must match."""

    snapshot: Snapshot
    digest: bytes


class MemoryJournal(MemoryRegistry):
    """Every method is one critical section, as a transaction would be."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        MemoryRegistry.__init__(self, self._lock)
        self.rows: dict[JobId, list[StoredRow]] = {}
        self.stored_snapshots: dict[JobId, list[StoredSnapshot]] = {}
        self._heads: dict[JobId, Head] = {}
        self._claims: dict[str, RequestClaim] = {}

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        with self._lock:
            heads: dict[JobId, Head] = {}
            written: list[tuple[JobId, StoredRow]] = []
            for entry in entries:
                job_id = entry.job_id
                head = heads.get(job_id) or self._heads.get(job_id) or genesis(job_id)
                heads[job_id] = following(job_id, head, entry)
                row = StoredRow(
                    entry.sequence,
                    entry.at_ms,
                    entry.kind.encode(),
                    entry.body_json,
                    heads[job_id].chain,
                )
                written.append((job_id, row))
            for claim in claims:
                if claim.request_id in self._claims:
                    raise JournalConflictError(f"request id {claim.request_id!r} is taken")
            for job_id, row in written:
                self.rows.setdefault(job_id, []).append(row)
            self._heads |= heads
            self._claims |= {claim.request_id: claim for claim in claims}

    def read(
        self, job_id: JobId, from_sequence: int = 0, *, limit: int = 0, after: Head | None = None
    ) -> Reading:
        with self._lock:
            rows = self.rows.get(job_id, [])
            wanted = [row for row in rows if _number(row) >= from_sequence]
            before = [row.chain for row in rows if _number(row) == from_sequence - 1]
            end = self._heads.get(job_id, genesis(job_id))
        cut = wanted[:limit] if limit else wanted
        span = Span(cut, before[0] if before else None, end, len(cut) < len(wanted))
        return reading(job_id, span, from_sequence, after)

    def head(self, job_id: JobId) -> Head | None:
        with self._lock:
            return self._heads.get(job_id)

    def jobs(self) -> tuple[JobId, ...]:
        with self._lock:
            return tuple(self._heads)

    def cut_back(self, job_id: JobId, head: Head) -> None:
        with self._lock:
            rows = self.rows.get(job_id, [])
            self.rows[job_id] = [row for row in rows if _number(row) <= head.sequence]
            kept = self.stored_snapshots.get(job_id, [])
            self.stored_snapshots[job_id] = [
                stored for stored in kept if stored.snapshot.head.sequence <= head.sequence
            ]
            self._heads[job_id] = head

    def remove_job(self, job_id: JobId) -> None:
        with self._lock:
            self.rows.pop(job_id, None)
            self.stored_snapshots.pop(job_id, None)
            self._heads.pop(job_id, None)
            self._claims = {
                name: claim for name, claim in self._claims.items() if claim.job_id != job_id
            }

    def request(self, request_id: str) -> RequestClaim | None:
        with self._lock:
            return self._claims.get(request_id)

    def save_snapshot(self, job_id: JobId, sequence: int, state_json: bytes) -> None:
        with self._lock:
            rows = [row for row in self.rows.get(job_id, []) if row.sequence == sequence]
            if not rows:
                raise JournalConflictError(f"journal of {job_id}: there is no row {sequence}")
            snapshot = Snapshot(job_id, Head(sequence, _chain(rows[0])), state_json)
            stored = self.stored_snapshots.setdefault(job_id, [])
            stored[:] = [one for one in stored if one.snapshot.head.sequence != sequence]
            stored.append(StoredSnapshot(snapshot, snapshot_digest(snapshot)))
            stored.sort(key=lambda one: one.snapshot.head.sequence)
            del stored[:-SNAPSHOTS_KEPT]

    def snapshot(self, job_id: JobId) -> SnapshotReading:
        with self._lock:
            stored = list(reversed(self.stored_snapshots.get(job_id, [])))
            head = self._heads.get(job_id, genesis(job_id))
        damages: list[Damage] = []
        for snapshot, digest in stored:
            damage = believable(snapshot, digest, head)
            if damage is None:
                return SnapshotReading(snapshot, tuple(damages))
            damages.append(damage)
        return SnapshotReading(None, tuple(damages))

    def close(self) -> None:
        """Nothing is held."""


def _number(row: StoredRow) -> int:
    return row.sequence if isinstance(row.sequence, int) else -1


def _chain(row: StoredRow) -> bytes:
    return msgspec.convert(row.chain, bytes)
