"""Steps of the next round that a node takes ahead, while bytes of this one move."""

from math import ceil

from hypergpu.jobfile.spec import JobSpec

_COVER = 1.5
"""Time of the steps taken ahead over the time that bytes are forecast to move."""


def prefetch_limit(spec: JobSpec, inner_steps: int) -> int:
    """The inner steps that may be taken before a round is open, of one with so many, where nothing
    is known of lines.

    They start from the node's own end of the round before, without what the others found. Half of
    a round costs next to nothing, a whole one a quarter more samples (docs/decisions/0016).
    """
    return inner_steps // 2 if spec.round.overlap == "eager" else 0


def planned_prefetch(spec: JobSpec, span_us: float, moving_us: float, step_us: float) -> int:
    """The steps of the next round that a node may begin, of one that will take as long as this one.

    They take a little longer than its bytes are forecast to move: half of a round for the middle
    node, and up to all of it where a line is so slow that its node would do little but wait.
    """
    if spec.round.overlap != "eager":
        return 0
    return min(int(span_us / step_us), ceil(_COVER * moving_us / step_us))
