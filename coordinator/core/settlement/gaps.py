"""Nonces that the chain wants next and nothing here will use: all that waits, waits behind them.

They were somebody else's on a chain that was begun anew, or an RPC once counted too many. A void
transfer in each does no harm if that is wrong: the chain takes none whose nonce is used.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from coordinator.core.settlement.sending import TransactionState

FILLS_MOST = 1_000
"""Of a larger gap nobody can tell how it came about, and each nonce costs gas."""


class Counts(NamedTuple):
    """How many nonces an account has used, by what its chain's RPC says."""

    used: int
    again: int
    """In its next answer."""
    deep: int
    """Up to the newest block that stays."""


class Filling(NamedTuple):
    """What to do about a gap."""

    nonces: tuple[int, ...]
    """To spend: on nothing, but for acts."""
    reason: str
    """For people; never empty."""


def missing(
    used: int, rows: Iterable[tuple[int, TransactionState]], newest_final: int | None
) -> range:
    """The nonces between those that are used and the first of what waits.

    There is none where something stored is in a block behind the used ones: then an answer is old.

    Args:
        used: How many nonces are used.
        rows: Of what is neither final nor given up, the nonces and states.
        newest_final: The highest nonce that is final.
    """
    ahead = [row for row in rows if row[0] >= used]
    first, state = min(ahead, key=lambda row: row[0], default=(used, TransactionState.WAITING))
    is_old = newest_final is not None and newest_final >= used
    return range(used, used if is_old or state is TransactionState.MINED else first)


def filling(gap: range, counts: Counts, acts: Collection[int]) -> Filling:
    """Which nonces of a gap are spent now: where it is still there, and stays.

    Args:
        gap: As `missing` has it; not empty.
        counts: By the same RPC.
        acts: Its nonces of what an operator's commands have signed and nobody has given up.
    """
    if not counts.used == counts.again == counts.deep:
        return Filling((), "they are spent on nothing once that is so as deep as final blocks lie")
    if len(gap) > FILLS_MOST:
        return Filling((), f"more than {FILLS_MOST} are not filled: restore the chain's state")
    if acts:
        kept = ", ".join(map(str, sorted(acts)))
        why = f"what an operator's command has signed is sent ({kept}), others are spent on nothing"
        return Filling(tuple(gap), why)
    return Filling(tuple(gap), "they are spent on nothing")
