"""Which node works for which job, when several jobs share one coordinator.

Each job first gets the number of nodes that it needs to start, in the order of `job_turns`. What is
left is dealt out evenly among owners, and by weight among the jobs of one, up to what each job
takes at most. A job that cannot start yet gets none; while it is the first of those that wait, no
other one begins on nodes that it could use, and those that train go on. A job gets only nodes that
offer its workload and meet its requirements, and of those the ones that fewest others can use, of
equals the healthiest. A node that its health excludes goes only to a job that lacks its least nodes
without it. A node is moved once it has finished what it holds, or after `RECALL_LIMIT_MS`. A node
that is paused is withdrawn from its job and lent to none.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from functools import partial

import msgspec

from coordinator.core.work.demand import (
    JobDemand,
    NodeOffer,
    away_count,
    startable_jobs,
    unfit_reason,
)
from coordinator.core.work.job_turns import TURN_MS, ordered_demands
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.units import Milliseconds, several

RECALL_LIMIT_MS = Milliseconds(600_000)
"""A node that has not finished its work so long after it was asked back is taken: its samples go
out again, and it keeps its state for its return.
"""


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
    """Take a node out of its job at once: it is paused, or was asked back and took too long."""

    node: NodeId
    job_id: JobId
    reason: str


Move = Lend | Recall | Withdraw


def plan_allocation(
    demands: Sequence[JobDemand],
    offers: Sequence[NodeOffer],
    turn_ms: Milliseconds = TURN_MS,
) -> tuple[Move, ...]:
    """Deal nodes out to jobs.

    Args:
        demands: Jobs that can use nodes, in order of creation.
        offers: Every connected node that is not draining. A node of a job that is not in
            ``demands`` counts as free.
        turn_ms: For how long a job keeps its least nodes though others wait.

    Returns:
        Moves with their reasons; none when every job has its share. Withdrawals come alone: what
        they leave to be done is for the next plan.
    """
    if withdrawals := _withdraw(offers):
        return withdrawals
    offers = sorted(
        (offer for offer in offers if not offer.pause_reason), key=lambda offer: offer.node
    )
    startable = startable_jobs(demands, offers)
    demands = ordered_demands(demands, startable, turn_ms)
    deal = _Deal(demands, offers, startable)
    deal.give_least()
    deal.give_rest()
    return (*_lend(demands, offers, deal), *_recall(demands, offers, deal))


def _withdraw(offers: Sequence[NodeOffer]) -> tuple[Withdraw, ...]:
    return tuple(
        Withdraw(offer.node, offer.job_id, offer.pause_reason or _OVERDUE)
        for offer in offers
        if offer.job_id is not None and (offer.pause_reason or offer.leaving_ms > RECALL_LIMIT_MS)
    )


_OVERDUE = f"it did not finish within {RECALL_LIMIT_MS // 60_000} min of being asked back"


class _Deal:
    """Places of nodes, as far as they are dealt out."""

    def __init__(
        self,
        demands: Sequence[JobDemand],
        offers: Sequence[NodeOffer],
        startable: frozenset[JobId],
    ) -> None:
        self._demands = demands
        self._startable = startable
        able = {
            demand.job_id: [offer for offer in offers if not unfit_reason(demand, offer)]
            for demand in demands
        }
        connected_nodes = frozenset(offer.node for offer in offers)
        self.shares = {demand.job_id: away_count(demand, connected_nodes) for demand in demands}
        # One that cannot start whatever it is dealt makes nobody swap nodes.
        users = Counter(offer.node for job_id in startable for offer in able[job_id])
        active = {demand.job_id for demand in demands}
        self._able = {
            demand.job_id: sorted(
                able[demand.job_id], key=partial(_preference, demand, active, users)
            )
            for demand in demands
        }
        self._taking = {demand.job_id: demand for demand in demands}
        """Jobs that take more than they are dealt so far."""
        self._reserved: set[NodeId] = set()
        """Nodes on which no job begins, as one that waits longer could use them."""
        self.places: dict[NodeId, JobId] = {}

    def give_least(self) -> None:
        """Give each job what it needs to start, or nothing."""
        for demand in self._demands:
            job_id = demand.job_id
            needed_nodes = demand.nodes_min - self.shares[job_id]
            barred_nodes: Container[NodeId] = () if demand.is_served else self._reserved
            usable = [each.node for each in self._able[job_id] if self._is_free(each, barred_nodes)]
            if needed_nodes <= len(usable):
                for node in usable[: max(0, needed_nodes)]:
                    self._give(node, job_id)
                continue
            del self._taking[job_id]
            if job_id in self._startable and not demand.is_served:
                self._reserved |= {each.node for each in self._able[job_id]}

    def give_rest(self) -> None:
        """Give what is left to the jobs that start: evenly to owners, by weight to their jobs."""
        owner_shares: Counter[TokenId] = Counter()
        owner_members: Counter[TokenId] = Counter()
        for demand in self._demands:
            owner_shares[demand.owner] += self.shares[demand.job_id]
            owner_members[demand.owner] += len(demand.members)

        def turn(demand: JobDemand) -> tuple[float, ...]:
            # Of equals who has more keeps it: nothing moves to and fro.
            return (
                owner_shares[demand.owner],
                -owner_members[demand.owner],
                self.shares[demand.job_id] / demand.weight,
                -len(demand.members),
            )

        left_nodes = {job_id: iter(self._able[job_id]) for job_id in self._taking}
        while self._taking:
            demand = min(self._taking.values(), key=turn)
            free = (
                each.node
                for each in left_nodes[demand.job_id]
                if self._is_free(each, ()) and not each.health_exclusion
            )
            node = None if self.is_full(demand) else next(free, None)
            if node is None:
                del self._taking[demand.job_id]
                continue
            self._give(node, demand.job_id)
            owner_shares[demand.owner] += 1

    def is_full(self, demand: JobDemand) -> bool:
        """Whether a job is dealt the most nodes that it takes."""
        return 0 < demand.nodes_max <= self.shares[demand.job_id]

    def _is_free(self, offer: NodeOffer, barred: Container[NodeId]) -> bool:
        return offer.node not in self.places and offer.node not in barred

    def _give(self, node: NodeId, job_id: JobId) -> None:
        self.places[node] = job_id
        self.shares[job_id] += 1


def _preference(
    demand: JobDemand, active: Set[JobId], users: Mapping[NodeId, int], offer: NodeOffer
) -> tuple[bool, int, int, float]:
    """Nodes that few jobs can use first; of those the job's own, then free ones; of equals the
    healthiest. Who is excluded by its health comes last of all.
    """
    is_own = offer.node in demand.members
    place = 0 if is_own else 1 if offer.job_id not in active else 2
    # Of a job's own nothing moves to and fro by health.
    return bool(offer.health_exclusion), users[offer.node], place, 0.0 if is_own else -offer.health


def _lend(demands: Sequence[JobDemand], offers: Sequence[NodeOffer], deal: _Deal) -> Iterator[Lend]:
    """Give free nodes to the jobs that they are dealt to."""
    active = {demand.job_id for demand in demands}
    for offer in offers:
        job_id = deal.places.get(offer.node)
        if job_id is not None and offer.job_id not in active:
            due = f"free, and {job_id} is due {several(deal.shares[job_id], 'node')}"
            yield Lend(offer.node, job_id, due)


def _recall(
    demands: Sequence[JobDemand], offers: Sequence[NodeOffer], deal: _Deal
) -> Iterator[Recall]:
    """Ask jobs for the nodes that are dealt to others, that do not fit any more, and that are more
    than they take.
    """
    for demand in demands:
        for offer in offers:
            if offer.node not in demand.members:
                continue
            place = deal.places.get(offer.node)
            if place not in (None, demand.job_id):
                reason = f"{place} is due a share of the nodes"
                yield Recall(offer.node, demand.job_id, reason)
            elif offer.node not in demand.excluded and (reason := unfit_reason(demand, offer)):
                yield Recall(offer.node, demand.job_id, reason)
            elif place is None and offer.health_exclusion:
                yield Recall(offer.node, demand.job_id, offer.health_exclusion)
            elif place is None and deal.is_full(demand):
                reason = f"{demand.job_id} takes {several(demand.nodes_max, 'node')} at most"
                yield Recall(offer.node, demand.job_id, reason)
