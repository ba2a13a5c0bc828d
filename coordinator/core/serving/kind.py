"""Served models as an entry of the table of kinds."""

from typing import NoReturn

from coordinator.core.serving.events import ReplicaHandedBack, ServeCreated, ServeEvent
from coordinator.core.serving.leasing import assign_work
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.serving.transition import rejection, transition
from coordinator.core.work.kind import PackedForms, PendingWork, WorkKind
from coordinator.core.work.work_events import MembershipEvent
from hypergpu.assignment import FailureCause, Lease
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.packed_work import PackedWork, unpack_work
from hypergpu.serving.serve_request import SERVE_KIND, ServeRequest
from hypergpu.units import Milliseconds

_NOW = Milliseconds(0)  # stamped by the driver


def outstanding(job: ServeJob) -> tuple[object, ...]:
    """Commands whose answers the job still waits for: nodes are to hold the model."""
    return tuple(assign_work(job, node) for node in job.leases)


def _pending(job: ServeJob, node: NodeId) -> PendingWork | None:
    replica = job.leases.get(node)
    return None if replica is None else PendingWork(replica.lease, assign_work(job, node))


def _hand_back_event(
    node: NodeId, lease: Lease, reason: str, cause: FailureCause
) -> ReplicaHandedBack:
    return ReplicaHandedBack(
        at_ms=_NOW, node=node, lease=lease.number, reason=reason, is_lasting=cause.is_lasting
    )


def _creation_event(job_id: JobId, owner: TokenId, work: PackedWork) -> ServeCreated:
    request = unpack_work(work, SERVE_KIND, ServeRequest)
    request.check()
    return ServeCreated(
        at_ms=_NOW, job_id=job_id, owner=owner, request=request, model=request.model
    )


def _result_event(_job: ServeJob, _node: NodeId, lease: Lease, _result: PackedWork) -> NoReturn:
    detail = f"{lease.job_id} serves a model: its nodes answer calls and give no result"
    raise HyperGPUError(Reason.REQUEST_INVALID, detail)


def _moves_nodes(before: ServeJob | None, event: ServeEvent, after: ServeJob) -> bool:
    is_phase_new = before is None or before.phase is not after.phase
    return is_phase_new or isinstance(event, MembershipEvent | ReplicaHandedBack)


SERVING = WorkKind(
    name=SERVE_KIND,
    created=ServeCreated,
    events=ServeEvent,
    state=ServeJob,
    transition=transition,
    rejection=rejection,
    outstanding=outstanding,
    pending=_pending,
    hand_back_event=_hand_back_event,
    phase_name=lambda job: job.phase.value,
    is_paused=lambda job: job.phase is ServePhase.PAUSED,
    has_ended=lambda job: job.phase is ServePhase.STOPPED,
    is_complete=lambda job: job.phase is ServePhase.STOPPED,
    packed=PackedForms(_creation_event, _result_event),
    moves_nodes=_moves_nodes,
)
"""A model on nodes, which answer calls."""
