"""What a node is told of how its update was judged."""

from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.trust.weights import WHOLE
from hypergpu.ids import NodeId
from hypergpu.units import round_text

TEXT_MOST = 500
"""Characters of a judgement."""


def judgement_text(weighing: Weighing, node: NodeId, number: int) -> str:
    """How much an update of a round counts and is paid, and why; empty: both in full.

    Args:
        weighing: Of the round.
        node: The update's.
        number: Of the round, from 0.
    """
    vote, pay = weighing.votes.get(node, WHOLE), weighing.pay_shares.get(node, WHOLE)
    if weighing.rollback:
        text = f"the job went back to the model before: {weighing.rollback}"
    elif min(vote, pay) == WHOLE:
        return ""
    else:
        reason = weighing.pay_reasons.get(node) or weighing.reasons.get(node, "")
        counts = f"counts {vote / WHOLE:.2f} in the fold, is paid {pay / WHOLE:.2f}"
        text = f"{counts}: {reason}" if reason else counts
    return f"{round_text(number)}: {text}"[:TEXT_MOST]
