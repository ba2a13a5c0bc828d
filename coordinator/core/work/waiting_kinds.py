"""Kinds of work that an idle node gets none of, with the reason, for its owner."""

from collections.abc import Sequence

import msgspec

from coordinator.core.work.demand import JobDemand, NodeOffer, unfit_reason

KINDS_MOST = 16
TRAINING = "training"
_PACKED = "/"
"""Names of packed work have it, those of workloads have not."""


class WaitingKind(msgspec.Struct, frozen=True):
    """A kind of work that a job has nodes wait for."""

    kind: str
    """Name of a kind of packed work, such as ``map/embed``, or ``training``."""
    reason: str = ""
    """Why the node gets none though it offers the kind; empty: it does not offer it."""


WaitingKinds = tuple[WaitingKind, ...]


def waiting_kinds(demands: Sequence[JobDemand], offer: NodeOffer) -> WaitingKinds:
    """Kinds of the jobs that a free node is not fit for, each once, in order of the jobs.

    A job that takes no more nodes has none wait.
    """
    kinds: dict[str, WaitingKind] = {}
    for demand in demands:
        if 0 < demand.nodes_max <= len(demand.members) or not unfit_reason(demand, offer):
            continue
        is_packed = _PACKED in demand.workload
        kind = demand.workload if is_packed else TRAINING
        is_offered = demand.workload in offer.workloads or not is_packed
        reason = _public_reason(demand, offer) if is_offered else ""
        kinds.setdefault(kind, WaitingKind(kind, reason))
    return tuple(kinds.values())[:KINDS_MOST]


def _public_reason(demand: JobDemand, offer: NodeOffer) -> str:
    """Why the node is not fit, without names that are only the job's owner's."""
    if demand.data_name and demand.data_name not in offer.data_names:
        return "its owner has named no folder for the job's data"
    return unfit_reason(demand, offer)
