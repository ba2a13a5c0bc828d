"""Calls to the ledger contract as values, the part of its state that decisions read, and decisions
about the transactions of one signing account: what to send, raise, close or halt.

Theory of operation. Every transaction has a nonce and one or more signed variants (a raised fee is
another hash). At each tick one block is the view of everything: nonces below the account's are
mined there, the others are pending. A pending transaction is sent again, the same bytes, and with a
higher fee after some blocks. A mined one is closed once its block is final. The contract makes
every call idempotent, so repeating is harmless and nothing is ever repaired: a reverted call whose
effect the ledger does not show, and a nonce that somebody else used, halt their job with a reason
and a fix. A halt is no state of its own: it follows from the rows and the view.

A reorganisation has no code of its own either: every view is read anew, and a nonce that is no
longer mined makes its transaction pending again, also a closed one.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Self

import msgspec

from hypergpu.ids import Address, Digest, JobId, JobKey, NodeId
from hypergpu.ledger_terms import address_bytes
from hypergpu.units import Wei
from hypergpu.work_units import WorkUnit


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
    unit: WorkUnit = WorkUnit.SAMPLES
    """Part of the job's key."""


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


ChainCall = (
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
    call: ChainCall


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
    paid_below: int = 0
    """Epochs below this are closed, and all their shares are paid."""

    @property
    def capacity(self) -> Wei:
        """All escrow that records could ever allot: what was allotted and what is free."""
        return Wei(self.free + sum(account.earned for account in self.accounts.values()))

    @property
    def is_closed_to_records(self) -> bool:
        """Whether the job's announced end is so near that nothing new is recorded."""
        return bool(self.ends_at_s) and self.time_s >= self.ends_at_s - self.window_s


def is_in_effect(call: ChainCall, view: JobOnLedger) -> bool:
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


class Variant(msgspec.Struct, frozen=True):
    """One signed form of a transaction."""

    hash: bytes
    raw: bytes
    """The signed bytes."""
    cost_wei: int
    """Most that it takes from the account."""
    signed_at_block: int


class Inclusion(msgspec.Struct, frozen=True):
    """A variant in a block."""

    hash: bytes
    """Hash of the variant."""
    block: int
    is_success: bool
    """False: the call reverted."""


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One signed transaction of the account."""

    nonce: int
    purpose: str
    job_id: JobId | None
    """None: of no job, for example a deployment."""
    call: ChainCall | None = None
    variants: tuple[Variant, ...]
    """Oldest first; at least one."""
    inclusion: Inclusion | None = None
    """As far as it was looked up; None for a pending one."""
    is_closed: bool = False
    """Nothing more is decided about it; it is sent again only if the chain loses it."""
    is_abandoned: bool = False
    """Closed by a retry: nothing depends on its effect."""


class OutboxView(NamedTuple):
    """The account at one block."""

    block: int
    nonce: int
    """Transactions of the account in the chain up to this block."""
    final_nonce: int
    """The same up to the newest final block."""
    balance_wei: int
    """Gas money of the account."""
    idle_blocks: int
    """Blocks since the last one with a transaction of the account."""
    reverted: Mapping[int, str] = {}
    """By nonce, the contract's reason where a call reverted and its effect is not there."""


class OutboxRules(NamedTuple):
    """Figures of the chain."""

    depth: int
    """Blocks on top of its own that make a transaction final."""
    bump_blocks: int
    """Blocks after which an unmined transaction's fee is raised."""


class HaltKind(Enum):
    """Kinds of halts, one row each in docs/metering.md."""

    NONCE_TAKEN = "NONCE_TAKEN"
    REVERTED = "REVERTED"
    KEY_FUNDS = "KEY_FUNDS"
    """Sending waits for gas money and goes on by itself."""


class Halt(msgspec.Struct, frozen=True):
    """Reason why nothing more is sent for a job, or for the account where ``job_id`` is None."""

    kind: HaltKind
    job_id: JobId | None
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.reason}. Fix: {self.fix}"


class OutboxActions(NamedTuple):
    """Everything to do in one tick, by nonce."""

    send: tuple[int, ...] = ()
    """Hand the newest variant's bytes to the RPC."""
    raise_fee: tuple[int, ...] = ()
    """Sign a variant with a higher fee, store it, and send it."""
    close: tuple[int, ...] = ()
    halts: Mapping[JobId | None, Halt] = {}
    """The first halt of each job; under None the account's."""


_RESTART = "start once with: hypergpu up --retry-payments"


def decide(rows: Iterable[OutboxRow], view: OutboxView, rules: OutboxRules) -> OutboxActions:
    """Actions of one tick.

    Args:
        rows: All rows that are pending or not closed.
        view: The account.
        rules: Figures of the chain.
    """
    ordered_rows = sorted(rows, key=lambda row: row.nonce)
    pending_rows = [row for row in ordered_rows if row.nonce >= view.nonce]
    stuck_nonces = {
        row.nonce
        for row in pending_rows
        if view.block - row.variants[-1].signed_at_block >= rules.bump_blocks
        and view.idle_blocks >= rules.bump_blocks
    }
    halts: dict[JobId | None, Halt] = {}
    for row in ordered_rows:
        if halt := _halt(row, view):
            halts.setdefault(row.job_id, halt)
    if pending_rows and (halt := _money_halt(pending_rows[0], view)):
        halts.setdefault(None, halt)
    return OutboxActions(
        send=tuple(row.nonce for row in pending_rows if row.nonce not in stuck_nonces),
        raise_fee=tuple(sorted(stuck_nonces)),
        close=tuple(row.nonce for row in ordered_rows if _is_final(row, view)),
        halts=halts,
    )


def next_nonce(highest: int, view: OutboxView) -> int | None:
    """Nonce for a new row; None while another program's transaction on top is not final.

    A row after such a transaction would wait for ever if a reorganisation dropped that one.

    Args:
        highest: One more than the highest nonce of all rows, closed ones too.
        view: The account.
    """
    nonce = max(highest, view.final_nonce)
    return None if view.nonce > nonce else nonce


def nonces_to_retry(rows: Sequence[OutboxRow], job_id: JobId, view: OutboxView) -> tuple[int, ...]:
    """Nonces of the rows to abandon when a job's halt is cleared.

    Returns:
        The rows that halt the job and its later ones without success: the next batch repeats their
        totals, and what depended on a failed call is planned anew.
    """
    own = [row for row in rows if row.job_id == job_id and not row.is_closed]
    first = min((row.nonce for row in own if _halt(row, view)), default=None)
    if first is None:
        return ()
    return tuple(
        row.nonce
        for row in own
        if row.nonce >= first and not (row.inclusion and row.inclusion.is_success)
    )


def _is_final(row: OutboxRow, view: OutboxView) -> bool:
    """Whether nothing can change about a row's nonce any more, and it needs nobody."""
    is_settled = row.inclusion is not None and row.nonce not in view.reverted
    return not row.is_closed and row.nonce < view.final_nonce and is_settled


def _halt(row: OutboxRow, view: OutboxView) -> Halt | None:
    if row.is_closed:
        return None
    retry = f"hypergpu ledger retry {row.job_id}; or {_RESTART}" if row.job_id else _RESTART
    if row.nonce in view.reverted:
        reason = f"the ledger refused {row.purpose}: {view.reverted[row.nonce]}"
        return Halt(HaltKind.REVERTED, row.job_id, reason, f"correct the cause, then {retry}")
    if row.inclusion is None and row.nonce < view.final_nonce:
        # No variant is in a block, and the nonce is used for good. Before that block is final the
        # RPC may only lag.
        reason = f"another program used nonce {row.nonce}, which was signed for {row.purpose}"
        fix = f"let this coordinator alone use its key, then {retry}"
        return Halt(HaltKind.NONCE_TAKEN, row.job_id, reason, fix)
    return None


def _money_halt(row: OutboxRow, view: OutboxView) -> Halt | None:
    cost = row.variants[-1].cost_wei
    if view.balance_wei >= cost:
        return None
    have = f"the account has {view.balance_wei} wei of gas money"
    reason = f"{have}, {row.purpose} may take {cost}"
    fix = "send the chain's coin to the account: it goes on by itself"
    return Halt(HaltKind.KEY_FUNDS, None, reason, fix)
