"""Which blobs and uploads jobs of all kinds need: the rest is removed."""

from typing import NamedTuple

from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.farm.needed_blobs import FarmBlobs
from coordinator.shell.kinds.serving.needed_blobs import ServeBlobs
from coordinator.shell.kinds.training.needed_blobs import TrainingBlobs
from coordinator.shell.store.blob_collector import BlobNeeds
from hypergpu.ids import Digest


class NeededBlobs(NamedTuple):
    """What all parts need."""

    parts: tuple[BlobNeeds, ...]

    def digests(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""
        return frozenset[Digest]().union(*(part.digests() for part in self.parts))

    def are_complete(self) -> bool:
        """Whether no job may need more than `digests`."""
        return all(part.are_complete() for part in self.parts)

    def open_uploads(self) -> set[str] | None:
        """Uploads that nodes may make now; None: of some jobs nobody knows it."""
        names: set[str] = set()
        for part in self.parts:
            uploads = part.open_uploads()
            if uploads is None:
                return None
            names |= uploads
        return names


def needed_blobs(driver: Driver) -> NeededBlobs:
    """What jobs of every kind need."""
    return NeededBlobs((TrainingBlobs(driver), FarmBlobs(driver), ServeBlobs(driver)))
