"""What users see of a farm job: its progress, and to its owner the accepted results."""

from collections.abc import Sequence
from itertools import islice

from coordinator.core.farm.events import BundleAccepted, ItemDropped
from coordinator.core.farm.state import ENDED, FarmJob
from coordinator.shell.kinds.farm.runtime import FarmRuntime
from coordinator.shell.store.storage import Storage
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.journal.worth import PRICED_SAMPLES
from hypergpu.v1 import farm_pb2
from hypergpu.wire.messages import blob_message, digest_value

RESULTS_MOST = 1_000
"""Results in one answer, and items that were given up."""
OPEN_RUNS_MOST = 1_000


def bundle_progress(job: FarmJob) -> farm_pb2.BundleProgress:
    """How far a job is."""
    return farm_pb2.BundleProgress(
        items=job.request.items,
        settled_items=job.settled_items,
        failed_items=job.failed_items,
        units=job.units,
        unit=job.request.unit.value,
        open_bundles=len(job.leases) + len(job.queued_leases),
        item_kind=job.request.item_kind,
        paid_units=job.paid_units,
        unit_price=str(job.request.unit_price),
        cost=str(job.request.unit_price * job.paid_units // PRICED_SAMPLES),
        budget=str(job.request.budget),
        # Who has a run, and how often it goes out, would tell which are compared.
        open_runs=[
            farm_pb2.OpenRun(start=each.run.start, items=each.run.items)
            for each in islice(job.bundles.values(), OPEN_RUNS_MOST)
        ],
    )


def accepted_results(
    runtime: FarmRuntime, request: farm_pb2.ListResultsRequest
) -> farm_pb2.ListResultsResponse:
    """The accepted results from a number on.

    Raises:
        HyperGPUError: NOT_READY, the job is being taken up again.
    """
    _require_rows(runtime)
    job, first = runtime.job, request.from_number
    page = runtime.accepted[first : first + RESULTS_MOST]
    dropped_items = _dropped_page(runtime, request)
    is_last = first + len(page) >= len(runtime.accepted)
    if request.HasField("from_dropped"):
        is_last &= request.from_dropped + len(dropped_items) >= len(runtime.dropped)
    return farm_pb2.ListResultsResponse(
        results=map(_result_message, page),
        dropped_items=[
            farm_pb2.DroppedItem(item=each.item, reason=each.reason) for each in dropped_items
        ],
        items=job.request.items,
        settled_items=job.settled_items,
        is_over=is_last and job.phase in ENDED,
    )


def _dropped_page(
    runtime: FarmRuntime, request: farm_pb2.ListResultsRequest
) -> Sequence[ItemDropped]:
    """Items that were given up from the number on that is asked for; all for older clients."""
    if not request.HasField("from_dropped"):
        return runtime.dropped
    return runtime.dropped[request.from_dropped :][:RESULTS_MOST]


def _result_message(result: BundleAccepted) -> farm_pb2.AcceptedResult:
    return farm_pb2.AcceptedResult(
        start=result.start,
        items=result.items,
        blob=blob_message(result.blob),
        node_id=result.node,
        units=result.units,
        failures=result.failures,
        tries=result.tries,
    )


async def resolve_result(
    storage: Storage, runtime: FarmRuntime, request: farm_pb2.ResolveResultRequest
) -> farm_pb2.ResolveResultResponse:
    """A ticket for the blob of an accepted result.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it is no accepted result of the job; NOT_READY.
    """
    _require_rows(runtime)
    digest = digest_value(request.digest)
    result = runtime.accepted_result(digest)
    if result is None:
        detail = f"{digest} is no accepted result of {runtime.job.job_id}"
        raise HyperGPUError(Reason.BLOB_UNKNOWN, detail, fix="list the results again")
    return farm_pb2.ResolveResultResponse(ticket=await storage.bulk.ticket(None, result.blob))


def _require_rows(runtime: FarmRuntime) -> None:
    if not runtime.has_read_rows:
        raise HyperGPUError(Reason.NOT_READY, f"{runtime.job.job_id} is being taken up again")
