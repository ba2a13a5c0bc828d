"""Jobs as their journal has them: rows of events, snapshots, and the replay at a start."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import structlog

from coordinator.core.persistent_map import PersistentMap
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import Job
from coordinator.core.training.transition import transition
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.journal.journal import Journal
from coordinator.shell.journal.records import Entry, JournalError
from coordinator.shell.runtime.job_runtime import JobRuntime
from hypergpu.ids import JobId

log = structlog.get_logger()
_encoder = msgspec.json.Encoder(enc_hook=PersistentMap.to_dict)
_events = msgspec.json.Decoder(Event)
_jobs = msgspec.json.Decoder(Job)


def event_entry(job_id: JobId, sequence: int, event: StampedEvent) -> Entry:
    """An event as a row."""
    return Entry(job_id, sequence, event.at_ms, type(event).__name__, _encoder.encode(event))


def state_json(job: Job) -> bytes:
    """A state for a snapshot."""
    return _encoder.encode(job)


def stored_state(stored: bytes) -> Job:
    """Read a snapshot.

    Raises:
        msgspec.ValidationError: another version of the machine wrote it.
    """
    return _jobs.decode(stored)


def replay_entries(job: Job | None, entries: Iterable[Entry]) -> Job | None:
    """The state after ``entries``; None when there were none to begin with.

    Raises:
        msgspec.ValidationError: a row is no event that this version knows.
    """
    for row in entries:
        job = transition(job, _events.decode(row.body_json)).job
    return job


class Replay(NamedTuple):
    """Every job of a journal."""

    runtimes: dict[JobId, JobRuntime]
    unreadable: dict[JobId, str]
    """Jobs whose rows this version does not know, and why."""


def replay_jobs(journal: Journal) -> Replay:
    """Every job as far as its journal holds; a damaged end is cut off and reported. Blocks."""
    replay = Replay({}, {})
    for job_id in journal.jobs():
        try:
            runtime = _replay_job(journal, job_id)
        except JournalError:
            raise
        except Exception as broken:
            log.exception("a job cannot be replayed and rests", job_id=job_id)
            replay.unreadable[job_id] = f"{type(broken).__name__}: {broken}"
            continue
        if runtime is None:
            log.error("nothing of a job's journal holds: the job is removed", job_id=job_id)
            journal.remove_job(job_id)
        else:
            replay.runtimes[job_id] = runtime
    return replay


def _replay_job(journal: Journal, job_id: JobId) -> JobRuntime | None:
    recovery = journal.recover(job_id)
    for damage in recovery.damages:
        log.error("a journal is damaged and cut back", job_id=job_id, reason=damage)
    snapshot, entries = recovery.snapshot, recovery.entries
    before = stored_state(snapshot.state_json) if snapshot else None
    job = replay_entries(before, entries)
    if job is None:
        return None
    last = entries[-1].sequence if entries or snapshot is None else snapshot.head.sequence
    runtime = JobRuntime(job, last + 1)
    runtime.is_recovering = True
    return runtime
