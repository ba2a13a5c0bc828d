"""Pairs of nodes that have the same piece of work, in secret of each other.

A pair is kept as its second node with its first: the second has the work of the first.
"""

from collections.abc import Mapping

from hypergpu.ids import NodeId


def partner(pairs: Mapping[NodeId, NodeId], node: NodeId) -> NodeId | None:
    """The other node that has the node's work; None: nobody."""
    return {**pairs, **{first: second for second, first in pairs.items()}}.get(node)


def without_pair(pairs: Mapping[NodeId, NodeId], node: NodeId) -> dict[NodeId, NodeId]:
    """The pairs without the one that the node is of."""
    other = partner(pairs, node)
    return {second: first for second, first in pairs.items() if second not in (node, other)}
