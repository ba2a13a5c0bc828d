"""The services of a coordinator process: commands and servicers get these and nothing global."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from coordinator.config import Settings
from coordinator.core.job.live_blobs import live_blobs
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import UploadStore
from coordinator.shell.evaluator.process import EvaluatorProcess
from coordinator.shell.journal.journal import Journal
from coordinator.shell.runtime.connected_nodes import ConnectedNodes
from coordinator.shell.runtime.driver import Driver
from coordinator.shell.runtime.new_job_terms import NewJobTerms
from coordinator.shell.runtime.node_allocator import NodeAllocator
from coordinator.shell.runtime.upload_nonces import UploadNonces
from coordinator.shell.telemetry.probe_echo import ProbeEcho
from coordinator.shell.telemetry.readings import Readings
from hypergpu.ids import Digest, JobId

DATASETS = "datasets"
"""The folder of users' data within the coordinator's own."""


class Pins:
    """BlobStore whose event is not journalled yet. Any thread may call."""

    def __init__(self) -> None:
        self._counts: Counter[Digest] = Counter()
        self._lock = threading.Lock()
        self.collecting = asyncio.Lock()
        """Lock of a collection, which does not know of pins that come while it runs."""

    def add(self, digests: Iterable[Digest]) -> None:
        """Keep these."""
        with self._lock:
            self._counts.update(digests)

    def drop(self, digests: Iterable[Digest]) -> None:
        """Take back one `add`."""
        with self._lock:
            self._counts.subtract(digests)
            self._counts = +self._counts

    def all(self) -> frozenset[Digest]:
        """Everything that is kept."""
        with self._lock:
            return frozenset(self._counts)


class Services(NamedTuple):
    """Everything, wired in `coordinator.shell.app.startup`."""

    settings: Settings
    journal: Journal
    blobs: BlobStore
    uploads: UploadStore
    evaluator: EvaluatorProcess
    driver: Driver
    nodes: ConnectedNodes
    allocator: NodeAllocator
    pins: Pins
    nonces: UploadNonces
    readings: Readings
    """Readings of every node's line and speed, made anew after a restart."""
    echo: ProbeEcho
    job_terms: NewJobTerms

    def job_dir(self, job_id: JobId) -> Path:
        """Where the shell keeps files of one job; deleted with it."""
        return self.settings.data_dir / "jobs" / job_id

    @property
    def datasets_dir(self) -> Path:
        """Users' data laid out as folders for the evaluator."""
        return self.settings.data_dir / DATASETS

    def needed_blobs(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""
        found = set(self.pins.all())
        for runtime in self.driver.runtimes.values():
            found |= live_blobs(runtime.job) | (runtime.entries_of_manifest or frozenset())
        return frozenset(found)

    def knows_needed_blobs(self) -> bool:
        """Whether no job may need more than `needed_blobs`."""
        runtimes = self.driver.runtimes.values()
        is_read = all(runtime.entries_of_manifest is not None for runtime in runtimes)
        return is_read and not self.driver.unreadable
