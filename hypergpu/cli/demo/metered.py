"""How many transactions the demo's contributions took."""

from collections import Counter
from typing import NamedTuple

from hypergpu.cli.ledger.account import LedgerView

_IN_A_BLOCK = ("mined", "final")


class Recorded(NamedTuple):
    """Transactions that record contributions, all of them in blocks."""

    transactions: int
    epoch_least: int
    """Of the epoch with the fewest."""


def recorded(view: LedgerView) -> Recorded:
    """What a job's contributions took on the chain; nothing where there is none."""
    epochs = Counter(
        row.epoch
        for row in view.transactions
        if row.purpose.startswith("batch/") and row.state in _IN_A_BLOCK
    )
    return Recorded(epochs.total(), min(epochs.values(), default=0))
