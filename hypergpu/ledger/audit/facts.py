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
    block: int = 0
    """That recorded it; 0: not known."""

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
    block: int = 0
    """That recorded it; 0: not known."""


class EpochFact(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that was closed."""

    number: int
    total_score: int
    pool: Wei
    is_swept: bool = False
    opened_at_s: int = 0
    """When something was first recorded in it, by the chain's clock; 0: nothing was."""
    closed_at_s: int = 0
    """By the chain's clock; 0: not known."""
    closed_by: str = ""
    """Whose transaction closed it: anybody may, once it has long been open; empty: not known."""


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
    unbonding_s: int = 0
    """How long an epoch stays open to the coordinator and the job's owner alone; 0: not known."""
    ends_at_s: int = 0
    """When its owner may take back what is free; 0: its end is not announced."""
    recorded_at_s: int = 0
    """When the newest batch came, or the job was opened; 0: not known."""
    batches: tuple[BatchFact, ...] = ()
    """By ``seq``, from 0."""
    forced: tuple[ForcedFact, ...] = ()
    epochs: tuple[EpochFact, ...] = ()
    shares: tuple[ShareFact, ...] = ()
    accounts: tuple[AccountFact, ...] = ()

    def closed_for_good(self) -> frozenset[int]:
        """Closed epochs whose receipts are all due: the coordinator closed them or a later one.

        What comes after a stranger has closed an epoch goes into the next one that is open.
        """
        last = max((epoch.number for epoch in self.epochs if self._is_own(epoch)), default=-1)
        return frozenset(epoch.number for epoch in self.epochs if epoch.number <= last)

    def leaves_out(self, epoch: int) -> bool:
        """Whether receipts of an epoch that are not recorded count as left out.

        They do once the epoch is closed or the job's end announced, once a later epoch is being
        recorded than the one they go into, or when nothing was for a challenge window. Until then
        they may be on their way.
        """
        is_closed = epoch in self.closed_for_good()
        goes_into = epoch + any(closed.number == epoch for closed in self.epochs)
        is_behind = any(batch.epoch > goes_into for batch in self.batches)
        silent_s = self.time_s - self.recorded_at_s if self.recorded_at_s else 0
        is_silent = bool(self.window_s) and silent_s >= self.window_s
        return is_closed or is_behind or is_silent or bool(self.ends_at_s)

    def _is_own(self, epoch: EpochFact) -> bool:
        """Whether the coordinator closed an epoch, or the job's owner, whom it has let in.

        The owner may be a contract, or another key of the coordinator's: when it was closed tells
        them from strangers, who sent the transaction does not.
        """
        is_over = bool(self.ends_at_s) and epoch.closed_at_s >= self.ends_at_s - self.window_s
        is_late = epoch.closed_at_s >= epoch.opened_at_s + self.unbonding_s
        is_anybodys = bool(epoch.opened_at_s) and (is_over or is_late)
        return not is_anybodys or epoch.closed_by in {"", self.coordinator}

    def window_ends_s(self, epoch: EpochFact) -> int:
        """From when a share of an epoch is paid without stake and can be voided no more.

        0: not known.
        """
        return epoch.closed_at_s + self.window_s if epoch.closed_at_s and self.window_s else 0


def _run_part(run: PackedRun) -> tuple[NodeId, int, int]:
    return run.node, run.first_sequence, len(run.records)
