"""Which of an operator's own transactions, signed while no coordinator ran, the outbox takes in."""

from collections.abc import Container


def taken_in(stored: int | None, used: int, final: int, acts: Container[int]) -> range:
    """The nonces of acts that follow on what is stored, without a gap.

    A used nonce that is left behind them is somebody else's, or of a newer journal than this one.

    Args:
        stored: The nonce behind the outbox's last; None: it holds nothing, and whatever was sent
            before the newest acts settled nothing.
        used: How many nonces are used on the chain.
        final: How many of them for good: these need nobody's watch any more.
        acts: The nonces of all acts that are known.
    """
    first = used if stored is None else stored
    while stored is None and first > final and first - 1 in acts:
        first -= 1
    behind = first
    while behind in acts:
        behind += 1
    return range(first, behind)
