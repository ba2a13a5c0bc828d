"""Which node works for which job, when several jobs share one coordinator.

Each job first gets the number of nodes that it needs to start: jobs that have nodes come first,
then the order of creation decides. What is left is dealt out evenly. A job that cannot start yet
gets none. A node that is paused is withdrawn from its job and lent to none.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from hypergpu.ids import JobId, NodeId
from hypergpu.units import several


class JobDemand(msgspec.Struct, frozen=True):
    """A job that can use nodes."""

    job_id: JobId
    nodes_min: int
    """Nodes without which it does not start; 1 once it has started."""
    workload: str
    workload_version: int
    members: frozenset[NodeId]
    """Nodes that work for it now and are not about to leave it."""
    data_name: str = ""
    """The data set that a node must have of its own; empty: none."""


class NodeOffer(msgspec.Struct, frozen=True):
    """A connected node that is not draining."""

    node: NodeId
    job_id: JobId | None
    workloads: Mapping[str, int]
    pause_reason: str = ""
    """Why it takes no work though it is connected; empty: it takes some."""
    data_names: frozenset[str] = frozenset()
    """Data sets that its owner has named a folder for."""


class Lend(msgspec.Struct, frozen=True):
    """Give a free node to a job."""

    node: NodeId
    job_id: JobId
    reason: str


class Recall(msgspec.Struct, frozen=True):
    """Ask a job for a node back once it has finished what it holds."""

    node: NodeId
    job_id: JobId
    reason: str


class Withdraw(msgspec.Struct, frozen=True):
    """Take a paused node out of a job at once."""

    node: NodeId
    job_id: JobId
    reason: str


Move = Lend | Recall | Withdraw


def plan_allocation(demands: Sequence[JobDemand], offers: Sequence[NodeOffer]) -> tuple[Move, ...]:
    """Deal nodes out to jobs.

    Args:
        demands: Jobs that can use nodes, in order of creation.
        offers: Every connected node that is not draining. A node of a job that is not in
        ``demands``
            counts as free.

    Returns:
        Moves with their reasons; none when every job has its share. Withdrawals come alone: what
        they leave to be done is for the next plan.
    """
    if withdrawn := _withdraw(offers):
        return withdrawn
    offers = [offer for offer in offers if not offer.pause_reason]
    demands = sorted(demands, key=lambda demand: not demand.members)
    active = {demand.job_id for demand in demands}
    free = [offer for offer in sorted(offers, key=_by_node) if offer.job_id not in active]
    shares = _shares(demands, offers)
    lent, missing = _lend(demands, free, shares)
    return (*lent, *_recall(demands, offers, shares, missing))


def _withdraw(offers: Sequence[NodeOffer]) -> tuple[Withdraw, ...]:
    return tuple(
        Withdraw(offer.node, offer.job_id, offer.pause_reason)
        for offer in offers
        if offer.pause_reason and offer.job_id is not None
    )


def _by_node(offer: NodeOffer) -> str:
    return offer.node


def _can_train(demand: JobDemand, offer: NodeOffer) -> bool:
    has_data = not demand.data_name or demand.data_name in offer.data_names
    return has_data and offer.workloads.get(demand.workload) == demand.workload_version


def _shares(demands: Sequence[JobDemand], offers: Sequence[NodeOffer]) -> dict[JobId, int]:
    """How many nodes each job is due: its minimum in order of creation, then the rest evenly."""
    connected = {offer.node for offer in offers}
    # A member that is away for a moment still counts: it may be back before it is given up.
    away = {demand.job_id: len(demand.members - connected) for demand in demands}
    useful = {
        demand.job_id: away[demand.job_id] + sum(_can_train(demand, offer) for offer in offers)
        for demand in demands
    }
    left = len(offers) + sum(away.values())
    shares: dict[JobId, int] = {}
    for demand in demands:
        least = min(demand.nodes_min, useful[demand.job_id])
        shares[demand.job_id] = least if demand.nodes_min <= left else 0
        left -= shares[demand.job_id]
    while left > 0:
        open_jobs = [
            demand.job_id for demand in demands if 0 < shares[demand.job_id] < useful[demand.job_id]
        ]
        if not open_jobs:
            break
        shares[min(open_jobs, key=lambda job_id: shares[job_id])] += 1
        left -= 1
    return shares


def _lend(
    demands: Sequence[JobDemand], free: Iterable[NodeOffer], shares: Mapping[JobId, int]
) -> tuple[list[Lend], dict[JobId, int]]:
    """Give free nodes to the jobs furthest below their share; also how many each still misses."""
    missing = {demand.job_id: shares[demand.job_id] - len(demand.members) for demand in demands}
    moves: list[Lend] = []
    for offer in free:
        able = [
            demand for demand in demands if _can_train(demand, offer) and missing[demand.job_id] > 0
        ]
        if not able:
            continue
        neediest = max(able, key=lambda demand: missing[demand.job_id])
        job_id = neediest.job_id
        due = f"free, and {job_id} is due {several(shares[job_id], 'node')}"
        moves.append(Lend(offer.node, job_id, due))
        missing[job_id] -= 1
    return moves, missing


def _recall(
    demands: Sequence[JobDemand],
    offers: Sequence[NodeOffer],
    shares: Mapping[JobId, int],
    missing: Mapping[JobId, int],
) -> list[Recall]:
    """Ask jobs above their share for the nodes that others still miss."""
    wanted = sum(count for count in missing.values() if count > 0)
    by_id = {offer.node: offer for offer in offers}
    moves: list[Recall] = []
    for demand in demands:
        surplus = len(demand.members) - shares[demand.job_id]
        movable = sorted(node for node in demand.members if node in by_id)
        for node in movable[: max(0, min(surplus, wanted))]:
            needy = [
                other.job_id
                for other in demands
                if missing[other.job_id] > 0 and _can_train(other, by_id[node])
            ]
            if needy:
                moves.append(Recall(node, demand.job_id, f"{needy[0]} is due a share of the nodes"))
                wanted -= 1
    return moves
