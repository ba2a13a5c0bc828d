"""What a starting coordinator takes up a job from, after cutting off what cannot be believed."""

import msgspec

from coordinator.shell.journal.interface import JobJournal
from coordinator.shell.journal.records import Damage, Entry, Snapshot
from hypergpu.ids import JobId


class Recovery(msgspec.Struct, frozen=True):
    """A job as the journal knows it: replay ``entries`` onto ``snapshot``."""

    snapshot: Snapshot | None
    """None: replay from the first event."""
    entries: tuple[Entry, ...]
    """Behind the snapshot. Without a snapshot and without entries nothing of the job is left."""
    damages: tuple[Damage, ...] = ()
    """What was found and cut off; for people."""


def recover(journal: JobJournal, job_id: JobId) -> Recovery:
    """Find the newest snapshot that holds and the rows behind it that hold, and cut off the rest.

    Rows before the snapshot are not read: damage there shows when somebody watches the job from its
    beginning, and does not stop the job.
    """
    found = journal.snapshot(job_id)
    snapshot = found.snapshot
    if snapshot is None:
        reading = journal.read(job_id)
    else:
        reading = journal.read(job_id, snapshot.head.sequence + 1, after=snapshot.head)
    damages = found.damages
    if reading.damage is not None:
        journal.cut_back(job_id, reading.damage.last_good)
        damages += (reading.damage,)
    return Recovery(snapshot, reading.entries, damages)
