"""Work that was accepted, with its final quality: what a receipt is made of."""

import msgspec

from hypergpu.ids import NodeId
from hypergpu.statements import Contribution
from hypergpu.units import BasisPoints


class MeasuredWork(msgspec.Struct, frozen=True):
    """Accepted work whose quality is final."""

    contribution: Contribution
    signature: bytes
    """The node's signature of the contribution."""
    quality_bps: BasisPoints
    evaluator: str
    """Short name of the measurement."""
    reason: str = ""
    """Why the quality is what it is."""

    @property
    def node(self) -> NodeId:
        """Node that did the work."""
        return self.contribution.node

    @property
    def score(self) -> int:
        """Units, of a training samples, times quality in 1/10,000: see `hypergpu.journal.worth`."""
        return self.contribution.samples * self.quality_bps
