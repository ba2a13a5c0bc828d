"""Decisions about the transactions of one signing account: what to send, raise, close or halt.

Theory of operation. Every transaction has a nonce and one or more signed variants (a raised fee
is another hash). At each tick one block is the view of everything: nonces below the account's are
mined there, the others are pending. A pending transaction is sent again, the same bytes, and with
a higher fee after some blocks. A mined one is closed once its block is final. The contract makes
every call idempotent, so repeating is harmless and nothing is ever repaired: a reverted call whose
effect the ledger does not show, and a nonce that somebody else used, halt their job with a reason
and a fix. A halt is no state of its own: it follows from the rows and the view.

A reorganisation has no code of its own either: every view is read anew, and a nonce that is no
longer mined makes its transaction pending again, also a closed one.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from hypergpu.ids import JobId
from payments.core.calls import Call


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
    call: Call | None = None
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
    ordered = sorted(rows, key=lambda row: row.nonce)
    pending = [row for row in ordered if row.nonce >= view.nonce]
    stuck = {
        row.nonce
        for row in pending
        if view.block - row.variants[-1].signed_at_block >= rules.bump_blocks
        and view.idle_blocks >= rules.bump_blocks
    }
    halts: dict[JobId | None, Halt] = {}
    for row in ordered:
        if halt := _halt(row, view):
            halts.setdefault(row.job_id, halt)
    if pending and (halt := _money_halt(pending[0], view)):
        halts.setdefault(None, halt)
    return OutboxActions(
        send=tuple(row.nonce for row in pending if row.nonce not in stuck),
        raise_fee=tuple(sorted(stuck)),
        close=tuple(row.nonce for row in ordered if _is_final(row, view)),
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
