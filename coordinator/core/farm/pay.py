"""What of accepted results becomes receipts. A result counts in full or not at all: its quality is
whole, and its units were checked against what its items may have.
"""

from collections.abc import Sequence

from coordinator.core.farm.state import ReturnedResult
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.statements import WHOLE_BPS

SINGLE, CONFIRMED = "map/1 single", "map/1 confirmed"
"""Names of the measurement in receipts: nobody was asked, or another node gave the same."""


def accepted_works(group: Sequence[ReturnedResult]) -> tuple[MeasuredWork, ...]:
    """Work of results that count together; without those that their nodes did not sign."""
    is_confirmed = len(group) > 1
    return tuple(
        MeasuredWork(
            contribution=result.claim.contribution,
            signature=result.claim.signature,
            quality_bps=WHOLE_BPS,
            evaluator=CONFIRMED if is_confirmed else SINGLE,
            reason="another node gave the same" if is_confirmed else "",
        )
        for result in group
        if result.claim is not None
    )
