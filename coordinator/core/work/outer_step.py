"""The outer step of a round: as the job states it, else chosen by the round and its participants.

Nesterov's momentum pays over many rounds and with several participants, whose mean is smoother than
each update. It overshoots while it is young, and with one participant it only disturbs a good inner
optimizer: the table of 2026-11-26 in docs/log.md.
"""

from typing import NamedTuple

from hypergpu.jobfile.spec import Outer, OuterSettings

PLAIN_STEP = Outer(learning_rate=1.0, momentum=0.0)
"""The outer step of sparse updates: their decaying residual is a momentum already."""
_HALF_AFTER_ROUNDS = 10
"""Rounds after which momentum is half of its most."""
_LESS_RATE = 1 / 3
"""The learning rate falls by this part of the momentum: from 1 to the 0.7 that goes with 0.9."""


class OuterChoice(NamedTuple):
    """An outer step with its reason."""

    step: Outer
    reason: str


def chosen_outer_step(
    stated: OuterSettings,
    *,
    round_number: int,
    participants: int,
    momentum_most: float = Outer().momentum,
) -> OuterChoice:
    """Choose the outer step of a round; the same arguments give the same step in every replay.

    Args:
        stated: What the job states.
        round_number: How many rounds came before it.
        participants: Those that train a shard of their own in it.
        momentum_most: Momentum after many rounds, where the job states nothing.
    """
    if stated.learning_rate is not None or stated.momentum is not None:
        usual = Outer()
        rate = usual.learning_rate if stated.learning_rate is None else stated.learning_rate
        momentum = usual.momentum if stated.momentum is None else stated.momentum
        return OuterChoice(Outer(rate, momentum), "as the job states")
    if participants == 1:
        return OuterChoice(PLAIN_STEP, "plain: one node takes part")
    momentum = momentum_most * round_number / (round_number + _HALF_AFTER_ROUNDS)
    step = Outer(1 - momentum * _LESS_RATE, momentum)
    return OuterChoice(step, f"momentum {momentum:.2f} after {round_number} rounds")
