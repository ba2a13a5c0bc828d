"""How alike the updates of one shard are, against those of different shards."""

from collections.abc import Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from coordinator.core.training.trust.duplicates import ComparedPair
from coordinator.core.training.trust.weights import NODES_LEAST, UpdateEvidence
from coordinator.shell.aggregation.sketch import Sketch
from hypergpu.ids import NodeId

_DISTANCE_LEAST = 1e-3
"""Where all updates are nearer to each other than that, a pair cannot be told from the others."""


def distances_of(sketches: Sequence[Sketch]) -> npt.NDArray[np.float64]:
    """``1 - cosine`` of each two updates, 1 for those without a direction; infinite to itself."""
    if not sketches:
        return np.zeros((0, 0))
    rows = np.stack(sketches)
    with np.errstate(all="ignore"):
        rows = rows / np.sqrt(np.square(rows).sum(axis=1))[:, None]
        distances: npt.NDArray[np.float64] = 1 - np.nan_to_num(rows @ rows.T)
    np.fill_diagonal(distances, np.inf)
    return distances


def compare_pairs(
    sketches: Mapping[NodeId, Sketch],
    duplicates: Mapping[NodeId, NodeId],
    sparse: Set[NodeId] = frozenset(),
    earlier: Mapping[NodeId, tuple[NodeId, Sketch]] | None = None,
) -> list[ComparedPair]:
    """Compare the pairs of which both updates are there, each beside the others of its kind of
    codec where there are enough, as sparse updates are less alike.

    Args:
        sketches: Of the round's sound updates.
        duplicates: Whose update is of whose shard, besides that one's own.
        sparse: Those whose codec is a sparse one.
        earlier: Updates that others made of a node's shard in an earlier round, with their nodes.
    """
    pairs = [pair for pair in duplicates.items() if all(node in sketches for node in pair)]
    late = {node: it for node, it in (earlier or {}).items() if node in sketches}
    compared_pairs = []
    for kind in (sketches.keys() - sparse, sketches.keys() & sparse):
        peers = kind if len(kind) >= NODES_LEAST else sketches.keys()
        compared_pairs += _compare_beside(
            {node: each for node, each in sketches.items() if node in peers},
            [pair for pair in pairs if pair[0] in kind and pair[1] in kind],
            {node: it for node, it in late.items() if node in kind},
        )
    order = {pair: place for place, pair in enumerate(pairs)}
    return sorted(compared_pairs, key=lambda each: order.get(each.nodes, len(order)))


def _compare_beside(
    sketches: Mapping[NodeId, Sketch],
    pairs: Sequence[tuple[NodeId, NodeId]],
    late: Mapping[NodeId, tuple[NodeId, Sketch]],
) -> list[ComparedPair]:
    """Pairs beside the other updates of these."""
    if not (pairs or late) or len(sketches) < NODES_LEAST:
        return []
    places = {node: place for place, node in enumerate(sketches)}
    cosines = 1 - distances_of(list(sketches.values()))
    others = np.triu(np.ones(cosines.shape, np.bool_), 1)
    for own, other in pairs:
        others[places[own], places[other]] = others[places[other], places[own]] = False
    usual = float(np.median(cosines[others]))
    if 1 - usual < _DISTANCE_LEAST:
        return []
    cosines_by_pair = {pair: float(cosines[places[pair[0]], places[pair[1]]]) for pair in pairs}
    for node, (other, sketch) in late.items():
        cosines_by_pair[node, other] = 1 - float(distances_of([sketches[node], sketch])[0, 1])
    return [
        ComparedPair(pair, (cosine - usual) / (1 - usual))
        for pair, cosine in cosines_by_pair.items()
    ]


def without_pairs(
    evidence: Sequence[UpdateEvidence], duplicates: Mapping[NodeId, NodeId]
) -> list[UpdateEvidence]:
    """The evidence in which the two of a pair are no copies of each other: they were asked to be.

    A group with somebody else in it stays one.
    """
    groups: dict[int, set[NodeId]] = {}
    for each in evidence:
        groups.setdefault(each.group, set()).add(each.node)
    pairs = [{own, other} for own, other in duplicates.items()]
    asked_groups = {number for number, nodes in groups.items() if nodes in pairs}
    return [_alone(each) if each.group in asked_groups else each for each in evidence]


def _alone(evidence: UpdateEvidence) -> UpdateEvidence:
    return replace(evidence, group=0)
