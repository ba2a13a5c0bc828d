"""When a round of several rings is folded: once every ring's part is in, or without late ones.

A ring is waited for from the round's beginning on, or from when it is whole, whether it loses a
stage meanwhile or not: it goes back to the last folded round by itself. Once half of the rings are
in, the others have as long again as three times what that half took, and `LATE_MS_LEAST` at least,
in which a node loads its libraries and layers. What a late ring trained is lost.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hypergpu.units import Milliseconds, several

LATE_FACTOR = 3
LATE_MS_LEAST = Milliseconds(120_000)
"""A ring is not late before."""


class OpenRound(msgspec.Struct, frozen=True):
    """A round that is not folded."""

    began_ms: Milliseconds
    rings: frozenset[int]
    """Rings that train it, or did before they lost a stage."""
    finished_ms: Mapping[int, Milliseconds] = {}
    """When each ring's part was in."""


class FoldChoice(NamedTuple):
    """Whether a round is folded."""

    rings: tuple[int, ...]
    """Rings whose parts are folded, in order; none: it is not folded yet."""
    reason: str
    """Why it waits, or which rings it does without; empty: all are in."""
    look_ms: Milliseconds | None = None
    """When there is something to decide though nothing happens; None: not before that."""


def with_rings(open_round: OpenRound, rings: Collection[int]) -> OpenRound:
    """The round with rings that are whole now, too."""
    return replace(open_round, rings=open_round.rings | frozenset(rings))


def with_finish(open_round: OpenRound, ring: int, now_ms: Milliseconds) -> OpenRound:
    """The round once a ring's part is in; the first time counts."""
    finished_ms = {ring: now_ms, **open_round.finished_ms}
    return replace(with_rings(open_round, (ring,)), finished_ms=finished_ms)


def fold_choice(open_round: OpenRound, now_ms: Milliseconds) -> FoldChoice:
    """Decide whether a round is folded now, and of which rings.

    Args:
        open_round: The round.
        now_ms: The time, by the clock of its beginning.
    """
    rings_in = tuple(sorted(open_round.finished_ms))
    absent_rings = open_round.rings - open_round.finished_ms.keys()
    if rings_in and not absent_rings:
        return FoldChoice(rings_in, "")
    half_count = -(-len(open_round.rings) // 2)
    names = f"{'ring' if len(absent_rings) == 1 else 'rings'} {_numbers(absent_rings)}"
    if len(rings_in) < max(1, half_count):
        return FoldChoice((), f"waits for {names}")
    half_ms = sorted(open_round.finished_ms.values())[half_count - 1] - open_round.began_ms
    limit_ms = max(LATE_MS_LEAST, LATE_FACTOR * half_ms)
    if now_ms - open_round.began_ms < limit_ms:
        due_ms = Milliseconds(open_round.began_ms + limit_ms)
        return FoldChoice((), f"waits for {names}, {limit_ms / 1000:.0f} s at most", due_ms)
    others = several(half_count, "ring")
    took = f"{others} took {half_ms / 1000:.1f} s"
    return FoldChoice(rings_in, f"{names}: not in after {limit_ms / 1000:.0f} s, where {took}")


def _numbers(rings: Collection[int]) -> str:
    return ", ".join(str(ring + 1) for ring in sorted(rings))
