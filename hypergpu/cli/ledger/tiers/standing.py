"""How far each node's pay is, computed from what the ledger says of its shares at one block."""

from collections.abc import Sequence

import msgspec

from hypergpu.ids import NodeId
from hypergpu.ledger.pay import PRICED_SCORE
from hypergpu.ledger.settlement.state import ShareState

TIERS = {
    "T0": "vouched: promised by the newest voucher",
    "T1": "recorded: what its receipts that are in blocks are worth",
    "T2": "paid: into its wallet or its credit",
    "T3": "final: paid, and the window is over: nobody can void it any more",
}
OPEN_EPOCH = "the epoch"
CLAIM = "a voucher's claim"


class Due(msgspec.Struct, frozen=True):
    """Something that is to be paid."""

    amount: str
    what: str
    """A share's epoch, or a voucher's claim."""
    at_s: int | None
    """From when anybody may have it paid, by the chain's clock; None: the epoch is not closed."""


class NodeTiers(msgspec.Struct, frozen=True, kw_only=True):
    """How far one node's pay is. Amounts are whole units, as text: they may be long."""

    id: NodeId
    vouched: str
    recorded: str
    receipts_recorded: int
    paid: str
    final: str
    pending: str
    """What a voucher claims and its window still holds."""
    voided: str
    due: list[Due]


class PayView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the pay of a job is, by its chain."""

    chain_id: int
    contract: str
    block: int
    time_s: int
    """Of the block: the chain's clock."""
    window_s: int
    """From an epoch's closing on; a share is then paid without stake, and can be voided no more."""
    first_epoch: int
    """What is due of earlier ones is left out: there are too many to ask for."""
    tiers: dict[str, str]
    nodes: list[NodeTiers]


class ToldEpoch(msgspec.Struct, frozen=True):
    """An epoch as the ledger tells it."""

    number: int
    closed_at_s: int
    """0: it is open."""


class ToldShare(msgspec.Struct, frozen=True):
    """A node's share of an epoch as the ledger tells it."""

    epoch: ToldEpoch
    state: ShareState
    score: int
    reward: int
    """0 while the epoch is open."""
    paid: int


class ToldAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A node in a job as the ledger tells it."""

    counted: int = 0
    earned: int = 0
    paid: int = 0
    pending: int = 0
    release_at_s: int = 0
    voided: int = 0


class Clock(msgspec.Struct, frozen=True):
    """When it is, by the chain, and how long a challenge window is."""

    now_s: int
    window_s: int


def node_tiers(
    node: NodeId,
    account: ToldAccount,
    shares: Sequence[ToldShare],
    *,
    unit_price: int,
    vouched: int,
    clock: Clock,
) -> NodeTiers:
    """How far a node's pay is.

    Args:
        node: Whose.
        account: Of the node in the job.
        shares: Of the node, by epoch, ascending.
        unit_price: Of the job.
        vouched: By its newest voucher.
        clock: Of the chain.
    """
    waiting = [one for one in shares if one.state is ShareState.DUE]
    worth = [_worth(one, unit_price) for one in waiting]
    # What vouchers took beyond settled shares is made good by the next ones.
    ahead = max(0, account.paid + account.pending - account.earned)
    due: list[Due] = []
    for share, amount in zip(waiting, worth, strict=True):
        left = max(0, amount - ahead)
        ahead = max(0, ahead - amount)
        if left:
            due.append(_due_share(share.epoch, left, clock.window_s))
    if account.pending:
        due.append(Due(str(account.pending), CLAIM, account.release_at_s))
    voidable = sum(
        one.paid
        for one in shares
        if one.state is ShareState.PAID and one.epoch.closed_at_s + clock.window_s > clock.now_s
    )
    return NodeTiers(
        id=node,
        vouched=str(vouched),
        recorded=str(account.earned + account.voided + sum(worth)),
        receipts_recorded=account.counted,
        paid=str(account.paid),
        final=str(max(0, account.paid - voidable)),
        pending=str(account.pending),
        voided=str(account.voided),
        due=due,
    )


def _worth(share: ToldShare, unit_price: int) -> int:
    """What a share comes to; of an open epoch what it comes to where the escrow suffices."""
    return share.reward if share.epoch.closed_at_s else unit_price * share.score // PRICED_SCORE


def _due_share(epoch: ToldEpoch, amount: int, window_s: int) -> Due:
    at_s = epoch.closed_at_s + window_s if epoch.closed_at_s else None
    return Due(str(amount), f"epoch {epoch.number}", at_s)
