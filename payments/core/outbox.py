"""Decisions about the transactions of one signing account: what to send, raise, mark or halt.

Theory of operation. Every transaction has a nonce and one or more signed variants (a raised fee
is another hash). At each tick one block is the view of everything. A transaction whose variant is
in a block is mined there, and final once the block is deep enough. One that is in no block is
sent again, the same bytes, once a block, and with a higher fee after some blocks. The contract
makes every call idempotent, so repeating is harmless and nothing is ever repaired: what cannot be
(a reverted call whose effect the ledger does not show, a nonce that somebody else used) halts its
job with a reason and a fix. A halt is no state of its own: it follows from the rows and is over
when they change, for example because a reorganisation brought the transaction into another block.

A reorganisation has no code of its own either: a row whose recorded block left the chain is mined
nowhere, and is looked up again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    max_fee_wei: int
    """Most that a unit of gas may cost."""
    tip_wei: int
    gas: int
    """Limit of units of gas."""
    signed_at_block: int

    @property
    def cost_wei(self) -> int:
        """Most that it takes from the account."""
        return self.gas * self.max_fee_wei


class Inclusion(msgspec.Struct, frozen=True):
    """A variant in a block."""

    hash: bytes
    """Hash of the variant."""
    block: int
    block_hash: bytes
    is_success: bool
    """False: the call reverted."""


class Failure(msgspec.Struct, frozen=True):
    """Finding about a call that reverted."""

    is_effect_present: bool
    """Whether the ledger shows the effect all the same: see `is_in_effect`."""
    reason: str
    """The contract's reason, for people."""


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One transaction of the account that is not final."""

    nonce: int
    purpose: str
    job_id: JobId | None
    """None: of no job, for example a deployment."""
    call: Call | None = None
    variants: tuple[Variant, ...]
    """Oldest first; at least one."""
    sent_at_block: int = -1
    """Block at which bytes of it were last handed to the RPC; -1: never."""
    inclusion: Inclusion | None = None
    failure: Failure | None = None
    """Known only of a reverted inclusion."""
    is_abandoned: bool = False
    """Given up by `--retry`: its nonce still has to be used, and nothing depends on its effect."""

    @property
    def is_done(self) -> bool:
        """Whether its effect is in the chain of the last tick."""
        if self.inclusion is None:
            return False
        return self.inclusion.is_success or bool(self.failure and self.failure.is_effect_present)


class OutboxView(NamedTuple):
    """The chain at one block."""

    block: int
    nonce: int
    """Transactions of the account in the chain up to this block."""
    final_nonce: int
    """The same up to the newest final block."""
    block_hashes: Mapping[int, bytes]
    """Hash of the chain's block at each height that a row's inclusion names; none above the tip."""
    inclusions: Mapping[bytes, Inclusion]
    """By variant's hash, for rows without an inclusion."""
    balance_wei: int
    """Gas money of the account."""


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


class SendAgain(NamedTuple):
    """Hand the newest variant's bytes to the RPC."""

    nonce: int


class RaiseFee(NamedTuple):
    """Sign a variant with a higher fee, store it, and send it."""

    nonce: int


class MarkMined(NamedTuple):
    """Store a row's inclusion."""

    nonce: int
    inclusion: Inclusion


class MarkUnmined(NamedTuple):
    """Forget a row's inclusion: its block left the chain."""

    nonce: int


class MarkFinal(NamedTuple):
    """Take a row out of the queue: nothing can change about its nonce any more."""

    nonce: int


class FindFailure(NamedTuple):
    """Find a reverted row's `Failure` at the view's block and store it."""

    nonce: int


Action = SendAgain | RaiseFee | MarkMined | MarkUnmined | MarkFinal | FindFailure | Halt

_RESTART = "start once with: hypergpu up --retry-payments"


def decide(rows: Sequence[OutboxRow], view: OutboxView, rules: OutboxRules) -> tuple[Action, ...]:
    """Actions of one tick.

    Args:
        rows: All rows that are not final, in ascending order of nonce.
        view: The chain.
        rules: Figures of the chain.
    """
    actions: list[Action] = []
    for row in rows:
        actions.extend(_decide_row(row, view, rules))
    waiting = next((row for row in rows if row.inclusion is None), None)
    if waiting and view.balance_wei < (cost := waiting.variants[-1].cost_wei):
        have = f"the account has {view.balance_wei} wei of gas money"
        reason = f"{have}, {waiting.purpose} may take {cost}"
        fix = "send the chain's coin to the account: it goes on by itself"
        actions.append(Halt(HaltKind.KEY_FUNDS, None, reason, fix))
    return tuple(actions)


def next_nonce(rows: Sequence[OutboxRow], view: OutboxView) -> int | None:
    """Nonce for a new row; None while another program's transaction on top is not final.

    A row after such a transaction would wait for ever if a reorganisation dropped that one.

    Args:
        rows: All rows that are not final.
        view: The chain.
    """
    nonce = max([view.final_nonce, *(row.nonce + 1 for row in rows)])
    return None if view.nonce > nonce else nonce


def halted_jobs(actions: Iterable[Action]) -> dict[JobId | None, Halt]:
    """The first halt of each job; under None the account's."""
    halts: dict[JobId | None, Halt] = {}
    for action in actions:
        if isinstance(action, Halt):
            halts.setdefault(action.job_id, action)
    return halts


def abandoned_by_retry(
    rows: Sequence[OutboxRow], job_id: JobId, halted: Iterable[int]
) -> tuple[int, ...]:
    """Nonces of the rows to give up when a job's halt is cleared.

    Args:
        rows: All rows that are not final.
        job_id: The halted job.
        halted: Nonces of its rows that halt it: see `halting_rows`.

    Returns:
        Those rows and the job's later ones that have had no effect: the next batch repeats their
        totals, and what depended on a failed call is planned anew.
    """
    first = min(halted, default=None)
    if first is None:
        return ()
    return tuple(
        row.nonce
        for row in rows
        if row.job_id == job_id and row.nonce >= first and not row.is_done and not row.is_abandoned
    )


def halting_rows(rows: Iterable[OutboxRow], view: OutboxView) -> tuple[int, ...]:
    """Nonces of the rows that halt their jobs."""
    return tuple(row.nonce for row in rows if _halt(row, view) is not None)


def _decide_row(row: OutboxRow, view: OutboxView, rules: OutboxRules) -> Iterator[Action]:
    included = row.inclusion
    if included is None:
        yield from _decide_unmined(row, view, rules)
        return
    if view.block_hashes.get(included.block) != included.block_hash:
        yield MarkUnmined(row.nonce)
        return
    is_deep = view.block - included.block >= rules.depth
    if row.is_done or row.is_abandoned:
        if is_deep:
            yield MarkFinal(row.nonce)
        return
    if row.failure is None or view.block > included.block:
        # Asked at each new block until it is final: an earlier call may come back after a
        # reorganisation and bring the effect.
        yield FindFailure(row.nonce)
    if halt := _halt(row, view):
        yield halt


def _decide_unmined(row: OutboxRow, view: OutboxView, rules: OutboxRules) -> Iterator[Action]:
    for variant in reversed(row.variants):
        if variant.hash in view.inclusions:
            yield MarkMined(row.nonce, view.inclusions[variant.hash])
            return
    if halt := _halt(row, view):
        yield halt
    elif row.is_abandoned and view.final_nonce > row.nonce:
        yield MarkFinal(row.nonce)
    elif view.nonce > row.nonce:
        # A block has this nonce, and no receipt is known yet: the RPC lags, or a stranger's
        # transaction is there. It is decided once that block is final.
        return
    elif view.block - row.variants[-1].signed_at_block >= rules.bump_blocks:
        yield RaiseFee(row.nonce)
    elif view.block > row.sent_at_block:
        yield SendAgain(row.nonce)


def _halt(row: OutboxRow, view: OutboxView) -> Halt | None:
    if row.is_abandoned:
        return None
    if row.inclusion is None:
        is_known = any(variant.hash in view.inclusions for variant in row.variants)
        if is_known or view.final_nonce <= row.nonce:
            return None
        reason = f"another program used nonce {row.nonce}, which was signed for {row.purpose}"
        fix = f"let this coordinator alone use its key, then {_retry(row)}"
        return Halt(HaltKind.NONCE_TAKEN, row.job_id, reason, fix)
    if row.is_done or row.failure is None:
        return None
    reason = f"the ledger refused {row.purpose}: {row.failure.reason}"
    return Halt(HaltKind.REVERTED, row.job_id, reason, f"correct the cause, then {_retry(row)}")


def _retry(row: OutboxRow) -> str:
    return f"hypergpu ledger retry {row.job_id}; or {_RESTART}" if row.job_id else _RESTART
