"""What an audit finds."""

from enum import Enum

import msgspec

from hypergpu.ids import NodeId


class Kind(Enum):
    """What a finding is about. `OPEN` is nothing wrong: it has not happened yet."""

    RECEIPT = "receipt"
    """A receipt is unsound, comes twice, or is missing among those given."""
    EQUIVOCATION = "equivocation"
    """Two different receipts were signed under one number: provable to anybody."""
    BATCH = "batch"
    """A batch does not hold what the receipts say."""
    UNRECORDED = "unrecorded"
    """A countersigned receipt is not on the chain."""
    SCORE = "score"
    """The chain counts another score than the receipts give."""
    POOL = "pool"
    """An epoch's pool is not what the job's price makes of its score."""
    PAY = "pay"
    """A payment is not what the share comes to."""
    VOUCHER = "voucher"
    """A voucher is unsound or worth less than the receipts it counts."""
    ESCROW = "escrow"
    """The job's money does not add up."""
    OPEN = "open"
    """Not settled or not paid yet."""


class Finding(msgspec.Struct, frozen=True):
    """One discrepancy, or one thing that is still open."""

    kind: Kind
    text: str
    """With the figures."""
    node: NodeId | None = None
    epoch: int | None = None
    at_s: int = 0
    """When it falls due, by the chain's clock; 0: nothing says when."""

    @property
    def said(self) -> str:
        """The text with whose it is and of which epoch, as far as the text does not name them."""
        where = []
        if self.node is not None and self.node not in self.text:
            where.append(str(self.node))
        if self.epoch is not None and f"epoch {self.epoch} " not in f"{self.text} ":
            where.append(f"epoch {self.epoch}")
        return f"{', '.join(where)}: {self.text}" if where else self.text

    @property
    def is_wrong(self) -> bool:
        """Whether somebody did what the rules do not allow."""
        return self.kind is not Kind.OPEN
