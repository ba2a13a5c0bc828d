"""Jobs that can use nodes, and nodes that can be used: what an allocation is made of."""

from collections.abc import Mapping, Sequence

import msgspec

from coordinator.core.work.node_fit import (
    NodeFeatures,
    operator_reason,
    optimizer_reason,
    unmet_reason,
)
from hypergpu.device_shares import WHOLE_DEVICE_PERMILLE
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.jobfile.requirements import Requirement
from hypergpu.optimizer import FIRST_OPTIMIZERS
from hypergpu.units import Milliseconds


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
    optimizer: str = "adamw"
    """Inner optimizer that a node must have."""
    needs_signatures: bool = False
    """Whether nodes must sign their results of packed work, as these are paid."""
    needs_count_signatures: bool = False
    """Whether nodes must sign counts of what they give in answer to calls, as these are paid."""
    share_permille: int = WHOLE_DEVICE_PERMILLE
    """Share of a device that each of its nodes must have."""
    excluded: Mapping[NodeId, str] = {}
    """Nodes that it gives no work, with the reason; those that are members stay until others are
    due them.
    """
    trust_labels: frozenset[str] = frozenset()
    """Labels that an operator must have given a node, all of them."""
    owner: TokenId = TokenId("")
    priority: int = 0
    """Among the jobs of one owner the higher goes first."""
    weight: int = 1
    """Its part of what is left to the owner's jobs."""
    waited_ms: Milliseconds = Milliseconds(0)
    """How long it has been without its least nodes; 0 while it has them."""
    has_had_turn: bool = False
    """Whether it has had its least nodes before."""
    served_ms: Milliseconds = Milliseconds(0)
    """How long it has had its least nodes; 0 while it has not."""

    @property
    def is_served(self) -> bool:
        """Whether it has its least nodes."""
        return len(self.members) >= self.nodes_min


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
    optimizers: frozenset[str] = FIRST_OPTIMIZERS
    """Inner optimizers that it has."""
    signs_results: bool = True
    """Whether it signs results of packed work."""
    signs_counts: bool = True
    """Whether it signs counts of what it gave in answer to calls."""
    trust_labels: frozenset[str] = frozenset()
    """Labels that operators gave it."""
    share_permille: int = WHOLE_DEVICE_PERMILLE
    """Share of its device that it has, beside other nodes of it."""
    health: float = 0.75
    """By which nodes are asked, in [0, 1]: see `coordinator.core.hub.health`."""
    health_exclusion: str = ""
    """Why only a job that lacks its least nodes gets it; empty: any may."""
    leaving_ms: Milliseconds = Milliseconds(0)
    """How long ago its job was asked for it back, and still has it; 0: it was not."""


def unfit_reason(demand: JobDemand, offer: NodeOffer) -> str:
    """Why a node can never work for a job as both are now; empty: it can."""
    if reason := demand.excluded.get(offer.node, ""):
        return reason
    versions = {demand.workload_version, *demand.later_versions}
    if offer.workloads.get(demand.workload) not in versions:
        return _version_reason(demand, offer)
    if reason := _distrust_reason(demand, offer):
        return reason
    if demand.data_name and demand.data_name not in offer.data_names:
        return f"its owner has named no folder for {demand.data_name}"
    if reason := optimizer_reason(demand.optimizer, offer.optimizers):
        return reason
    if reason := _unsigned_reason(demand, offer):
        return reason
    if reason := share_reason(demand.share_permille, offer.share_permille):
        return reason
    operator_gap = operator_reason(demand.operators, offer.lacking_operators, offer.torch)
    return operator_gap or unmet_reason(demand.requirements, offer.features)


def _version_reason(demand: JobDemand, offer: NodeOffer) -> str:
    """Why a node's version of a workload is none that the job's nodes have."""
    offered_version = offer.workloads.get(demand.workload)
    lack = f"it does not offer {demand.workload} {demand.workload_version}"
    if offered_version is None or offered_version > demand.workload_version:
        return lack
    return f"{lack}, but {offered_version}. Fix there: pip install --upgrade hypergpu"


def _distrust_reason(demand: JobDemand, offer: NodeOffer) -> str:
    """Which label of an operator a node lacks; empty: none."""
    missing_labels = sorted(demand.trust_labels - offer.trust_labels)
    if not missing_labels:
        return ""
    label = missing_labels[0]
    fix = f"hypergpu node label {offer.node[:10]} {label}"
    return f"no operator gave it the label {label!r}. Fix: {fix}"


def _unsigned_reason(demand: JobDemand, offer: NodeOffer) -> str:
    """What a node does not sign that a job pays for; empty: nothing."""
    unsigned_work = ""
    if demand.needs_signatures and not offer.signs_results:
        unsigned_work = "results"
    elif demand.needs_count_signatures and not offer.signs_counts:
        unsigned_work = "counts of tokens"
    if not unsigned_work:
        return ""
    return (
        f"its version signs no {unsigned_work}, and the job pays."
        " Fix there: pip install --upgrade hypergpu"
    )


def share_reason(needed_permille: int, offered_permille: int) -> str:
    """Why a node's share of its device is too small; empty: it is not."""
    if offered_permille >= needed_permille:
        return ""
    offer_text, need_text = (f"{each / 10:g} %" for each in (offered_permille, needed_permille))
    return f"it has {offer_text} of its device, and the job needs {need_text}"


def away_count(demand: JobDemand, connected: frozenset[NodeId]) -> int:
    """Members that are away for a moment: they count, as they may be back before they are lost."""
    return len(demand.members - connected - demand.excluded.keys())


def startable_jobs(demands: Sequence[JobDemand], offers: Sequence[NodeOffer]) -> frozenset[JobId]:
    """Jobs that as many nodes fit as they need, whoever has them now."""
    connected_nodes = frozenset(offer.node for offer in offers)
    return frozenset(
        demand.job_id
        for demand in demands
        if demand.nodes_min
        <= away_count(demand, connected_nodes)
        + sum(not unfit_reason(demand, each) for each in offers)
    )
