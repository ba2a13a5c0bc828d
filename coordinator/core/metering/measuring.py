"""From what was measured of a round's updates to the quality that each receipt states."""

import math
from statistics import median

from coordinator.core.events import UpdatesJudged
from coordinator.core.job import UnmeasuredRound
from hypergpu.ids import NodeId
from hypergpu.ledger.quality import (
    TRIALS_KEPT,
    Measured,
    Quality,
    Trial,
    quality_of,
    trial_of,
    worth_by,
)

Trials = tuple[Trial, ...]


def heard(trials: Trials, waiting: UnmeasuredRound, judged: UpdatesJudged | None) -> Trials:
    """The job's trials with what a judge found of a round; the oldest give way."""
    if judged is None or judged.base_loss is None:
        return trials
    base, whole = judged.base_loss, _round_gain(judged)
    found = (
        trial_of(node, gain, math.nan if whole is None else whole, base)
        for node, gain in _gains(waiting, judged).items()
    )
    return (*trials, *(trial for trial in found if trial is not None))[-TRIALS_KEPT:]


def qualities(
    waiting: UnmeasuredRound, judged: UpdatesJudged | None, trials: Trials
) -> dict[NodeId, Quality]:
    """The quality of each update of a round, by what is known of it and of its node.

    Args:
        waiting: The round.
        judged: What was judged of it, if anything.
        trials: With what was.
    """
    known = [due.agreement for due in waiting.due.values() if due.agreement is not None]
    typical = median(known) if known else None
    worth = worth_by(trials)
    is_idle = _is_idle(waiting, judged)
    return {
        node: quality_of(
            Measured(
                agreement=due.agreement,
                typical_agreement=typical,
                worth=None if worth is None else worth.of(node),
                is_round_idle=is_idle,
                took_ms=due.took_ms,
                allowed_ms=due.allowed_ms,
            )
        )
        for node, due in waiting.due.items()
    }


def _gains(waiting: UnmeasuredRound, judged: UpdatesJudged) -> dict[NodeId, float]:
    """What each judged update alone took off the loss; minus infinity when that is not finite."""
    if judged.base_loss is None:
        return {}
    return {
        update.node: judged.base_loss - judged.losses.get(update.node, math.inf)
        for update in waiting.judged
    }


def _is_idle(waiting: UnmeasuredRound, judged: UpdatesJudged | None) -> bool:
    if judged is None or not (gains := _gains(waiting, judged)):
        return False
    whole = _round_gain(judged)
    return (whole is None or whole <= 0) and all(gain <= 0 for gain in gains.values())


def _round_gain(judged: UpdatesJudged) -> float | None:
    if judged.base_loss is None or judged.made_loss is None:
        return None
    return judged.base_loss - judged.made_loss
