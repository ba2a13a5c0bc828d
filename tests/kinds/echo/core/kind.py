"""`echo` as an entry of the table of kinds."""

from coordinator.core.work.kind import PackedForms, PendingWork, WorkKind
from coordinator.core.work.work_events import MembershipEvent
from hypergpu.assignment import FailureCause, Lease
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.packed_work import PackedWork, unpack_work
from hypergpu.units import Milliseconds
from tests.kinds.echo.core.events import EchoCreated, EchoEvent, ItemHandedBack, ItemReturned
from tests.kinds.echo.core.leasing import assign_work, report_when_due
from tests.kinds.echo.core.state import (
    ENDED,
    KIND,
    EchoItem,
    EchoJob,
    EchoPhase,
    EchoRequest,
    ReturnedItem,
)
from tests.kinds.echo.core.transition import rejection, transition

SNAPSHOT_ITEMS = 8
_NOW = Milliseconds(0)  # stamped by the driver


def outstanding(job: EchoJob) -> tuple[object, ...]:
    """Commands whose answers the job still waits for."""
    return (*(assign_work(job, node) for node in job.leases), *report_when_due(job))


def _pending(job: EchoJob, node: NodeId) -> tuple[PendingWork, ...]:
    item = job.leases.get(node)
    return () if item is None else (PendingWork(item.lease, assign_work(job, node)),)


def _hand_back_event(node: NodeId, lease: Lease, reason: str, _: FailureCause) -> ItemHandedBack:
    return ItemHandedBack(
        at_ms=_NOW, node=node, number=lease.round, lease=lease.number, reason=reason
    )


def _creation_event(job_id: JobId, owner: TokenId, work: PackedWork) -> EchoCreated:
    request = unpack_work(work, KIND, EchoRequest)
    if not request.items:
        raise HyperGPUError(Reason.REQUEST_INVALID, "a job of this kind has at least one item")
    return EchoCreated(
        at_ms=_NOW,
        job_id=job_id,
        owner=owner,
        items=request.items,
        limit_ms=request.limit_ms,
        keep_ms=request.keep_ms,
    )


def _result_event(
    job: EchoJob, node: NodeId, lease: Lease, result: PackedWork
) -> ItemReturned | None:
    item = unpack_work(result, KIND, EchoItem)
    if job.returned.get(item.number) == ReturnedItem(node, lease.number):
        return None
    return ItemReturned(
        at_ms=_NOW, node=node, number=item.number, lease=lease.number, text=item.text
    )


def _moves_nodes(before: EchoJob | None, event: EchoEvent, after: EchoJob) -> bool:
    is_phase_new = before is None or before.phase is not after.phase
    return is_phase_new or isinstance(event, MembershipEvent)


ECHO = WorkKind(
    name=KIND,
    created=EchoCreated,
    events=EchoEvent,
    state=EchoJob,
    transition=transition,
    rejection=rejection,
    outstanding=outstanding,
    pending=_pending,
    hand_back_event=_hand_back_event,
    phase_name=lambda job: job.phase.value,
    is_paused=lambda job: job.phase is EchoPhase.PAUSED,
    has_ended=lambda job: job.phase in ENDED,
    is_complete=lambda job: job.phase in ENDED,
    packed=PackedForms(_creation_event, _result_event),
    is_snapshot_due=lambda job, event: (
        isinstance(event, ItemReturned) and len(job.returned) % SNAPSHOT_ITEMS == 0
    ),
    moves_nodes=_moves_nodes,
)
"""Items that nodes give back as they are."""
