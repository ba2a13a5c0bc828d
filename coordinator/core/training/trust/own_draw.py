"""Which samples of whose shards an evaluator differentiates in a round: drawn in secret.

A draw is a text that follows from a secret of the coordinator. The samples of a shard follow from
its lease, so that they are the same whenever they are asked for; whose they are follows from the
round and from what is known of the nodes when it closes. So a coordinator that was killed comes to
the same ones again.
"""

from collections.abc import Sequence

from blake3 import blake3

from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.core.training.trust.weights import FULL_FROM, WHOLE
from hypergpu.assignment import SampleRange
from hypergpu.ids import NodeId

SAMPLES_MOST = 512
"""Samples of all shards of a round together."""
SAMPLES_EACH = 25
"""Samples of one shard, where it has as many."""
NODES_MOST = SAMPLES_MOST // SAMPLES_EACH
"""Beyond so many nodes some are drawn, and the memory decides for the others."""

KNOWN_MOST = NODES_MOST // 6
"""So many of them are nodes that earlier rounds showed to be honest: among newcomers liars may
happen to be the most.
"""


def drawn_nodes(draw: str, memory: TrustMemory, nodes: Sequence[NodeId]) -> list[NodeId]:
    """The nodes of a round whose samples are differentiated: some that are known to be honest, as
    the usual cosine is theirs, then newcomers, then those in doubt, then others, each kind in the
    order of the draw.
    """
    if len(nodes) <= NODES_MOST:
        return list(nodes)
    in_turn = sorted(nodes, key=lambda node: (_turn(memory, node), _bits(draw, node)))
    if memory.unseen is None:
        return in_turn[:NODES_MOST]
    known_nodes = [node for node in in_turn if _is_known(memory, node)][:KNOWN_MOST]
    others = [node for node in in_turn if node not in known_nodes]
    return [*known_nodes, *others][:NODES_MOST]


def _is_known(memory: TrustMemory, node: NodeId) -> bool:
    return memory.honesty.get(node, 0) >= WHOLE


def _turn(memory: TrustMemory, node: NodeId) -> int:
    honesty = memory.honesty.get(node)
    if honesty is None:
        return 0
    return 1 if 0 < honesty < FULL_FROM * WHOLE else 2


def drawn_positions(draw: str, ranges: Sequence[SampleRange]) -> tuple[int, ...]:
    """Positions of a shard's stream whose samples are differentiated, without repetition.

    Args:
        draw: Of the shard's lease.
        ranges: The shard's.
    """
    left_count = sum(each.count for each in ranges)
    count = min(SAMPLES_EACH, left_count)
    positions: list[int] = []
    # One position of each of as many equal parts: long shards cost no more than short ones.
    for number in range(count):
        start, end = number * left_count // count, (number + 1) * left_count // count
        positions.append(_position(start + _bits(draw, str(number)) % (end - start), ranges))
    return tuple(positions)


def _position(offset: int, ranges: Sequence[SampleRange]) -> int:
    for run in ranges:
        if offset < run.count:
            return run.start + offset
        offset -= run.count
    raise AssertionError("an offset lies within the ranges")


def _bits(draw: str, name: str) -> int:
    return int.from_bytes(blake3(f"{draw}/{name}".encode()).digest(8), "big")
