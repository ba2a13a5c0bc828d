"""In which epochs a ledger may hold a node's receipts: a late one is recorded behind its own."""

from collections.abc import Mapping
from typing import NamedTuple

AT_ONCE = 50
"""Epochs of one question: a node that was late in a long job asks many."""


class Seen(NamedTuple):
    """An epoch as it was found."""

    receipts: int
    """Of the node."""
    is_closed: bool


def next_to_see(seen: Mapping[int, Seen], counted: int) -> list[int]:
    """Which epochs to look at next, the earliest first; none: there is nothing more to be found.

    A receipt whose own epoch was closed before it came is recorded in one behind that, which was
    open then. So every closed epoch leads to the next, until all that the ledger counts are found.

    Args:
        seen: By number; those that the receipts name among them.
        counted: How many receipts of the node the ledger counts in the job.
    """
    if sum(epoch.receipts for epoch in seen.values()) >= counted:
        return []
    behind = {
        later
        for number, epoch in seen.items()
        if epoch.is_closed and number + 1 not in seen
        for later in range(number + 1, number + 1 + AT_ONCE)
    }
    return sorted(behind - seen.keys())[:AT_ONCE]
