"""Farm jobs as an entry of the table of kinds."""

from msgspec.structs import replace

from coordinator.core.farm.bundle_leases import assign_all, assign_work, report_when_due
from coordinator.core.farm.events import (
    BudgetRaised,
    BundleAccepted,
    BundleHandedBack,
    BundleReturned,
    FarmEvent,
    MapCreated,
    PartConfirmed,
)
from coordinator.core.farm.part_results import CompareResults
from coordinator.core.farm.state import ENDED, CheckRule, FarmJob, FarmPhase
from coordinator.core.farm.transition import rejection, transition
from coordinator.core.work.kind import PackedForms, PendingWork, ReceiptForms, WorkKind
from coordinator.core.work.work_events import JobEnded, MembershipEvent
from hypergpu.assignment import FailureCause, Lease
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.bundles import BundleResult
from hypergpu.farm.map_request import BUNDLE_ITEMS_MOST, MAP_KIND, MapRequest
from hypergpu.farm.spec_keys import read_spec
from hypergpu.farm.work_spec import request_conflict
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.jobfile.spec import Pay
from hypergpu.journal.farm_events import FarmPay
from hypergpu.packed_work import PackedWork, unpack_work
from hypergpu.signed_spec import SignedSpec
from hypergpu.units import Milliseconds

SNAPSHOT_LEASES = 100
_NOW = Milliseconds(0)  # stamped by the driver


def outstanding(job: FarmJob) -> tuple[object, ...]:
    """Commands whose answers the job still waits for."""
    comparisons = (
        CompareResults(number, open_bundle.comparing)
        for number, open_bundle in job.bundles.items()
        if open_bundle.comparing
    )
    return (*assign_all(job), *comparisons, *report_when_due(job))


def _pending(job: FarmJob, node: NodeId) -> tuple[PendingWork, ...]:
    return tuple(
        PendingWork(each.lease, assign_work(job, node, each)) for each in job.leases_of(node)
    )


def _hand_back_event(
    node: NodeId, lease: Lease, reason: str, cause: FailureCause
) -> BundleHandedBack:
    return BundleHandedBack(
        at_ms=_NOW,
        node=node,
        bundle=lease.round,
        lease=lease.number,
        reason=reason,
        lacks_memory=cause is FailureCause.OUT_OF_MEMORY,
        is_refused=cause is FailureCause.OWNER,
    )


def _creation_event(job_id: JobId, owner: TokenId, work: PackedWork) -> MapCreated:
    request = unpack_work(work, MAP_KIND, MapRequest)
    request.check()
    return MapCreated(
        at_ms=_NOW,
        job_id=job_id,
        owner=owner,
        request=request,
        item_kind=request.item_kind,
        items=request.items,
        unit=request.unit.value,
        bundle_items_most=BUNDLE_ITEMS_MOST,
        check_rule=CheckRule.PARTS,
        pay=FarmPay(
            unit_price=request.unit_price,
            budget=request.budget,
            bundles_per_epoch=request.bundles_per_epoch,
            request=digest_of(work.body),
            manifest=request.manifest.digest,
        ),
    )


def _result_event(
    job: FarmJob, node: NodeId, lease: Lease, result: PackedWork
) -> BundleReturned | None:
    member = job.members.get(node)
    if member is not None and member.accepted_lease == lease.number:
        return None
    return BundleReturned(
        at_ms=_NOW,
        node=node,
        bundle=lease.round,
        lease=lease.number,
        result=unpack_work(result, job.request.work_kind, BundleResult),
    )


def _is_snapshot_due(_: FarmJob, event: FarmEvent) -> bool:
    return isinstance(event, BundleReturned) and event.lease % SNAPSHOT_LEASES == 0


def _moves_nodes(before: FarmJob | None, event: FarmEvent, after: FarmJob) -> bool:
    is_phase_new = before is None or before.phase is not after.phase
    return is_phase_new or isinstance(event, MembershipEvent | BundleHandedBack)


def _pay(event: MapCreated) -> Pay:
    return Pay(unit_price=event.request.unit_price, escrow=event.request.budget)


def _with_spec(event: MapCreated, signed_spec: SignedSpec, now_s: int) -> MapCreated:
    spec = read_spec(signed_spec)
    if reason := request_conflict(spec, event.request, event.owner, now_s):
        raise HyperGPUError(Reason.SIGNATURE_INVALID, reason, fix="sign the request that is sent")
    return replace(event, spec=signed_spec)


_RECEIPTS = ReceiptForms(
    pay=_pay,
    unit=lambda event: event.request.unit,
    with_terms=lambda event, terms, funding: replace(event, terms=terms, funding=funding),
)


FARM = WorkKind(
    name=MAP_KIND,
    created=MapCreated,
    events=FarmEvent,
    state=FarmJob,
    transition=transition,
    rejection=rejection,
    outstanding=outstanding,
    pending=_pending,
    hand_back_event=_hand_back_event,
    phase_name=lambda job: job.phase.value,
    is_paused=lambda job: job.phase is FarmPhase.PAUSED,
    has_ended=lambda job: job.phase in ENDED,
    is_complete=lambda job: job.phase in ENDED,
    paid_by=MapCreated | BundleAccepted | PartConfirmed | BudgetRaised | JobEnded,
    packed=PackedForms(_creation_event, _result_event, _RECEIPTS, _with_spec),
    is_snapshot_due=_is_snapshot_due,
    moves_nodes=_moves_nodes,
)
"""Bundles of items whose results are blobs."""
