"""Farm jobs at a real coordinator: sent, given out, returned, read, and removed."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpu_node.shell.worker.farm.checksum import item_checksum
from gpu_node.shell.worker.farm.chunk_items import TextItem
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_from_wire, digest_of, digest_to_wire
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundle_results import ItemResult, json_results, read_json_results
from hypergpu.units import Bytes
from hypergpu.user.client import Coordinator
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.v1 import farm_pb2, job_pb2, node_pb2, tensor_pb2
from hypergpu.wire.credentials import Role, parse_token
from hypergpu.wire.messages import blob_message
from tests.kinds.farm.requests import farm_request, item_chunks
from tests.kinds.farm.wire_bundles import (
    KIND,
    ask,
    contribute,
    create,
    next_bundle,
    report_of,
    result_bytes,
    return_bundle,
    send_blob,
)
from tests.node_client import NOBODY_LOST, WireNode, get_range, reason_of
from tests.processes import Cluster

ITEMS = [f"text {number}" for number in range(40)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("farm"), *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture
async def node(cluster: Cluster) -> AsyncIterator[WireNode]:
    coordinator = cluster.coordinator
    node = WireNode(coordinator.address, coordinator.node_address)
    await node.join(coordinator.node_token())
    yield node
    await node.close()


async def test_a_job_is_done_and_its_owner_reads_results_in_any_order_of_bundles(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, ITEMS, chunk_items=7)
    stream = node.control([(KIND, 1)])
    item_count = 0
    while item_count < len(ITEMS):
        work, bundle = await next_bundle(stream)
        assert {chunk.blob for chunk in bundle.chunks} == set(bundle.inputs)
        assert bundle.chunks[0].start <= bundle.start
        digest = tensor_pb2.Digest(value=digest_to_wire(bundle.chunks[0].blob.digest))
        assert digest_of(await node.fetch(digest)) == bundle.chunks[0].blob.digest
        await return_bundle(node, work, bundle, ITEMS)
        item_count += bundle.items
    job = cluster.wait_until_finished(job_id)
    assert (job.phase, job.reason) == ("finished", "every item is settled")
    answer = ask(cluster, "ListResults", farm_pb2.ListResultsRequest(job_id=job_id))
    assert answer.is_over
    assert (answer.items, answer.settled_items) == (40, 40)
    values: dict[int, Any] = {}
    for result in answer.results:
        request = farm_pb2.ResolveResultRequest(job_id=job_id, digest=result.blob.digest)
        (part,) = ask(cluster, "ResolveResult", request).ticket.ranges
        _, content = await get_range(part, 0, result.blob.size_bytes)
        for place, item in enumerate(read_json_results(content, result.items)):
            values[result.start + place] = item.value
    assert values == {
        number: item_checksum(TextItem(0, text), 1).value for number, text in enumerate(ITEMS)
    }
    summary = ask(cluster, "GetJob", job_pb2.GetJobRequest(job_id=job_id)).job.bundles
    assert (summary.items, summary.settled_items, summary.units, summary.unit) == (
        *(40, 40, 40),
        "items",
    )


async def test_a_result_whose_blob_was_not_sent_by_its_node_is_refused(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, ITEMS)
    work, bundle = await next_bundle(node.control([(KIND, 1)]))
    content = result_bytes(bundle, ITEMS)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await contribute(node, work, report_of(bundle, content))
    assert reason_of(refusal.value) == "OFFSET_MISMATCH"
    await send_blob(node, work, content)
    await contribute(node, work, report_of(bundle, content))
    answer = ask(cluster, "ListResults", farm_pb2.ListResultsRequest(job_id=job_id))
    assert [(each.start, each.items) for each in answer.results] == [(0, bundle.items)]
    ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))


async def test_results_that_are_not_what_they_say_are_refused_with_the_reason(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, ITEMS)
    work, bundle = await next_bundle(node.control([(KIND, 1)]))
    right = result_bytes(bundle, ITEMS)
    failed_lines = json_results([ItemResult(error="no")] * bundle.items)
    cases: list[tuple[bytes, dict[str, Any], str]] = [
        (b"{}\n", {}, "1 lines for 8 items"),
        (b"no json\n" * bundle.items, {}, "malformed"),
        (failed_lines, {}, "8 items of the result failed, not 0"),
        (right, {"items": 7, "failures": 1, "units": 7}, "0 items of the result failed, not 1"),
        (right, {"units": 0}, "8 items are so many units, not 0"),
    ]
    for content, changes, reason in cases:
        await send_blob(node, work, content)
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as refusal:
            await contribute(node, work, report_of(bundle, content, **changes))
        assert reason_of(refusal.value) == "REQUEST_INVALID"
    huge = BlobRef(digest_of(b"huge"), Bytes(1 << 40))
    request = node_pb2.OfferResultRequest(lease=work.lease, blob=blob_message(huge))
    with pytest.raises(grpc.aio.AioRpcError, match="at most"):
        await node.stub.OfferResult(request, metadata=node.metadata, timeout=240)
    void = node_pb2.WorkAssignment()
    void.CopyFrom(work)
    void.lease.number += 1
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await send_blob(node, void, right)
    assert reason_of(refusal.value) == "LEASE_STALE"
    ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))


async def test_a_node_fetches_the_blobs_of_its_own_bundle_alone(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, ITEMS, chunk_items=20)
    _, bundle = await next_bundle(node.control([(KIND, 1)]))
    assert [chunk.start for chunk in bundle.chunks] == [0]
    chunks, manifest = item_chunks(ITEMS, 20)
    for content in (chunks[1], manifest):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await node.resolve(tensor_pb2.Digest(value=digest_to_wire(digest_of(content))))
        assert reason_of(refusal.value) == "BLOB_UNKNOWN"
    ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))


def test_a_request_that_does_not_fit_its_manifest_is_refused(cluster: Cluster) -> None:
    with pytest.raises(HyperGPUError, match="the manifest has 40 items, the request 39"):
        create(cluster, ITEMS, items=39)
    with pytest.raises(HyperGPUError, match="above 0 where unit_price is"):
        create(cluster, ITEMS, unit_price=1_000)
    with pytest.raises(HyperGPUError, match="the price of one unit at least"):
        create(cluster, ITEMS, unit_price=1_000, budget=9)
    with pytest.raises(HyperGPUError, match="none is known"):
        create(cluster, ITEMS, unit_price=1_000, budget=1_000)
    missing_blob = BlobRef(digest_of(b"nobody sent this"), Bytes(16))
    with pytest.raises(HyperGPUError, match="1 of 2 files is missing"):
        create(cluster, ITEMS, files={"weights": missing_blob})


def test_items_that_another_user_sent_cannot_be_named(cluster: Cluster) -> None:
    job_id = create(cluster, ITEMS)
    with cluster.client() as operator:
        token = parse_token(operator.create_token(Role.USER, ttl_s=600, label="other").token)
        request = wait_for(farm_request(operator.asynchronous, ITEMS))
    target = ConnectionTarget(cluster.coordinator.address, token, 60.0)
    with Coordinator(target) as other:
        calls = other.asynchronous
        with pytest.raises(HyperGPUError, match="1 file is not this token's"):
            wait_for(calls._call(calls._jobs.CreateJob, request))
        results_request = farm_pb2.ListResultsRequest(job_id=job_id)
        with pytest.raises(HyperGPUError, match="ROLE_FORBIDDEN"):
            wait_for(calls._call(calls._jobs.ListResults, results_request))
    ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))


async def test_a_restarted_coordinator_knows_the_results_and_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        job_id = create(cluster, ITEMS)
        work, bundle = await next_bundle(node.control([(KIND, 1)]))
        await return_bundle(node, work, bundle, ITEMS)
        await node.close()
        coordinator.kill()
        coordinator.start()
        answer = ask(cluster, "ListResults", farm_pb2.ListResultsRequest(job_id=job_id))
        (result,) = answer.results
        assert digest_from_wire(result.blob.digest.value) == digest_of(result_bytes(bundle, ITEMS))
        assert not answer.is_over
        ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))
        ask(cluster, "RemoveJob", job_pb2.RemoveJobRequest(job_id=job_id))
        with pytest.raises(HyperGPUError, match="there is no job"):
            ask(cluster, "ListResults", farm_pb2.ListResultsRequest(job_id=job_id))


async def test_a_small_result_comes_beside_its_report_and_must_be_the_blob_that_it_names(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, ITEMS)
    work, bundle = await next_bundle(node.control([(KIND, 1)]))
    content = result_bytes(bundle, ITEMS)
    report = report_of(bundle, content)
    assert work.content_bytes_most >= len(content)
    other = content.replace(b"value", b"VALUE")
    for beside, reason in (
        (content[:-1], "REQUEST_INVALID"),
        (other, "DIGEST_MISMATCH"),
        (bytes(work.content_bytes_most + 1), "REQUEST_INVALID"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await contribute(node, work, report, content=beside)
        assert reason_of(refusal.value) == reason
    await contribute(node, work, report, content=content)
    answer = ask(cluster, "ListResults", farm_pb2.ListResultsRequest(job_id=job_id))
    assert [(each.start, each.items) for each in answer.results] == [(0, bundle.items)]
    request = farm_pb2.ResolveResultRequest(job_id=job_id, digest=answer.results[0].blob.digest)
    (part,) = ask(cluster, "ResolveResult", request).ticket.ranges
    _, stored_content = await get_range(part, 0, len(content))
    assert stored_content == content
    ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))
