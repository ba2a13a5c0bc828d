"""What the chain says of a job, as plain data: whoever reads it off a chain fills these in."""

from enum import Enum

import msgspec

from hypergpu.ids import Address, JobKey, NodeId
from hypergpu.ledger.packing import NodeTotals, PackedRun, unpacked
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.ledger.typed import Domain
from hypergpu.units import Samples, Wei


class Form(Enum):
    """What a batch's call data held."""

    AGGREGATE = "aggregate"
    PACKED = "packed"


class BatchFact(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it was submitted."""

    seq: int
    epoch: int
    root: bytes
    digest: bytes
    """Of the job after it, from the event."""
    form: Form
    content: bytes
    """The packed bytes, or the words of the sums, from the transaction."""
    skipped: tuple[NodeId, ...] = ()
    """Nodes whose part was left out, from the events."""

    def parts(self) -> tuple[tuple[NodeId, int, int], ...]:
        """Node, first sequence and count of receipts of each part.

        Raises:
            ValueError: the content is malformed.
        """
        if self.form is Form.PACKED:
            return tuple(map(_run_part, unpacked(self.content)))
        return tuple((one.node, one.first_sequence, one.receipts) for one in self.totals())

    def totals(self) -> tuple[NodeTotals, ...]:
        """The sums of an aggregate.

        Raises:
            ValueError: the content is malformed.
        """
        words = [self.content[at : at + 32] for at in range(0, len(self.content), 32)]
        if len(words) % 5 or (words and len(words[-1]) != 32):
            raise ValueError("the sums are five words of 32 bytes a node")
        numbers = [int.from_bytes(word, "big") for word in words]
        return tuple(
            NodeTotals(
                node=NodeId(f"0x{numbers[at]:040x}"),
                first_sequence=numbers[at + 1],
                receipts=numbers[at + 2],
                samples=Samples(numbers[at + 3]),
                score=numbers[at + 4],
            )
            for at in range(0, len(numbers), 5)
        )


class ForcedFact(msgspec.Struct, frozen=True):
    """A receipt that somebody recorded by itself."""

    node: NodeId
    sequence: int
    epoch: int


class EpochFact(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that was closed."""

    number: int
    total_score: int
    pool: Wei
    is_swept: bool = False
    closed_at_s: int = 0
    """By the chain's clock; 0: not known."""


class ShareFact(msgspec.Struct, frozen=True, kw_only=True):
    """A node's share of an epoch."""

    epoch: int
    node: NodeId
    state: ShareState
    score: int
    reward: Wei
    paid: Wei


class AccountFact(msgspec.Struct, frozen=True, kw_only=True):
    """A node in the job."""

    node: NodeId
    counted: int
    earned: Wei
    paid: Wei
    pending: Wei = Wei(0)
    """What a voucher claims and its window still holds; not in ``paid``."""
    release_at_s: int = 0
    """When that may be paid."""
    voided: Wei = Wei(0)


class JobFact(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the chain says of one job, at one block."""

    job: JobKey
    domain: Domain
    coordinator: Address
    unit_price: Wei
    deposited: Wei
    """Escrow of its opening and all funding since."""
    free: Wei
    reclaimed: Wei = Wei(0)
    digest: bytes
    block: int = 0
    block_hash: str = ""
    time_s: int = 0
    """Of the block."""
    window_s: int = 0
    """The challenge window; 0: not known."""
    batches: tuple[BatchFact, ...] = ()
    """By ``seq``, from 0."""
    forced: tuple[ForcedFact, ...] = ()
    epochs: tuple[EpochFact, ...] = ()
    shares: tuple[ShareFact, ...] = ()
    accounts: tuple[AccountFact, ...] = ()

    def window_ends_s(self, epoch: EpochFact) -> int:
        """From when a share of an epoch is paid without stake and can be voided no more.

        0: not known.
        """
        return epoch.closed_at_s + self.window_s if epoch.closed_at_s and self.window_s else 0


def _run_part(run: PackedRun) -> tuple[NodeId, int, int]:
    return run.node, run.first_sequence, len(run.records)
