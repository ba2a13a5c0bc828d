"""Why a job waits for nodes, and for about how long, in words for its owner."""

import math
from collections.abc import Mapping, Sequence

from coordinator.core.work.demand import JobDemand, NodeOffer, startable_jobs, unfit_reason
from coordinator.core.work.job_turns import TURN_MS, is_in_turn, ordered_demands
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds, several

_MINUTE_MS = 60_000


def job_outlooks(
    demands: Sequence[JobDemand],
    offers: Sequence[NodeOffer],
    turn_ms: Milliseconds = TURN_MS,
) -> dict[JobId, str]:
    """Outlooks of the jobs that wait while nodes are there; arguments as of `plan_allocation`."""
    usable = [offer for offer in offers if not offer.pause_reason]
    if not usable:
        return {}
    startable = startable_jobs(demands, usable)
    waiting_demands: list[JobDemand] = []
    outlooks: dict[JobId, str] = {}
    for demand in ordered_demands(demands, startable, turn_ms):
        if demand.is_served:
            continue
        fitting_offers = [offer for offer in usable if not unfit_reason(demand, offer)]
        if demand.job_id not in startable:
            outlooks[demand.job_id] = _unfit_text(demand, usable, len(fitting_offers))
            continue
        waiting_demands.append(demand)
        text = _busy_text(demand, fitting_offers)
        if text:
            wait_text = _wait_text(
                demand, demands, fitting_offers, turn_ms, place=len(waiting_demands)
            )
            outlooks[demand.job_id] = f"{text}; place {len(waiting_demands)}, {wait_text}"
    return outlooks


def _unfit_text(demand: JobDemand, offers: Sequence[NodeOffer], fit_count: int) -> str:
    reasons = (unfit_reason(demand, offer) for offer in offers)
    why = next((reason for reason in reasons if reason), "")
    text = f"{fit_count} of {demand.nodes_min} nodes fit"
    return f"{text}; another one does not: {why}" if why else text


def _busy_text(demand: JobDemand, fitting: Sequence[NodeOffer]) -> str:
    """Where the nodes are that a job could use; empty: enough of them are free."""
    busy = [offer for offer in fitting if offer.job_id not in (None, demand.job_id)]
    if len(fitting) - len(busy) >= demand.nodes_min:
        return ""
    jobs = list(dict.fromkeys(str(offer.job_id) for offer in busy))
    job_text = jobs[0] if len(jobs) == 1 else f"{jobs[0]} and {several(len(jobs) - 1, 'other job')}"
    verb = "fits" if len(fitting) == 1 else "fit"
    nodes = several(len(fitting), "node")
    if len(busy) == len(fitting):
        trains = "trains" if len(fitting) == 1 else "train"
        return f"{nodes} {verb} and {trains} for {job_text}"
    return f"{nodes} {verb}, and {len(busy)} of them train for {job_text}"


def _wait_text(
    demand: JobDemand,
    demands: Sequence[JobDemand],
    fitting: Sequence[NodeOffer],
    turn_ms: Milliseconds,
    *,
    place: int,
) -> str:
    """For about how long it waits: turns that last, and those of who waits before it."""
    counts = _least_counts(demands, fitting)
    foremost = [
        each
        for each in demands
        if each.job_id in counts and each.owner == demand.owner and each.priority > demand.priority
    ]
    free = len(fitting) - sum(counts[each.job_id] for each in foremost)
    if free < demand.nodes_min and foremost:
        return f"after {foremost[0].job_id}, whose priority is higher"
    open_turns = sorted(
        (turn_ms - each.served_ms, counts[each.job_id])
        for each in demands
        if each.job_id in counts and each not in foremost and is_in_turn(each, turn_ms)
    )
    free -= sum(count for _, count in open_turns)
    left_ms = 0
    for turn_left, count in open_turns:
        if free >= demand.nodes_min:
            break
        left_ms, free = turn_left, free + count
    minutes = math.ceil((left_ms + (place - 1) * turn_ms) / _MINUTE_MS)
    return f"about {minutes} min" if minutes else "once a round ends"


def _least_counts(
    demands: Sequence[JobDemand], fitting: Sequence[NodeOffer]
) -> Mapping[JobId, int]:
    """How many of the nodes each job that has some keeps for its turn."""
    nodes = {offer.node for offer in fitting}
    counts = {
        demand.job_id: min(demand.nodes_min, len(demand.members & nodes))
        for demand in demands
        if demand.is_served
    }
    return {job_id: count for job_id, count in counts.items() if count}
