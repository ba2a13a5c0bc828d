"""The reward rule, in whole numbers of the token's smallest unit.

    score  = samples x quality_bps                      of a receipt
    worth  = unit_price x total_score // 1,000,000      of all receipts of a node in a job
    delta  = min(worth - earned, free escrow)           allotted when a score is recorded

Scores only grow, and everything is derived from a node's running total, so rounding never adds up
and no order of records changes the end. The contract computes the same numbers.
"""

from hypergpu.statements.receipt import WHOLE_BPS
from hypergpu.units import Samples, Wei

PRICED_SCORE = 1_000_000
"""The score that a job's unit price is for: a hundred samples of full quality."""
_SAMPLES_PRICED = PRICED_SCORE // WHOLE_BPS


def worth(unit_price: Wei, total_score: int) -> Wei:
    """Amount that a node has earned with a total score, rounded down."""
    return Wei(unit_price * total_score // PRICED_SCORE)


def funded_samples(
    escrow: Wei, unit_price: Wei, total_score: int, measured_samples: Samples
) -> Samples:
    """Samples since a job's beginning that its escrow covers, the rest at full quality.

    Args:
        escrow: All that was ever set aside for the job.
        unit_price: Above 0.
        total_score: Of all nodes, by the receipts so far.
        measured_samples: Samples whose quality is known.
    """
    left = max(0, escrow - worth(unit_price, total_score))
    return Samples(measured_samples + left * _SAMPLES_PRICED // unit_price)
