"""From the findings about a round's updates to their final quality."""

import math
from statistics import median

from coordinator.core.job.state import Judgement, Trial, UnmeasuredRound
from coordinator.core.quality.rule import (
    TRIALS_KEPT,
    Quality,
    UpdateFindings,
    quality_of,
    trial_of,
    worth_by,
)
from hypergpu.ids import NodeId

Trials = tuple[Trial, ...]


def add_trials(trials: Trials, waiting: UnmeasuredRound) -> Trials:
    """The job's trials with those of a judged round; the oldest are forgotten."""
    judgement = waiting.judgement
    if judgement is None or judgement.base_loss is None:
        return trials
    base, whole = judgement.base_loss, _round_gain(judgement)
    found = (
        trial_of(node, gain, math.nan if whole is None else whole, base)
        for node, gain in _gains(waiting).items()
    )
    return (*trials, *(trial for trial in found if trial is not None))[-TRIALS_KEPT:]


def update_qualities(waiting: UnmeasuredRound, trials: Trials) -> dict[NodeId, Quality]:
    """The quality of each update of a round, from its own findings and its node's trials.

    Args:
        waiting: The round, with its judgement where it has one.
        trials: The job's, those of this round included.
    """
    known = [due.agreement for due in waiting.due.values() if due.agreement is not None]
    typical = median(known) if known else None
    worth = worth_by(trials)
    is_idle = _is_idle(waiting)
    return {
        node: quality_of(
            UpdateFindings(
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


def _gains(waiting: UnmeasuredRound) -> dict[NodeId, float]:
    """Reduction of the loss by each judged update alone; minus infinity where it is not finite."""
    judgement = waiting.judgement
    if judgement is None or judgement.base_loss is None:
        return {}
    return {
        update.node: judgement.base_loss - judgement.losses.get(update.node, math.inf)
        for update in waiting.judged
    }


def _is_idle(waiting: UnmeasuredRound) -> bool:
    """Whether the round was judged and neither it nor a judged update lowered the loss."""
    if waiting.judgement is None or not (gains := _gains(waiting)):
        return False
    whole = _round_gain(waiting.judgement)
    return (whole is None or whole <= 0) and all(gain <= 0 for gain in gains.values())


def _round_gain(judgement: Judgement) -> float | None:
    if judgement.base_loss is None or judgement.made_loss is None:
        return None
    return judgement.base_loss - judgement.made_loss
