"""Where this coordinator keeps files: its folder, blobs, and how bytes come in and go out."""

from pathlib import Path
from typing import NamedTuple

from coordinator.shell.store.blobs.pins import Pins
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_commits import Commits
from coordinator.shell.store.blobs.upload_store import UploadStore
from coordinator.shell.store.bulk.store import BulkStore
from hypergpu.ids import JobId


class Storage(NamedTuple):
    """Files of jobs and what carries them. Each blob is in `blobs` once it is whole and right."""

    folder: Path
    """The coordinator's own folder."""
    blobs: BlobStore
    uploads: UploadStore
    """What came in and is not checked yet."""
    commits: Commits
    """Checks under way of what came in."""
    pins: Pins
    """Blobs that no journal names yet and that must not be collected."""
    bulk: BulkStore

    def job_dir(self, job_id: JobId) -> Path:
        """Where the shell keeps files of one job; deleted with it."""
        return self.folder / "jobs" / job_id

    @property
    def datasets_dir(self) -> Path:
        """Users' data laid out as folders for the evaluator."""
        return datasets_dir(self.folder)


def datasets_dir(folder: Path) -> Path:
    """The folder of users' data within the coordinator's own."""
    return folder / "datasets"
