"""Whose work is done a second time by somebody idle, because its own node will be too late."""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.plan.deadline import Arrival
from coordinator.core.plan.decision import RoundPlan
from coordinator.core.plan.wording import seconds
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

_HALF = 0.5
"""Of the time to the deadline: earlier nobody is late yet, later nobody else would make it."""
_HOPELESS = 0.3
_LIKELY = 0.5
"""Another node has to be more likely in time than not."""


class Reissue(NamedTuple):
    """A shard that goes to a second node; the first update of the two counts."""

    late: NodeId
    idle: NodeId
    reason: str


def reissue(
    plan: RoundPlan,
    elapsed_ms: Milliseconds,
    *,
    pending: Mapping[NodeId, Arrival],
    idle: Mapping[NodeId, Arrival],
) -> tuple[Reissue, ...]:
    """Which pending participants' shards also go to which idle nodes.

    Nothing before half of the time to the deadline has passed, and nothing without a deadline.
    The node that is least likely in time is served first, by the fastest of the idle.

    Args:
        plan: The open round's.
        elapsed_ms: Since the round's opening.
        pending: When each update that is missing is now forecast to be in, after the opening.
        idle: When each node that is done would have a whole shard's update in, after the opening,
            if it began now.
    """
    deadline_ms = plan.deadline_ms
    if not deadline_ms or elapsed_ms < _HALF * deadline_ms:
        return ()
    chances = {node: _chance(arrival, elapsed_ms, deadline_ms) for node, arrival in pending.items()}
    late = sorted((chance, node) for node, chance in chances.items() if chance < _HOPELESS)
    able = sorted(
        (arrival.mean_ms, node)
        for node, arrival in idle.items()
        if node not in pending and arrival.chance_by(deadline_ms) >= _LIKELY
    )
    return tuple(
        Reissue(node, other, _reason(chance, deadline_ms, at_ms))
        for (chance, node), (at_ms, other) in zip(late, able, strict=False)
    )


def _chance(arrival: Arrival, elapsed_ms: int, deadline_ms: int) -> float:
    """That it is in by the deadline, now that it is not in yet."""
    passed = arrival.chance_by(elapsed_ms)
    if passed >= 1:
        return 0.0
    return max(0.0, arrival.chance_by(deadline_ms) - passed) / (1 - passed)


def _reason(chance: float, deadline_ms: int, at_ms: int) -> str:
    by = f"by the deadline of {seconds(deadline_ms)}"
    return f"{chance:.0%} likely {by}; the other node forecasts {seconds(at_ms)}"
