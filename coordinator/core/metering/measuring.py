"""From what was measured of a round's updates to the quality that each receipt states."""

import math
from statistics import median

from coordinator.core.events import UpdatesJudged
from coordinator.core.job import UnmeasuredRound
from hypergpu.ids import NodeId
from hypergpu.ledger.quality import Measured, Quality, quality_of


def qualities(
    waiting: UnmeasuredRound, judged: UpdatesJudged | None = None
) -> dict[NodeId, Quality]:
    """The quality of each update of a round, by what is known of it."""
    known = [due.agreement for due in waiting.due.values() if due.agreement is not None]
    typical = median(known) if known else None
    whole = _round_gain(judged)
    return {
        node: quality_of(
            Measured(
                agreement=due.agreement,
                typical_agreement=typical,
                gain=_gain(waiting, judged, node),
                round_gain=whole,
                took_ms=due.took_ms,
                allowed_ms=due.allowed_ms,
            )
        )
        for node, due in waiting.due.items()
    }


def _gain(waiting: UnmeasuredRound, judged: UpdatesJudged | None, node: NodeId) -> float | None:
    """What one update alone took off the loss; minus infinity when the loss is not finite with it.

    None where it was not judged.
    """
    if judged is None or judged.base_loss is None:
        return None
    if all(update.node != node for update in waiting.judged):
        return None
    loss = judged.losses.get(node)
    return -math.inf if loss is None else judged.base_loss - loss


def _round_gain(judged: UpdatesJudged | None) -> float | None:
    if judged is None or judged.base_loss is None or judged.made_loss is None:
        return None
    return judged.base_loss - judged.made_loss
