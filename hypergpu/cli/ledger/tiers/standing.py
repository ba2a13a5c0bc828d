"""How far each node's pay is, computed from what the ledger says of its shares at one block."""

from collections.abc import Mapping, Sequence

import msgspec

from hypergpu.ids import NodeId
from hypergpu.ledger.audit.facts import AccountFact, ShareFact
from hypergpu.ledger.pay import earned_at_least
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.units import Wei

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


class Clock(msgspec.Struct, frozen=True):
    """When it is, by the chain, and how long a challenge window is."""

    now_s: int
    window_s: int


def node_tiers(
    account: AccountFact,
    shares: Sequence[ShareFact],
    closed: Mapping[int, int],
    *,
    unit_price: int,
    vouched: int,
    clock: Clock,
) -> NodeTiers:
    """How far a node's pay is.

    Args:
        account: Of the node in the job.
        shares: Of the node, by epoch, ascending.
        closed: When each of their epochs was closed; 0: it is open.
        unit_price: Of the job.
        vouched: By its newest voucher.
        clock: Of the chain.
    """
    waiting = [one for one in shares if one.state is ShareState.DUE]
    worth = [
        one.reward if closed[one.epoch] else earned_at_least(Wei(unit_price), one.score)
        for one in waiting
    ]
    # What vouchers took beyond settled shares is made good by the next ones.
    ahead = max(0, account.paid + account.pending - account.earned)
    due: list[Due] = []
    for share, amount in zip(waiting, worth, strict=True):
        left = max(0, amount - ahead)
        ahead = max(0, ahead - amount)
        if left:
            closed_at_s = closed[share.epoch]
            at_s = closed_at_s + clock.window_s if closed_at_s else None
            due.append(Due(str(left), f"epoch {share.epoch}", at_s))
    if account.pending:
        due.append(Due(str(account.pending), CLAIM, account.release_at_s))
    voidable = sum(
        one.paid
        for one in shares
        if one.state is ShareState.PAID and closed[one.epoch] + clock.window_s > clock.now_s
    )
    return NodeTiers(
        id=account.node,
        vouched=str(vouched),
        recorded=str(account.earned + account.voided + sum(worth)),
        receipts_recorded=account.counted,
        paid=str(account.paid),
        final=str(max(0, account.paid - voidable)),
        pending=str(account.pending),
        voided=str(account.voided),
        due=due,
    )
