"""Events and states as the journal keeps them: the only place that knows their stored form."""

from collections.abc import Iterable

import msgspec

from coordinator.core.events import Event
from coordinator.core.job import Job
from coordinator.core.transition import transition
from coordinator.shell.journal.records import Entry
from hypergpu.ids import JobId

_encoder = msgspec.json.Encoder()
_events = msgspec.json.Decoder(Event)
_jobs = msgspec.json.Decoder(Job)


def entry(job_id: JobId, sequence: int, event: Event) -> Entry:
    """An event as a row."""
    kind = type(event).__name__
    return Entry(job_id, sequence, event.at_ms, kind, _encoder.encode(event))


def state_json(job: Job) -> bytes:
    """A state for a snapshot."""
    return _encoder.encode(job)


def state_from(stored: bytes) -> Job:
    """Read a snapshot.

    Raises:
        msgspec.ValidationError: another version of the machine wrote it.
    """
    return _jobs.decode(stored)


def replay(job: Job | None, entries: Iterable[Entry]) -> Job | None:
    """The state after ``entries``; None when there were none to begin with.

    Raises:
        msgspec.ValidationError: a row is no event that this version knows.
    """
    for row in entries:
        job = transition(job, _events.decode(row.body_json)).job
    return job
