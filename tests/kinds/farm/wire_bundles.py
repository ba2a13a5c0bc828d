"""Bundles and results of a node that is reduced to its wire."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from gpu_node.shell.worker.farm.checksum import item_checksum
from gpu_node.shell.worker.farm.chunk_items import TextItem
from hypergpu.blobs import BlobRef
from hypergpu.crypto import sign
from hypergpu.digests import digest_of
from hypergpu.farm.bundle_results import json_results
from hypergpu.farm.bundles import Bundle, BundleResult
from hypergpu.packed_work import WorkAmount, pack_work, unpack_work
from hypergpu.result_statements import result_contribution, work_digest
from hypergpu.units import Bytes
from hypergpu.user.client.blocking import wait_for
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import blob_message
from hypergpu.wire.work import work_assignment_value, work_message
from tests.kinds.farm.requests import farm_request
from tests.node_client import WireNode, put_range
from tests.processes import Cluster

KIND = "map/checksum"


def create(cluster: Cluster, texts: list[Any], **changes: Any) -> str:
    """A farm job over these items."""
    with cluster.client() as client:
        calls = client.asynchronous
        request = wait_for(farm_request(calls, texts, **changes))
        return str(wait_for(calls._call(calls._jobs.CreateJob, request)).job_id)


def ask(cluster: Cluster, method: str, request: Any) -> Any:
    """An answer of JobService to an operator."""
    with cluster.client() as client:
        calls = client.asynchronous
        return wait_for(calls._call(getattr(calls._jobs, method), request))


async def next_bundle(
    stream: AsyncIterator[node_pb2.ControlResponse],
) -> tuple[node_pb2.WorkAssignment, Bundle]:
    """The next bundle on a control stream."""
    async with asyncio.timeout(60):
        async for message in stream:
            if message.HasField("work_assignment"):
                work = work_assignment_value(message.work_assignment).work
                return message.work_assignment, unpack_work(work, KIND, Bundle)
    raise AssertionError("the stream ended without a bundle")


def result_bytes(bundle: Bundle, items: list[Any]) -> bytes:
    """The right result of a bundle."""
    lines = items[bundle.start : bundle.start + bundle.items]
    return json_results([item_checksum(TextItem(0, line), 1) for line in lines])


def report_of(bundle: Bundle, content: bytes, **changes: Any) -> BundleResult:
    """What a node says of a result without failures."""
    fields: dict[str, Any] = {
        "blob": BlobRef(digest_of(content), Bytes(len(content))),
        "items": bundle.items,
        "units": bundle.items,
    }
    return BundleResult(**{**fields, **changes})


async def send_blob(node: WireNode, work: node_pb2.WorkAssignment, content: bytes) -> None:
    """Send the blob of a result."""
    blob = BlobRef(digest_of(content), Bytes(len(content)))
    request = node_pb2.OfferResultRequest(lease=work.lease, blob=blob_message(blob))
    offer = await node.stub.OfferResult(request, metadata=node.metadata, timeout=240)
    for part in offer.ticket.ranges:
        status, text = await put_range(part, part.start, content[part.start : part.end])
        assert status == 204, text


def result_signature(node: WireNode, work: node_pb2.WorkAssignment, report: BundleResult) -> bytes:
    """A node's signature of a result; empty: the work is not signed."""
    assignment = work_assignment_value(work)
    if assignment.terms is None:
        return b""
    statement = result_contribution(
        assignment.terms,
        assignment.lease,
        node.node_id,
        work_digest(assignment.work),
        report.blob,
        WorkAmount(report.units, report.compute_ms),
    )
    return sign(node.key, assignment.terms.domain.separator(), statement)


async def contribute(
    node: WireNode,
    work: node_pb2.WorkAssignment,
    report: BundleResult,
    signature: bytes = b"",
    content: bytes = b"",
) -> None:
    """Say what a result is, whose blob was sent or comes beside it."""
    request = node_pb2.ContributeRequest(
        lease=work.lease,
        result=work_message(pack_work(KIND, report)),
        blob=blob_message(report.blob),
        signature=signature,
        content=content,
    )
    await node.stub.Contribute(request, metadata=node.metadata, timeout=240)


async def return_bundle(
    node: WireNode, work: node_pb2.WorkAssignment, bundle: Bundle, items: list[Any]
) -> None:
    """Do a bundle and return it, signed."""
    content = result_bytes(bundle, items)
    report = report_of(bundle, content)
    await send_blob(node, work, content)
    await contribute(node, work, report, result_signature(node, work, report))
