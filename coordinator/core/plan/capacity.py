"""What each node can add to a round, and medians in which it counts by that.

A node that is 64 times slower than another one is a sixty-fourth of the fleet. Counted as a node
among two it would make every round last half of its own time.
"""

from collections.abc import Mapping

from coordinator.core.plan.speeds import NodeSpeed
from hypergpu.ids import NodeId


def capacities(
    known: Mapping[NodeId, NodeSpeed],
    moving_us: Mapping[NodeId, float],
    inner_steps: int,
) -> dict[NodeId, float]:
    """Rounds of so many steps of the job's own batch that each node could do in a microsecond.

    Args:
        known: Speed of each node.
        moving_us: Time for which each moves bytes in a round.
        inner_steps: Of the round, at least 1.
    """
    return {
        node: 1 / (max(1.0, inner_steps * mine.step_us) + moving_us[node])
        for node, mine in known.items()
    }


def weighted_median(values: Mapping[NodeId, float], weights: Mapping[NodeId, float]) -> float:
    """The value that half of the weight lies on either side of; between two values their middle.

    Equal weights give the plain median.

    Args:
        values: At least one.
        weights: Of each of them, more than 0.
    """
    ordered = sorted(values, key=lambda node: values[node])
    half = sum(weights[node] for node in ordered) / 2
    passed = 0.0
    for place, node in enumerate(ordered):
        passed += weights[node]
        if abs(passed - half) <= 1e-9 * half and place + 1 < len(ordered):
            return (values[node] + values[ordered[place + 1]]) / 2
        if passed > half:
            return values[node]
    return values[ordered[-1]]
