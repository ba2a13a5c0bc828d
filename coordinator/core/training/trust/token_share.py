"""A limit on what the nodes of one join token weigh together: one line may bring many nodes.

Only the fold knows it. Pay goes by work, so that friends behind one line are paid for theirs.
"""

from collections.abc import Mapping

from hypergpu.ids import NodeId


def cap_tokens(
    weights: Mapping[NodeId, int], tokens: Mapping[NodeId, str], share: float
) -> dict[NodeId, int]:
    """Shrink the weights of one token's nodes to a share of all, where others are there.

    Args:
        weights: Of each update, at least 1.
        tokens: The join token of each node; nodes without one are under no limit.
        share: In [0.5, 1], so that no two tokens can be above it.
    """
    sums: dict[str, int] = {}
    for node, weight in weights.items():
        sums[tokens[node]] = sums.get(tokens[node], 0) + weight
    token, most = max(sums.items(), key=lambda each: each[1], default=("", 0))
    others = sum(sums.values()) - most
    if not token or not others or most * (1 - share) <= others * share:
        return dict(weights)
    factor = others * share / ((1 - share) * most)
    return {
        node: max(1, int(weight * factor)) if tokens[node] == token else weight
        for node, weight in weights.items()
    }
