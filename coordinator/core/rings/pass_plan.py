"""How many passes are under way in a ring, and how many sessions share one.

A session gets one token for each time that its pass has gone around. That takes the time of the
way, or that in which the slowest stage computes all passes, whichever is longer: more passes share
the way, fewer wait for no stage.
"""

from math import ceil
from typing import NamedTuple

from coordinator.core.rings.drafts import DraftCosts


class PassPlan(NamedTuple):
    """Passes that are under way together."""

    passes: int
    sessions: int
    """How many one pass takes at most."""


def pass_plan(costs: DraftCosts, live: int, sessions_most: int) -> PassPlan:
    """The passes that give all sessions a token soonest; the fewest of those that are as good.

    Args:
        costs: Of the ring.
        live: Sessions that share it.
        sessions_most: Sessions that a pass has room for, 1 at least.
    """
    plans = [
        PassPlan(passes, ceil(live / passes))
        for passes in range(1, live + 1)
        if ceil(live / passes) <= sessions_most
    ]

    def token_us(plan: PassPlan) -> float:
        return max(costs.ring_us(plan.sessions), costs.load_us(live, plan.passes))

    return min(plans, key=lambda plan: (token_us(plan), plan.passes), default=PassPlan(1, 1))
