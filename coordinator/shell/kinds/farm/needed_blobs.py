"""Which blobs and uploads farm jobs need: the rest is removed."""

from typing import NamedTuple

from coordinator.core.farm.state import ENDED
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.farm.runtime import FarmRuntime
from coordinator.shell.kinds.performers.packed_work import result_owner
from hypergpu.ids import Digest


class FarmBlobs(NamedTuple):
    """Blobs and uploads of all farm jobs of a driver. Results stay until their job is removed, and
    inputs until it has ended.
    """

    driver: Driver

    def digests(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""
        needed_digests: set[Digest] = set()
        for runtime in self.driver.runtimes_of(FarmRuntime).values():
            needed_digests |= runtime.result_digests
            if runtime.job.phase not in ENDED:
                needed_digests |= runtime.input_digests
        return frozenset(needed_digests)

    def are_complete(self) -> bool:
        """Whether no job may need more than `digests`."""
        runtimes = self.driver.runtimes_of(FarmRuntime).values()
        return all(
            runtime.has_read_rows and (runtime.chunks is not None or runtime.job.phase in ENDED)
            for runtime in runtimes
        )

    def open_uploads(self) -> set[str]:
        """Uploads that nodes may make now."""
        return {
            result_owner(runtime.job.job_id, node)
            for runtime in self.driver.runtimes_of(FarmRuntime).values()
            for node in runtime.job.leases
        }
