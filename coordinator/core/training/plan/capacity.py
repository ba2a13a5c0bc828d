"""Work that each node can add to a round, and medians in which nodes count by it.

A node that is 64 times slower than another one is a sixty-fourth of the fleet. Counted as a node
among two it would make every round last half of its own time.
"""

from collections.abc import Mapping
from statistics import median

from coordinator.core.training.plan.decision import NodeMemory
from coordinator.core.training.plan.node_speed import NodeSpeed
from hypergpu.ids import NodeId

_MOST_TIMES = 8
"""No node counts for more than so many middle ones: as many steps as it is given at most."""


def capacities(
    speeds: Mapping[NodeId, NodeSpeed],
    moving_us: Mapping[NodeId, float],
    memories: Mapping[NodeId, NodeMemory],
    inner_steps: int,
) -> dict[NodeId, float]:
    """Steps of the job's own batch that each node does in a microsecond, bytes included: as its
    newest update showed; before the first update, by its readings.

    So a node's claim about its speed has no effect once its first update is in.

    Args:
        speeds: Speed of each node, at least one.
        moving_us: Time for which each moves bytes in a round.
        memories: Of each of them.
        inner_steps: Of the round, at least 1.
    """
    paces = {
        node: 1 / (memories[node].proven_step_us or speed.step_us + moving_us[node] / inner_steps)
        for node, speed in speeds.items()
    }
    most = _MOST_TIMES * median(paces.values())
    return {node: min(most, pace) for node, pace in paces.items()} if len(paces) > 2 else paces


def weighted_median(values: Mapping[NodeId, float], weights: Mapping[NodeId, float]) -> float:
    """The value that half of the weight lies on either side of. Between two values it goes from one
    to the other as weights do, by their inverses, so that noise in weights moves it a little only
    and the larger of two values hardly counts where its weight is small.

    An odd number of equal weights gives the plain median.

    Args:
        values: At least one, all more than 0.
        weights: Of each of them, more than 0.
    """
    nodes = sorted(values, key=lambda node: (values[node], node))
    whole = sum(weights[node] for node in nodes)
    weight_below, before = 0.0, nodes[0]
    middle_before = 0.0
    for node in nodes:
        middle = (weight_below + weights[node] / 2) / whole
        if middle >= 0.5:
            if node == nodes[0]:
                return values[node]
            share = (0.5 - middle_before) / (middle - middle_before)
            return 1 / ((1 - share) / values[before] + share / values[node])
        weight_below += weights[node]
        before, middle_before = node, middle
    return values[nodes[-1]]
