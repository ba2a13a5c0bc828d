"""Calls to the ledger contract as values, and the part of its state that decisions read."""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Self

import msgspec

from hypergpu.ids import Address, Digest, JobId, JobKey, NodeId
from hypergpu.statements.domain import address_bytes
from hypergpu.units import Wei


class TotalsEntry(msgspec.Struct, frozen=True, array_like=True):
    """Running totals of one node in a job, as a batch states them."""

    node: NodeId
    count: int
    """Receipts of the node, these included."""
    total_score: int

    def word(self) -> bytes:
        """The contract's form: ``address[20] | count[4] | total score[8]``."""
        numbers = self.count.to_bytes(4, "big") + self.total_score.to_bytes(8, "big")
        return address_bytes(self.node) + numbers

    @classmethod
    def from_word(cls, word: bytes) -> Self:
        """The entry of a word of 32 bytes."""
        count, total_score = int.from_bytes(word[20:24], "big"), int.from_bytes(word[24:], "big")
        return cls(NodeId("0x" + word[:20].hex()), count, total_score)


class _Call(msgspec.Struct, frozen=True, kw_only=True, tag_field="call"):
    pass


class Approve(_Call, frozen=True, tag="approve"):
    """Let the ledger take an amount of the token from the account."""

    amount: Wei


class OpenJob(_Call, frozen=True, tag="open"):
    """Open a job and put its escrow in."""

    job_id: JobId
    coordinator: Address
    model: Digest
    dataset: Digest
    unit_price: Wei
    epochs: int
    escrow: Wei


class FundJob(_Call, frozen=True, tag="fund"):
    """Add to a job's escrow."""

    job: JobKey
    amount: Wei


class RecordBatch(_Call, frozen=True, tag="batch"):
    """Record totals of several nodes (``submitAggregate``)."""

    job: JobKey
    epoch: int
    sequence: int
    root: bytes
    entries: tuple[TotalsEntry, ...]


class RecordReceipt(_Call, frozen=True, tag="record"):
    """Record one receipt (``submitContribution``): the node's receipt ``entry.count - 1``."""

    job: JobKey
    epoch: int
    entry: TotalsEntry


class Distribute(_Call, frozen=True, tag="distribute"):
    """Pay the shares of nodes; closes the epoch where the coordinator or the owner calls."""

    job: JobKey
    epoch: int
    nodes: tuple[NodeId, ...]


class RequestReclaim(_Call, frozen=True, tag="request-reclaim"):
    """Announce that a job ends and its owner takes the free escrow back."""

    job: JobKey


class Reclaim(_Call, frozen=True, tag="reclaim"):
    """Take the free escrow of a job whose announced end has come."""

    job: JobKey


Call = (
    Approve
    | OpenJob
    | FundJob
    | RecordBatch
    | RecordReceipt
    | Distribute
    | RequestReclaim
    | Reclaim
)


class PlannedCall(NamedTuple):
    """A call with the purpose that makes it unique for its account."""

    purpose: str
    call: Call


class ShareState(Enum):
    """State of a node's share of an epoch, with the contract's numbers."""

    NONE = 0
    DUE = 1
    PAID = 2
    VOID = 3


class ShareView(NamedTuple):
    """A node's share of an epoch."""

    state: ShareState
    amount: Wei


class EpochView(NamedTuple):
    """An epoch on the ledger."""

    opened_at_s: int = 0
    """Time of its first record; 0 before that."""
    closed_at_s: int = 0
    """0 while it is open."""
    shares: Mapping[NodeId, ShareView] = {}

    def nodes_due(self) -> tuple[NodeId, ...]:
        """Nodes whose share is due, in ascending order."""
        return tuple(
            sorted(node for node, share in self.shares.items() if share.state is ShareState.DUE)
        )


class AccountView(NamedTuple):
    """A node in a job on the ledger."""

    counted: int = 0
    """Receipts recorded."""
    total_score: int = 0
    earned: Wei = Wei(0)

    def covers(self, entry: TotalsEntry) -> bool:
        """Whether an entry states nothing beyond what is recorded."""
        return entry.count <= self.counted and entry.total_score <= self.total_score


class JobOnLedger(NamedTuple):
    """A job on the ledger at one block."""

    time_s: int
    """The block's time."""
    window_s: int
    """Length of the challenge window."""
    balance: Wei
    """Tokens of the coordinator's account."""
    is_open: bool = False
    """Whether the job was opened; all below is empty before that."""
    unit_price: Wei = Wei(0)
    free: Wei = Wei(0)
    next_sequence: int = 0
    ends_at_s: int = 0
    accounts: Mapping[NodeId, AccountView] = {}
    epochs: Mapping[int, EpochView] = {}
    """Epochs with a record; those where no share is due may be missing."""

    @property
    def capacity(self) -> Wei:
        """All escrow that records could ever allot: what was allotted and what is free."""
        return Wei(self.free + sum(account.earned for account in self.accounts.values()))

    @property
    def is_closed_to_records(self) -> bool:
        """Whether the job's announced end is so near that nothing new is recorded."""
        return bool(self.ends_at_s) and self.time_s >= self.ends_at_s - self.window_s


def is_in_effect(call: Call, view: JobOnLedger) -> bool:
    """Whether the ledger shows a call's effect already, so that its revert does no harm.

    False where the ledger cannot tell (`Approve`, `FundJob`).
    """
    match call:
        case OpenJob():
            return view.is_open
        case RecordBatch():
            return all(_account(view, entry).covers(entry) for entry in call.entries)
        case RecordReceipt():
            return _account(view, call.entry).covers(call.entry)
        case Distribute():
            due = view.epochs.get(call.epoch, EpochView()).nodes_due()
            return view.is_open and not set(call.nodes) & set(due)
        case RequestReclaim():
            return view.ends_at_s > 0
        case Reclaim():
            return view.is_open and not view.free
        case _:
            return False


def _account(view: JobOnLedger, entry: TotalsEntry) -> AccountView:
    return view.accounts.get(entry.node, AccountView())
