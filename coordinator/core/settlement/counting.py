"""What a chain may say of an epoch once its payments are in blocks, and what cannot be so.

An RPC stands before many replicas. One that is behind, or broken, tells of a ledger without the
epoch: taken for the truth, nobody would be owed anything any more.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.core.settlement.epoch import Epoch
from hypergpu.ids import NodeId
from hypergpu.units import several


class SeenEpoch(NamedTuple):
    """An epoch by the chain."""

    total_score: int
    pool: int
    closed_at_s: int
    """0: it is open."""


class SeenShare(NamedTuple):
    """A node's share of it by the chain."""

    is_recorded: bool
    score: int
    reward: int
    paid: int


def unrecorded(epoch: Epoch, shares: Sequence[SeenShare]) -> tuple[NodeId, ...]:
    """Nodes of the epoch that have no share in it."""
    return tuple(
        node for node, share in zip(epoch.nodes, shares, strict=True) if not share.is_recorded
    )


def doubt(
    epoch: Epoch, seen: SeenEpoch, shares: Sequence[SeenShare], sent: Mapping[NodeId, int]
) -> str:
    """Why this cannot be of a block that holds the epoch's payments; empty: it can.

    A node that forced its receipts into another epoch has no share in this one, and anybody's may
    be forced into this one. So a share may be missing, but only where the epoch's score lacks it.

    Args:
        epoch: As it is counted here.
        seen: It, by the chain.
        shares: Of its nodes, in their order, by the chain.
        sent: The score that its batches hold, of those nodes that have no share.
    """
    name = f"epoch {epoch.number} of {epoch.job_id}"
    if not seen.closed_at_s:
        return f"{name} is open, and a block holds what it paid"
    scores = sum(share.score for share in shares)
    if scores > seen.total_score:
        return f"{name} has a score of {seen.total_score}, and its shares have {scores}"
    if any(not share.is_recorded and (share.score or share.reward) for share in shares):
        return f"{name} has a share that holds something and is not recorded"
    rewards = sum(share.reward for share in shares)
    if rewards > seen.pool or any(share.paid > share.reward for share in shares):
        return f"{name} has a pool of {seen.pool}, and its shares are {rewards}"
    missing = sum(sent.values())
    if missing and seen.total_score - scores >= missing:
        return (
            f"{several(len(sent), 'node')} {'has' if len(sent) == 1 else 'have'} no share in"
            f" {name}, and its score of {seen.total_score} holds {missing} of theirs"
        )
    return ""
