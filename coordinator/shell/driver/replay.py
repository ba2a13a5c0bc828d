"""Rows of a journal as events and states of their kind, and every job of a journal replayed."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import structlog

from coordinator.core.persistent_map import PersistentMap
from coordinator.core.work.members import LeasedJob
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.driver.kinds import KindTable, ShellKind
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import Entry, JournalError
from hypergpu.ids import JobId

log = structlog.get_logger()
_encoder = msgspec.json.Encoder(enc_hook=PersistentMap.to_dict)


def event_entry(job_id: JobId, sequence: int, event: StampedEvent) -> Entry:
    """An event as a row."""
    return Entry(job_id, sequence, event.at_ms, type(event).__name__, _encoder.encode(event))


def state_json(job: LeasedJob) -> bytes:
    """A state for a snapshot."""
    return _encoder.encode(job)


def replay_entries(kind: ShellKind, job: Any, entries: Iterable[Entry]) -> Any:
    """The state after ``entries``; None when there were none to begin with.

    Raises:
        msgspec.ValidationError: a row is no event of the kind that this version knows.
    """
    for row in entries:
        job = kind.core.transition(job, kind.stored_event(row.body_json)).job
    return job


class Replay(NamedTuple):
    """Every job of a journal."""

    runtimes: dict[JobId, WorkRuntime[Any]]
    unreadable: dict[JobId, str]
    """Jobs whose rows this version does not know, and why."""


def replay_jobs(journal: Journal, kinds: KindTable) -> Replay:
    """Every job as far as its journal holds; a damaged end is cut off and reported. Blocks."""
    replay = Replay({}, {})
    for job_id in journal.jobs():
        try:
            runtime = _replay_job(journal, kinds, job_id)
        except JournalError:
            raise
        except Exception as error:
            log.exception("a job cannot be replayed and rests", job_id=job_id)
            replay.unreadable[job_id] = f"{type(error).__name__}: {error}"
            continue
        if runtime is None:
            log.error("nothing of a job's journal holds: the job is removed", job_id=job_id)
            journal.remove_job(job_id)
        else:
            replay.runtimes[job_id] = runtime
    return replay


def _replay_job(journal: Journal, kinds: KindTable, job_id: JobId) -> WorkRuntime[Any] | None:
    recovery = journal.recover(job_id)
    for damage in recovery.damages:
        log.error("a journal is damaged and cut back", job_id=job_id, reason=damage)
    snapshot, entries = recovery.snapshot, recovery.entries
    kind = kinds.of_journal(_first_row(journal, job_id))
    before = kind.stored_state(snapshot.state_json) if snapshot else None
    job = replay_entries(kind, before, entries)
    if job is None:
        return None
    last = entries[-1].sequence if entries or snapshot is None else snapshot.head.sequence
    runtime = kind.runtime(job, last + 1)
    runtime.is_recovering = True
    return runtime


def _first_row(journal: Journal, job_id: JobId) -> str:
    """Name of the event that the job's journal begins with; empty: that row is damaged."""
    first = journal.read(job_id, limit=1).entries
    return first[0].kind if first else ""
