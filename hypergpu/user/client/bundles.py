"""Calls of farm jobs: items are sent as blobs, a job is created of them, results are fetched."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_from_wire, digest_to_wire
from hypergpu.farm.map_request import MAP_KIND, MapRequest
from hypergpu.ids import Digest
from hypergpu.packed_work import pack_work
from hypergpu.signed_spec import SignedSpec
from hypergpu.units import Bytes
from hypergpu.user.client.connection import CoordinatorCalls
from hypergpu.user.client.export import FetchedBytes, WantedBlob, fetch_blob, fetch_with_resume
from hypergpu.user.client.resume import ReportProgress, ignore
from hypergpu.user.client.upload import send_files
from hypergpu.v1 import farm_pb2, job_pb2, tensor_pb2
from hypergpu.wire.specs import spec_message
from hypergpu.wire.work import work_message


class ResultView(msgspec.Struct, frozen=True):
    """The accepted result of one bundle."""

    start: int
    """Position of its first item."""
    items: int
    digest: Digest
    size_bytes: int
    node: str
    units: int
    failures: int
    """Items that have a reason in place of a value."""
    tries: int
    """Leases under which the bundle was given out, until this one."""


class DroppedItemView(msgspec.Struct, frozen=True):
    """An item that was given up."""

    item: int
    """Its position."""
    reason: str


class ResultsView(msgspec.Struct, frozen=True):
    """Results of a farm job, in order of their acceptance."""

    results: tuple[ResultView, ...]
    """1,000 at most; more may be there from the next number on."""
    dropped_items: tuple[DroppedItemView, ...]
    """Those given up from the number on that was asked for; 1,000 at most, as of results."""
    items: int
    settled_items: int
    """Items with an accepted result, or given up."""
    is_over: bool
    """Whether no more will come."""


async def send_blobs(
    calls: CoordinatorCalls, paths: Sequence[Path], step: str, report: ReportProgress
) -> list[BlobRef]:
    """Send files, unless the coordinator holds them; gives their names in order.

    Raises:
        HyperGPUError: One cannot be read, or the coordinator refuses it or stays away.
    """
    return [_blob(each) for each in await send_files(calls, paths, step, report)]


def _blob(message: tensor_pb2.BlobRef) -> BlobRef:
    return BlobRef(digest_from_wire(message.digest.value), Bytes(message.size_bytes))


def map_job_request(
    request: MapRequest, request_id: str, signed_spec: SignedSpec | None = None
) -> job_pb2.CreateJobRequest:
    """The call that creates a farm job.

    Args:
        request: The job.
        request_id: Of the call.
        signed_spec: What its user signed of it; None: nothing.

    Raises:
        HyperGPUError: REQUEST_INVALID, the request is not right.
    """
    request.check()
    work = work_message(pack_work(MAP_KIND, request))
    return job_pb2.CreateJobRequest(
        work=work,
        request_id=request_id,
        signed_spec=None if signed_spec is None else spec_message(signed_spec),
    )


async def list_results(
    calls: CoordinatorCalls, job_id: str, from_number: int, from_dropped: int
) -> ResultsView:
    """Results from a number on, and items that were given up from another."""
    request = farm_pb2.ListResultsRequest(
        job_id=job_id, from_number=from_number, from_dropped=from_dropped
    )
    answer = await calls.call(calls.jobs.ListResults, request)
    return ResultsView(
        tuple(_result_view(each) for each in answer.results),
        tuple(DroppedItemView(each.item, each.reason) for each in answer.dropped_items),
        answer.items,
        answer.settled_items,
        answer.is_over,
    )


def _result_view(result: farm_pb2.AcceptedResult) -> ResultView:
    return ResultView(
        result.start,
        result.items,
        digest_from_wire(result.blob.digest.value),
        result.blob.size_bytes,
        result.node_id,
        result.units,
        result.failures,
        result.tries,
    )


async def fetch_result(
    calls: CoordinatorCalls, job_id: str, result: ResultView, target: Path
) -> None:
    """Fetch the blob of a result into a file, trying again what breaks off by itself.

    Raises:
        HyperGPUError: It is not there, arrived damaged twice, or the coordinator stays away.
    """
    await fetch_with_resume(lambda fetched: _fetch_result(calls, job_id, result, (target, fetched)))


async def _fetch_result(
    calls: CoordinatorCalls, job_id: str, result: ResultView, to: tuple[Path, FetchedBytes]
) -> None:
    target, fetched_bytes = to
    digest = tensor_pb2.Digest(value=digest_to_wire(result.digest))
    request = farm_pb2.ResolveResultRequest(job_id=job_id, digest=digest)
    answer = await calls.call(calls.jobs.ResolveResult, request)
    part = target.with_name(f".{target.name}.part")
    name = f"result of item {result.start}"
    blob = WantedBlob(name, result.digest, result.size_bytes, answer.ticket, part)
    await fetch_blob(calls, blob, fetched_bytes, ignore)
    part.replace(target)
