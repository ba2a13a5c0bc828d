"""`echo` as an entry of the table of kinds."""

from coordinator.core.work.kind import PendingWork, WorkKind
from coordinator.core.work.work_events import MembershipEvent
from hypergpu.assignment import Lease
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.kinds.echo.core.events import EchoCreated, EchoEvent, ItemHandedBack, ItemReturned
from tests.kinds.echo.core.leasing import assign_work, report_when_due
from tests.kinds.echo.core.state import ENDED, KIND, EchoJob, EchoPhase
from tests.kinds.echo.core.transition import rejection, transition

SNAPSHOT_ITEMS = 8


def outstanding(job: EchoJob) -> tuple[object, ...]:
    """Commands whose answers the job still waits for."""
    return (*(assign_work(job, node) for node in job.leases), *report_when_due(job))


def _pending(job: EchoJob, node: NodeId) -> PendingWork | None:
    leased = job.leases.get(node)
    return None if leased is None else PendingWork(leased.lease, assign_work(job, node))


def _handed_back(node: NodeId, lease: Lease, reason: str) -> ItemHandedBack:
    return ItemHandedBack(
        at_ms=Milliseconds(0), node=node, number=lease.round, lease=lease.number, reason=reason
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
    handed_back=_handed_back,
    is_paused=lambda job: job.phase is EchoPhase.PAUSED,
    has_ended=lambda job: job.phase in ENDED,
    is_complete=lambda job: job.phase in ENDED,
    is_snapshot_due=lambda job, event: (
        isinstance(event, ItemReturned) and len(job.returned) % SNAPSHOT_ITEMS == 0
    ),
    moves_nodes=_moves_nodes,
)
"""Items that nodes give back as they are."""
