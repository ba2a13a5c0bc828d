"""Served models as an entry of the table of kinds."""

from msgspec.structs import replace

from coordinator.core.serving.commands import CheckAgain, RequestSignature
from coordinator.core.serving.events import (
    ModelUnloaded,
    ModelWanted,
    ReplicaHandedBack,
    ServeCreated,
    ServeEvent,
    StageChecked,
    StagesContradicted,
    WindowAccepted,
    WindowCounted,
    WindowSigned,
)
from coordinator.core.serving.leasing import assign_work, report_settlement
from coordinator.core.serving.state import ENDED, ServeJob, ServePhase
from coordinator.core.serving.transition import rejection, transition
from coordinator.core.work.kind import PackedForms, PendingWork, ReceiptForms, WorkKind
from coordinator.core.work.work_events import JobEnded, MembershipEvent
from hypergpu.assignment import FailureCause, Lease
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.jobfile.spec import Pay
from hypergpu.journal.serving_events import ServePay
from hypergpu.packed_work import PackedWork, unpack_work
from hypergpu.serving.serve_request import COUNT_KIND, SERVE_KIND, ServeRequest, SignedCount
from hypergpu.units import Milliseconds

_NOW = Milliseconds(0)  # stamped by the driver


def outstanding(job: ServeJob) -> tuple[object, ...]:
    """Commands whose answers the job still waits for: nodes are to hold the model, and to sign."""
    assignments = (assign_work(job, node) for node in job.leases)
    is_settling = job.phase is ServePhase.SETTLING
    reports = (report_settlement(job),) if is_settling else ()
    checks = map(CheckAgain, job.disputes)
    return (*assignments, *map(RequestSignature, job.windows), *checks, *reports)


def _pending(job: ServeJob, node: NodeId) -> tuple[PendingWork, ...]:
    replica = job.leases.get(node)
    return () if replica is None else (PendingWork(replica.lease, assign_work(job, node)),)


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
        at_ms=_NOW,
        job_id=job_id,
        owner=owner,
        request=request,
        model=request.model,
        pay=ServePay(
            unit_price=request.unit_price,
            budget=request.budget,
            windows_per_epoch=request.windows_per_epoch,
            request=digest_of(work.body),
        ),
    )


def _result_event(
    job: ServeJob, node: NodeId, lease: Lease, result: PackedWork
) -> WindowSigned | None:
    """The event of a signed count: nodes send no other results."""
    unpack_work(result, COUNT_KIND, SignedCount)
    window = job.windows.get(lease.round)
    if window is None and 0 < lease.round < job.next_window:
        return None
    if window is None or (window.node, window.lease) != (node, lease.number):
        detail = f"{node} has no count {lease.round} of {job.job_id} to sign"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return WindowSigned(at_ms=_NOW, node=node, window=lease.round)


def _pay(event: ServeCreated) -> Pay:
    return Pay(unit_price=event.request.unit_price, escrow=event.request.budget)


_RECEIPTS = ReceiptForms(
    pay=_pay,
    unit=lambda event: event.request.unit,
    with_terms=lambda event, terms, funding: replace(event, terms=terms, funding=funding),
)
_SNAPSHOT_WINDOWS = 50


def _is_snapshot_due(job: ServeJob, event: ServeEvent) -> bool:
    return isinstance(event, WindowCounted) and job.next_window % _SNAPSHOT_WINDOWS == 0


def _moves_nodes(before: ServeJob | None, event: ServeEvent, after: ServeJob) -> bool:
    is_phase_new = before is None or before.phase is not after.phase
    has_fewer_rings = before is not None and before.rings != after.rings
    moving_events = MembershipEvent | ReplicaHandedBack | ModelUnloaded | ModelWanted
    is_moving = isinstance(event, moving_events | StagesContradicted)
    return is_phase_new or has_fewer_rings or is_moving or _changes_doubts(before, event, after)


def _changes_doubts(before: ServeJob | None, event: ServeEvent, after: ServeJob) -> bool:
    """Whether a check begins or ends a doubt: a third node is to decide, or one is banned."""
    if before is None or not isinstance(event, StageChecked):
        return False
    doubts = [job.members[event.node].stage_record.contradictions for job in (before, after)]
    return doubts[0] != doubts[1]


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
    has_ended=lambda job: job.phase in ENDED,
    is_complete=lambda job: job.phase is ServePhase.STOPPED,
    paid_by=ServeCreated | WindowAccepted | JobEnded,
    packed=PackedForms(_creation_event, _result_event, _RECEIPTS),
    is_snapshot_due=_is_snapshot_due,
    moves_nodes=_moves_nodes,
)
"""A model on nodes, which answer calls."""
