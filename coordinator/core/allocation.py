"""Which node works for which job, when several jobs share one coordinator.

Each job first gets the number of nodes that it needs to start: jobs that have nodes come first,
then the order of creation decides. What is left is dealt out evenly, up to what each job takes at
most. A job that cannot start yet gets none. A job gets only nodes that offer its workload and meet
its requirements, and of those the ones that fewest others can use. A node that is paused is
withdrawn from its job and lent to none.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial

import msgspec

from coordinator.core.node_fit import NodeFeatures, operator_reason, unmet_reason
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.requirements import Requirement
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
    nodes_max: int = 0
    """Nodes that it gets at most; 0: no limit."""
    later_versions: frozenset[int] = frozenset()
    """Later versions of its workload that train it alike."""
    requirements: tuple[Requirement, ...] = ()
    """Every node of it meets all of them."""
    data_name: str = ""
    """The data set that a node must have of its own; empty: none."""
    operators: frozenset[str] = frozenset()
    """Operators of torch that a node must have."""
    excluded: Mapping[NodeId, str] = {}
    """Nodes that it gives no work, with the reason; those that are members stay until others are
    due them.
    """


class NodeOffer(msgspec.Struct, frozen=True):
    """A connected node that is not draining."""

    node: NodeId
    job_id: JobId | None
    workloads: Mapping[str, int]
    pause_reason: str = ""
    """Why it takes no work though it is connected; empty: it takes some."""
    features: NodeFeatures = {}
    data_names: frozenset[str] = frozenset()
    """Data sets that its owner has named a folder for."""
    torch: str = ""
    """Version of its torch."""
    lacking_operators: frozenset[str] = frozenset()
    """Operators of programs that this has not."""


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
    offers = sorted(
        (offer for offer in offers if not offer.pause_reason), key=lambda offer: offer.node
    )
    demands = sorted(demands, key=lambda demand: not demand.members)
    deal = _Deal(demands, offers)
    deal.give_least()
    deal.give_rest()
    return (*_lend(demands, offers, deal), *_recall(demands, offers, deal))


def _withdraw(offers: Sequence[NodeOffer]) -> tuple[Withdraw, ...]:
    return tuple(
        Withdraw(offer.node, offer.job_id, offer.pause_reason)
        for offer in offers
        if offer.pause_reason and offer.job_id is not None
    )


def unfit_reason(demand: JobDemand, offer: NodeOffer) -> str:
    """Why a node can never work for a job as both are now; empty: it can."""
    if reason := demand.excluded.get(offer.node, ""):
        return reason
    versions = {demand.workload_version, *demand.later_versions}
    if offer.workloads.get(demand.workload) not in versions:
        return f"it does not offer {demand.workload} {demand.workload_version}"
    if demand.data_name and demand.data_name not in offer.data_names:
        return f"its owner has named no folder for {demand.data_name}"
    lacking = operator_reason(demand.operators, offer.lacking_operators, offer.torch)
    return lacking or unmet_reason(demand.requirements, offer.features)


class _Deal:
    """Places of nodes, as far as they are dealt out."""

    def __init__(self, demands: Sequence[JobDemand], offers: Sequence[NodeOffer]) -> None:
        self._demands = demands
        able = {
            demand.job_id: [offer for offer in offers if not unfit_reason(demand, offer)]
            for demand in demands
        }
        connected = {offer.node for offer in offers}
        # A member that is away for a moment still counts: it may be back before it is given up.
        self.shares = {
            demand.job_id: len(demand.members - connected - demand.excluded.keys())
            for demand in demands
        }
        # One that cannot start whatever it is dealt makes nobody swap nodes.
        startable = [
            able[each.job_id]
            for each in demands
            if len(able[each.job_id]) + self.shares[each.job_id] >= each.nodes_min
        ]
        users = Counter(offer.node for found in startable for offer in found)
        active = {demand.job_id for demand in demands}
        self._able = {
            demand.job_id: sorted(
                able[demand.job_id], key=partial(_preference, demand, active, users)
            )
            for demand in demands
        }
        self._left = {job_id: iter(found) for job_id, found in self._able.items()}
        self.places: dict[NodeId, JobId] = {}

    def give_least(self) -> None:
        """Give each job what it needs to start, or nothing."""
        for demand in self._demands:
            job_id = demand.job_id
            needed = demand.nodes_min - self.shares[job_id]
            if needed > sum(offer.node not in self.places for offer in self._able[job_id]):
                del self._left[job_id]
                continue
            for _ in range(needed):
                self._give_one(job_id)

    def give_rest(self) -> None:
        """Give what is left to the jobs that start, evenly."""
        demands = {demand.job_id: demand for demand in self._demands}
        taking = list(self._left)
        while taking:
            job_id = min(taking, key=lambda one: self.shares[one])
            if self.is_full(demands[job_id]) or not self._give_one(job_id):
                taking.remove(job_id)

    def is_full(self, demand: JobDemand) -> bool:
        """Whether a job is dealt the most nodes that it takes."""
        return 0 < demand.nodes_max <= self.shares[demand.job_id]

    def _give_one(self, job_id: JobId) -> bool:
        """Give a job the next of its nodes that is not given yet; tells whether there was one."""
        for offer in self._left[job_id]:
            if offer.node not in self.places:
                self.places[offer.node] = job_id
                self.shares[job_id] += 1
                return True
        return False


def _preference(
    demand: JobDemand, active: Set[JobId], users: Mapping[NodeId, int], offer: NodeOffer
) -> tuple[int, int]:
    """Nodes that few jobs can use first; of those the job's own, then free ones."""
    if offer.node in demand.members:
        return users[offer.node], 0
    return users[offer.node], 1 if offer.job_id not in active else 2


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
            elif place is None and deal.is_full(demand):
                reason = f"{demand.job_id} takes {several(demand.nodes_max, 'node')} at most"
                yield Recall(offer.node, demand.job_id, reason)
