"""What work earns: the pay rule, in whole numbers of the currency's smallest unit.

    score  = samples x quality_bps                       of a receipt; those of an epoch are added
    pool   = unit_price x total_score // 1,000,000       of an epoch, at most what the escrow has
    reward = pool x score // total_score                 of a node in an epoch

Everything is rounded down, so that rewards never exceed their pool; what is left of it (the dust)
goes back to the job's escrow. The contract computes the same numbers in the same order.
"""

from collections.abc import Iterable, Mapping

from hypergpu.ids import NodeId
from hypergpu.ledger.typed import Receipt
from hypergpu.units import BasisPoints, Samples, Wei

WHOLE_BPS = BasisPoints(10_000)
AMOUNT_MOST = 2**96 - 1
"""What the contract's fields for amounts hold, a job's escrow among them."""
PRICED_SCORE = 1_000_000
"""The score that a job's unit price is for: a hundred samples of full quality."""


def epoch_of(round_: int, rounds_per_epoch: int) -> int:
    """The epoch that a round is settled in. Both count from 0."""
    return round_ // rounds_per_epoch


def score(samples: Samples, quality_bps: BasisPoints) -> int:
    """What a receipt weighs within its epoch."""
    return samples * quality_bps


def scores(receipts: Iterable[Receipt]) -> dict[NodeId, int]:
    """Each node's score; the receipts are those of one job and epoch."""
    summed: dict[NodeId, int] = {}
    for receipt in receipts:
        earned = score(receipt.samples, receipt.quality_bps)
        summed[receipt.node] = summed.get(receipt.node, 0) + earned
    return summed


def pool(unit_price: Wei, total_score: int, free: Wei) -> Wei:
    """What an epoch pays altogether, given what the job's escrow still has free."""
    return min(free, Wei(unit_price * total_score // PRICED_SCORE))


def reward(pool_: Wei, own_score: int, total_score: int) -> Wei:
    """A node's part of an epoch's pool."""
    return Wei(pool_ * own_score // total_score) if total_score else Wei(0)


def rewards(pool_: Wei, node_scores: Mapping[NodeId, int]) -> dict[NodeId, Wei]:
    """Each node's part. Their sum is the pool less the dust, which is less than one unit a node."""
    total = sum(node_scores.values())
    return {node: reward(pool_, own, total) for node, own in node_scores.items()}


def earned_at_least(unit_price: Wei, own_score: int) -> Wei:
    """What a score in an epoch that is still open earns for certain.

    The epoch's total is not known yet, and rounding twice can cost one unit against rounding once.
    It holds as long as the escrow covers the epoch, which the coordinator sees to before it opens a
    round.
    """
    return Wei(max(0, unit_price * own_score // PRICED_SCORE - 1))


def guaranteed(unit_price: Wei, samples: Samples, guaranteed_bps: BasisPoints) -> Wei:
    """What an accepted update is advanced before its quality has been measured."""
    return Wei(unit_price * score(samples, guaranteed_bps) // PRICED_SCORE)


def cost_at_most(unit_price: Wei, samples: Samples) -> Wei:
    """What work may cost at full quality; rounded up, since it is asked before the work is done."""
    return Wei(-(-unit_price * score(samples, WHOLE_BPS) // PRICED_SCORE))
