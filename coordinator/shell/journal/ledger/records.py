"""Plain data of receipts and of the outbox. Amounts are integers of the smallest unit."""

from typing import NamedTuple, Self

import msgspec

from coordinator.core.settlement.epoch import Epoch
from coordinator.core.settlement.sending import Attempt, BlockName, TransactionState
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.units import Milliseconds


class ReceiptRecord(msgspec.Struct, frozen=True):
    """A countersigned receipt, kept for good: it is what pay is proven by."""

    job_id: JobId
    signed: SignedReceipt
    leaf: bytes
    """Its leaf in a batch's tree: `hypergpu.ledger.receipt.leaf`."""


class EpochEnd(msgspec.Struct, frozen=True):
    """A job has left an epoch: no more receipts of it will come, but for a job that is cut back."""

    job_id: JobId
    number: int
    is_last: bool = False
    """The job is over: no later epoch will come either."""


class Earnings(NamedTuple):
    """What is written about pay in one transaction with journal rows."""

    receipts: tuple[ReceiptRecord, ...] = ()
    ends: tuple[EpochEnd, ...] = ()
    """Take effect after ``receipts``."""


NO_EARNINGS = Earnings()


class UnsealedReceipt(NamedTuple):
    """What a batch needs of a receipt that is in none."""

    job_id: JobId
    node: NodeId
    sequence: int
    epoch: int
    round: int
    samples: int
    quality_bps: int
    leaf: bytes
    contribution: bytes
    """Hash of the contribution."""

    @classmethod
    def of(cls, record: ReceiptRecord) -> Self:
        """What it takes of a receipt that is kept."""
        receipt = record.signed.receipt
        return cls(
            record.job_id,
            receipt.node,
            receipt.sequence,
            receipt.epoch,
            receipt.round,
            receipt.samples,
            receipt.quality_bps,
            record.leaf,
            bytes.fromhex(receipt.contribution),
        )


class EpochRecord(msgspec.Struct, frozen=True):
    """An epoch as it is stored: what the job says of it, and how far it is."""

    epoch: Epoch
    is_left: bool = False
    """The job has left it; the last receipts may still wait for a batch."""
    is_last: bool = False


class AccountName(NamedTuple):
    """Whose nonces are counted, and where."""

    chain_id: int
    address: Address


class SealedTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that was signed and stored before it was ever sent."""

    account: AccountName
    nonce: int
    purpose: str
    """What it is for, such as ``close/JOB/3``. An account seals each purpose once."""
    job_id: JobId | None = None
    epoch: int = 0
    part: str = ""
    """Of the epoch: a `Part`'s value; empty for what belongs to no epoch."""
    to: bytes
    """Empty: it makes a contract."""
    call: bytes
    gas: int
    sealed_ms: Milliseconds
    """Unix time."""


class SignedAttempt(msgspec.Struct, frozen=True):
    """One signing of a transaction, with the bytes that are sent."""

    attempt: Attempt
    raw: bytes


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction with all its attempts and where it is."""

    transaction: SealedTransaction
    attempts: tuple[SignedAttempt, ...]
    """Oldest first."""
    state: TransactionState = TransactionState.WAITING
    is_sent: bool = False
    """It went out at least once."""
    block: BlockName | None = None
    mined_ms: Milliseconds | None = None
    """Unix time at which it was last seen in a block for the first time."""
    mined_hash: bytes | None = None
    """Of the attempt that is in ``block``; None: in none, or it was noted before schema 3."""

    @property
    def hash(self) -> bytes:
        """By which it is found on the chain; while no block has it, that of its newest attempt."""
        return self.mined_hash or self.attempts[-1].attempt.hash


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which receipts a transaction records."""

    account: AccountName
    nonce: int
    job_id: JobId
    epoch: int
    """That it settles them in: their own, or a later one where that is closed."""
    sequence: int | None
    """The job's batch number on the contract; None for a receipt with a transaction of its own."""
    root: bytes
    """Of the receipts' tree; of a single receipt its leaf."""
    spans: "tuple[Span, ...]"
    """By node, ascending."""


class Span(msgspec.Struct, frozen=True):
    """The receipts ``[first, first + receipts)`` of one node."""

    node: NodeId
    first: int
    receipts: int
    samples: int
    score: int


class Rewind(msgspec.Struct, frozen=True):
    """The chain counts fewer receipts of a node than were sealed: what is missing waits again."""

    job_id: JobId
    node: NodeId
    sequence: int
    """The next that the chain wants."""


class Progress(NamedTuple):
    """Where a transaction is now."""

    nonce: int
    state: TransactionState
    is_sent: bool
    block: BlockName | None
    mined_ms: Milliseconds | None
    mined_hash: bytes | None = None
    """Of the attempt that is in ``block``."""


class OutboxChange(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline writes in one transaction. Everything in it is of one account."""

    account: AccountName
    sealed: tuple[OutboxRow, ...] = ()
    """New transactions; their nonces go on where the account's end."""
    batches: tuple[BatchRecord, ...] = ()
    given_up: tuple[int, ...] = ()
    """Nonces of transactions that failed: their purposes are free again, before ``sealed`` takes
    them, and their batches are forgotten. What these held is set by ``rewinds``."""
    least_nonce: int = 0
    """``sealed`` may leave out the nonces before this one: somebody else has spent them."""
    attempts: tuple[tuple[int, SignedAttempt], ...] = ()
    """New signings of stored transactions, by nonce."""
    progress: tuple[Progress, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    rewinds: tuple[Rewind, ...] = ()
