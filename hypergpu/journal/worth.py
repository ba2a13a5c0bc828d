"""The price of accepted work, in whole numbers, as the ledger's contract computes it.

    score  = samples x quality in 1/10,000              of an accepted update
    worth  = unit_price x total score // 1,000,000      of all updates of a node in a job
    cost   = sum of the nodes' worth                    of a job

Scores only grow and worth follows from a node's running total, so rounding never adds up and no
order of records changes the end.
"""

from collections.abc import Iterable

from hypergpu.statements import WHOLE_BPS
from hypergpu.units import Samples, Wei

PRICED_SCORE = 1_000_000
"""The score that a job's unit price is for: a hundred samples of full quality."""
PRICED_SAMPLES = PRICED_SCORE // WHOLE_BPS


def worth(unit_price: int, total_score: int) -> Wei:
    """Amount that a node has earned with a total score, rounded down."""
    return Wei(unit_price * total_score // PRICED_SCORE)


def cost(unit_price: int, total_scores: Iterable[int]) -> Wei:
    """Amount that all nodes of a job have earned, each rounded down."""
    return Wei(sum(worth(unit_price, each) for each in total_scores))


def most_for(unit_price: int, samples: int) -> Wei:
    """Most that so many samples may cost, whoever trains them: full quality, rounded up."""
    return Wei(-(-unit_price * samples // PRICED_SAMPLES))


def samples_for(unit_price: int, amount: int) -> Samples:
    """Samples of full quality that an amount covers; the price is above 0."""
    return Samples(amount * PRICED_SAMPLES // unit_price)
