"""The outer step of a training's round: that of its spec, plain where updates are sparse."""

from coordinator.core.work.outer_step import PLAIN_STEP, OuterChoice, chosen_outer_step
from hypergpu.jobfile.spec import MOMENTUM_MOST_OVERLAPPED, JobSpec, Outer


def outer_step(
    spec: JobSpec, *, round_number: int, participants: int, is_sparse: bool
) -> OuterChoice:
    """Choose the outer step of a round; the same arguments give the same step in every replay.

    Args:
        spec: The settings that the round was opened with.
        round_number: How many rounds came before it.
        participants: Nodes that train a shard of their own in it.
        is_sparse: Whether its codecs are sparse.
    """
    if is_sparse:
        return OuterChoice(PLAIN_STEP, "plain: sparse codecs need it")
    is_overlapped = spec.round.overlap != "none"
    return chosen_outer_step(
        spec.outer,
        round_number=round_number,
        participants=participants,
        momentum_most=MOMENTUM_MOST_OVERLAPPED if is_overlapped else Outer().momentum,
    )
