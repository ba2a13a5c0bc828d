"""Which blobs served models need: the rest is removed."""

from typing import NamedTuple

from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from hypergpu.ids import Digest


class ServeBlobs(NamedTuple):
    """Blobs of all served models of a driver, until they are stopped. Nodes send none."""

    driver: Driver

    def digests(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""
        runtimes = self.driver.runtimes_of(ServeRuntime).values()
        live = (each for each in runtimes if each.job.is_served)
        parts = (each for runtime in live for each in (runtime.input_digests, runtime.open_digests))
        return frozenset[Digest]().union(*parts)

    def are_complete(self) -> bool:
        """Whether no job may need more than `digests`."""
        return True

    def open_uploads(self) -> set[str]:
        """Uploads that nodes may make now."""
        return set()
