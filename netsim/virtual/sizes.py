"""Bytes that a participant moves in a round: a world has no tensors, only their sizes."""

import msgspec

from coordinator.core.job.deltas import extend_chain
from coordinator.core.job.state import Model
from coordinator.core.plan import decision
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import SCHEMES
from hypergpu.statements.assignment import BlobRef, Delta
from hypergpu.units import Bytes


class TransferSizes(msgspec.Struct, frozen=True):
    """Where schemes are not named, everything is as large as ``model`` and ``update`` say."""

    model: int = 400_000
    """Down: the model, or the delta that it comes as."""
    update: int = 100_000
    """Up."""
    whole: int = 0
    """Down, where a node holds nothing that deltas lead on from; 0: as much as always."""
    schemes: dict[str, int] = {}
    """An update or a delta in each scheme that may be chosen."""

    def update_bytes(self, scheme: str) -> Bytes:
        """Return the size of an update."""
        return Bytes(self.schemes.get(scheme, self.update))

    def delta_bytes(self, scheme: str) -> Bytes:
        """Return the size of a delta."""
        return Bytes(self.schemes.get(scheme, self.model))

    @property
    def model_bytes(self) -> Bytes:
        """Size of a model as a blob."""
        return Bytes(self.whole or self.model)

    def next_model(self, base: Model, digest: Digest, *, down: str) -> Model:
        """The model that a fold makes of another, with the deltas that lead to it."""
        blob = BlobRef(digest, self.model_bytes)
        if down == "fp32" or not self.whole:
            return Model(base.round + 1, blob)
        # A delta's digest is never looked at: it names what it leads to.
        difference = BlobRef(digest, self.delta_bytes(down))
        deltas = extend_chain(base, Delta(base.blob.digest, difference, down), blob.size_bytes)
        return Model(base.round + 1, blob, deltas=deltas)

    def for_plans(self) -> decision.ModelSizes:
        """What plans are told."""
        moved = {scheme: self.update_bytes(scheme) for scheme in SCHEMES}
        return decision.ModelSizes(moved, self.model_bytes)
