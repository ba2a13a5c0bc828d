"""Work that nodes gave back, and why: where everybody does, trying again would only repeat it."""

from collections import Counter
from collections.abc import Iterable

from coordinator.core.work.leases import LeasedWork, WorkState
from hypergpu.units import several

_REASONS_MOST, _REASON_LENGTH_MOST = 3, 300


def hand_back_reasons(works: Iterable[LeasedWork]) -> str:
    """The nodes' reasons, the commonest first, each with how many nodes gave it."""
    counts = Counter(
        each.reason or "no reason was given" for each in works if each.work is WorkState.HANDED_BACK
    )
    texts = [
        f"{reason[:_REASON_LENGTH_MOST]} ({several(count, 'node')})"
        for reason, count in counts.most_common(_REASONS_MOST)
    ]
    others = len(counts) - len(texts)
    return "; ".join([*texts, *([f"and {several(others, 'other reason')}"] if others else [])])
