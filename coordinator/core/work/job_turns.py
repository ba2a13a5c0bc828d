"""In which order jobs get their least nodes, so that none waits for ever.

A job that has its least nodes keeps them for a *turn*. After it, jobs that wait for nodes go first.
Owners come one after the other, each with its foremost job, then each with its next one: who has
ten jobs gets no more than who has one. Among the jobs of one owner a higher priority goes first,
turn or no turn. Who is displaced waits in its place like all others, so that jobs that cannot train
at the same time do it by turns.
"""

from collections import defaultdict
from collections.abc import Container, Sequence

from coordinator.core.work.demand import JobDemand
from hypergpu.ids import JobId, TokenId
from hypergpu.units import Milliseconds

TURN_MS = Milliseconds(60_000)
"""A round and the change of a worker take seconds: a turn is long beside them, and short for who
waits.
"""
_IN_TURN, _WAITING, _AFTER_TURN = range(3)

Rank = tuple[int, ...]
"""Rank of a job among others; the least is first."""


def ordered_demands(
    demands: Sequence[JobDemand], startable: Container[JobId], turn_ms: Milliseconds
) -> list[JobDemand]:
    """Jobs in the order in which they get their least nodes.

    Args:
        demands: In order of creation.
        startable: Jobs that as many nodes fit as they need; others come last and take nobody's
            place.
        turn_ms: For how long a job keeps its nodes though others wait.
    """
    able = [demand for demand in demands if demand.job_id in startable]
    ranks = {demand.job_id: _rank(demand, turn_ms, number) for number, demand in enumerate(able)}
    own: defaultdict[TokenId, list[JobDemand]] = defaultdict(list)
    for demand in sorted(able, key=lambda each: (-each.priority, ranks[each.job_id])):
        own[demand.owner].append(demand)
    order = [
        ((tier, ranks[demand.job_id][0], -rest_ms, *ranks[demand.job_id][1:]), demand)
        for jobs in own.values()
        for rest_ms in (_owner_rest_ms(jobs),)
        for tier, demand in enumerate(jobs)
    ]
    unable = [demand for demand in demands if demand.job_id not in startable]
    return [*(demand for _, demand in sorted(order, key=lambda each: each[0])), *unable]


def is_in_turn(demand: JobDemand, turn_ms: Milliseconds) -> bool:
    """Whether a job's turn lasts."""
    return demand.is_served and demand.served_ms < turn_ms


def turn_left_ms(demands: Sequence[JobDemand], turn_ms: Milliseconds) -> Milliseconds | None:
    """Time until the next turn ends while a job waits; None: then nothing changes by itself."""
    if all(demand.is_served for demand in demands):
        return None
    left_times_ms = [
        turn_ms - demand.served_ms for demand in demands if is_in_turn(demand, turn_ms)
    ]
    return Milliseconds(min(left_times_ms)) if left_times_ms else None


def _owner_rest_ms(jobs: Sequence[JobDemand]) -> Milliseconds:
    """How long none of an owner's jobs has had nodes."""
    if any(demand.is_served for demand in jobs):
        return Milliseconds(0)
    before = [demand.waited_ms for demand in jobs if demand.has_had_turn]
    return min(before) if before else max(demand.waited_ms for demand in jobs)


def _rank(demand: JobDemand, turn_ms: Milliseconds, number: int) -> Rank:
    if not demand.is_served:
        return _WAITING, -demand.waited_ms, int(demand.has_had_turn), number
    if is_in_turn(demand, turn_ms):
        return _IN_TURN, -demand.served_ms, number
    # Who has had its nodes longest yields them first.
    return _AFTER_TURN, demand.served_ms, number
