"""What to do about one transaction that was signed and kept: the heart of the pump, without IO.

Theory of operation. A transaction's bytes are stored before they are first sent. From then on there
is no way back: its nonce is spent by one of its attempts, which differ only in their fee, or by
nobody. So the one question is what is known of it now, and every answer is safe to give twice:

- No attempt is in a block: send the *same* bytes again. A chain that has them says so, one that
  lost them (a crash, a reorganisation) takes them.
- One is in a block: note where. Once the block has enough others on top and is still the one at its
  height, the transaction is final, and is never looked at again.
- One failed in its block: everything behind it was built on its success. Stop, loudly.
- Its nonce is used and none of its attempts is in a block, for long: somebody else holds the key.
  Stop, loudly. For a moment it only means that the RPC's answers are of different instants.
- It stands behind one that failed, and that is to be mended: it must not go first. Its nonce is
  spent on nothing, by an attempt that is void; it counts as failed, and is signed afresh.
- It stays outside although the account's turn is its own: its fee is too low. Sign the same again
  with a higher one, keep the old attempt, since either may be mined.
"""

from enum import Enum

import msgspec

from hypergpu.units import Milliseconds, several


class TransactionState(Enum):
    """Where a transaction is."""

    WAITING = "waiting"
    """Stored; sent or about to be; in no block that is known."""
    MINED = "mined"
    """In a block that may still be reorganised away."""
    FINAL = "final"
    FAILED = "failed"
    """Its nonce is spent without effect. Nothing is sent behind it."""
    ABANDONED = "abandoned"
    """Failed, and what it was for is signed again under a later nonce."""


IN_A_BLOCK = frozenset({TransactionState.MINED, TransactionState.FINAL})
"""It has taken effect, as far as is known."""


class BlockName(msgspec.Struct, frozen=True):
    """A block by its height and hash."""

    number: int
    hash: bytes


class Attempt(msgspec.Struct, frozen=True):
    """One signing of a transaction: the fee, and the name it would have on the chain."""

    hash: bytes
    max_fee_wei: int
    tip_wei: int
    is_void: bool = False
    """It spends the nonce on nothing."""


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that is not final, as it is remembered."""

    nonce: int
    attempts: tuple[Attempt, ...]
    """Oldest first; never empty."""
    state: TransactionState = TransactionState.WAITING
    block: BlockName | None = None
    """Where it was last seen."""
    sent_at_ms: Milliseconds | None = None
    """When it was last sent by this process; None: not yet."""
    first_sent_block: int | None = None
    """The chain's height when this process first sent its newest attempt."""
    vanished_at_ms: Milliseconds | None = None
    """Since when its nonce is used while it is in no block; None: that is not so."""


class Found(msgspec.Struct, frozen=True):
    """One of its attempts, in a block."""

    block: BlockName
    is_success: bool
    hash: bytes | None = None
    """Of the attempt; None: not known which."""


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """What the chain says now, of one instant as far as an RPC allows."""

    height: int
    """Of the newest block."""
    found: Found | None = None
    """None: no attempt is known to be in a block."""
    canonical_hash: bytes | None = None
    """Of the block that is now at ``found``'s height; None: not known."""
    next_nonce: int = 0
    """How many transactions of the account are in blocks."""
    is_behind_failed: bool = False
    """It failed, or one before it did, and that is to be mended."""


class SendingRule(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the pump is: a chain's profile says."""

    depth: int
    """Blocks on top of a transaction's own that make it final; 0 and up. A reorganisation of as
    many leaves it alone."""
    resend_ms: int = 2_000
    """The same bytes again after so long in no block."""
    line_each: int = 256
    """Of so many ahead of it in the account's line, a transaction waits as long again: blocks take
    them in order, and one that the pool lost is missed when its turn comes near."""
    bump_blocks: int = 3
    """A higher fee after so many blocks that did not take it although it was its turn."""
    foreign_ms: int = 30_000
    """For how long a used nonce without a transaction of ours is put down to the RPC."""


class Deed(Enum):
    """What to do about it."""

    SEND = "send"
    BUMP = "bump"
    VOID = "spend its nonce on nothing"
    WAIT = "wait"
    NOTE_MINED = "note that it is mined"
    NOTE_MISSING = "note that it is mined no longer"
    FINISH = "finish"
    HALT = "halt"


class Ruling(msgspec.Struct, frozen=True):
    """A deed and why, for logs, tests and people."""

    deed: Deed
    reason: str


def ruling(pending: Pending, seen: Sighting, rule: SendingRule, now_ms: Milliseconds) -> Ruling:
    """Decide about one transaction.

    Args:
        pending: It, as remembered.
        seen: What the chain says.
        rule: How patient to be.
        now_ms: Monotonic time of this process.
    """
    if seen.found is not None:
        return _found(pending, seen.found, seen, rule)
    if pending.state is TransactionState.MINED:
        where = pending.block.number if pending.block else "?"
        return Ruling(
            Deed.NOTE_MISSING, f"it was in block {where}, which was reorganised away: it goes again"
        )
    if seen.next_nonce > pending.nonce:
        return _used_up(pending, rule, now_ms)
    return _outside(pending, seen, rule, now_ms)


def remembered(pending: Pending, seen: Sighting, now_ms: Milliseconds) -> Pending:
    """The transaction with what its next ruling must know of this sighting."""
    is_vanished = seen.found is None and seen.next_nonce > pending.nonce
    if not is_vanished:
        return msgspec.structs.replace(pending, vanished_at_ms=None)
    if pending.vanished_at_ms is None:
        return msgspec.structs.replace(pending, vanished_at_ms=now_ms)
    return pending


def is_undone(block: BlockName, height: int, canonical_hash: bytes | None) -> bool:
    """Whether a reorganisation reached a block that counted as final.

    A block that the RPC does not know, since it lags or the chain is shorter now, is not judged.
    """
    return canonical_hash is not None and height >= block.number and canonical_hash != block.hash


def _found(pending: Pending, found: Found, seen: Sighting, rule: SendingRule) -> Ruling:
    if not found.is_success:
        return Ruling(Deed.HALT, f"it failed in block {found.block.number}")
    if seen.canonical_hash is not None and seen.canonical_hash != found.block.hash:
        return Ruling(Deed.WAIT, f"block {found.block.number} is being reorganised: ask again")
    depth = seen.height - found.block.number
    if seen.canonical_hash is not None and depth >= rule.depth:
        return Ruling(Deed.FINISH, f"block {found.block.number} is {depth} deep")
    if pending.state is TransactionState.MINED and pending.block == found.block:
        return Ruling(Deed.WAIT, f"block {found.block.number} is {depth} of {rule.depth} deep")
    return Ruling(Deed.NOTE_MINED, f"it is in block {found.block.number}")


def _used_up(pending: Pending, rule: SendingRule, now_ms: Milliseconds) -> Ruling:
    since_ms = pending.vanished_at_ms
    if since_ms is None or now_ms - since_ms < rule.foreign_ms:
        return Ruling(Deed.WAIT, f"nonce {pending.nonce} is used and its receipt is not there yet")
    return Ruling(
        Deed.HALT,
        f"nonce {pending.nonce} was used by a transaction that this coordinator did not sign",
    )


def _outside(pending: Pending, seen: Sighting, rule: SendingRule, now_ms: Milliseconds) -> Ruling:
    if seen.is_behind_failed and not pending.attempts[-1].is_void:
        return Ruling(Deed.VOID, "it must not go before one that failed, which is signed again")
    if pending.sent_at_ms is None:
        return Ruling(Deed.SEND, "this process has not sent it yet")
    is_its_turn = seen.next_nonce == pending.nonce
    since = pending.first_sent_block
    if is_its_turn and since is not None and seen.height - since >= rule.bump_blocks:
        passed = several(seen.height - since, "block")
        return Ruling(Deed.BUMP, f"{passed} did not take it though it was its turn")
    ahead = pending.nonce - seen.next_nonce
    if now_ms - pending.sent_at_ms >= rule.resend_ms * (1 + ahead // rule.line_each):
        return Ruling(Deed.SEND, f"in no block after {now_ms - pending.sent_at_ms} ms")
    return Ruling(Deed.WAIT, "sent a moment ago")
