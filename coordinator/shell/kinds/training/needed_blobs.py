"""Which blobs and uploads training jobs need: the rest is removed."""

from typing import NamedTuple

from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.state import ENDED
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from hypergpu.ids import Digest


class TrainingBlobs(NamedTuple):
    """Blobs and uploads of all training jobs of a driver."""

    driver: Driver

    def digests(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""
        needed_digests: set[Digest] = set()
        for runtime in self.driver.runtimes_of(JobRuntime).values():
            needed_digests |= live_blobs(runtime.job) | (runtime.entries_of_manifest or frozenset())
            if runtime.job.phase not in ENDED:
                # A coordinator that takes over would have to make it anew.
                needed_digests.add(runtime.job.layout)
                if runtime.job.model is not None:
                    needed_digests |= {each.layout for each in runtime.job.model.held_parts}
        return frozenset(needed_digests)

    def are_complete(self) -> bool:
        """Whether no job may need more than `digests`."""
        runtimes = self.driver.runtimes_of(JobRuntime).values()
        is_read = all(runtime.entries_of_manifest is not None for runtime in runtimes)
        return is_read and not self.driver.unreadable

    def open_uploads(self) -> set[str] | None:
        """Uploads that participants may make now; None: of some jobs nobody knows it."""
        if self.driver.unreadable:
            return None
        runtimes = self.driver.runtimes_of(JobRuntime).values()
        return {name for runtime in runtimes for name in runtime.open_uploads()}
