"""A coordinator whose table has one more entry: its jobs are made, shown, done and removed."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.packed_work import PackedWork, pack_work, unpack_work
from hypergpu.units import Milliseconds
from hypergpu.user.client.blocking import wait_for
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.work import work_assignment_value, work_message
from tests.kinds.coordinator import MODULE
from tests.kinds.echo.core.state import KIND, VERSION, EchoItem, EchoRequest
from tests.node_client import NOBODY_LOST, WireNode, next_assignment, reason_of
from tests.processes import Cluster

WORKLOADS = [(KIND, VERSION), ("null", 1)]
WAITS = JobSpec(workload="null", training=TrainingSettings(nodes=7))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("echo"), *NOBODY_LOST)
    cluster.coordinator.module = MODULE
    with cluster:
        yield cluster


@pytest.fixture
async def node(cluster: Cluster) -> AsyncIterator[WireNode]:
    coordinator = cluster.coordinator
    node = WireNode(coordinator.address, coordinator.node_address)
    await node.join(coordinator.node_token())
    yield node
    await node.close()


def create(cluster: Cluster, work: PackedWork, request_id: str = "") -> str:
    """A job of packed work."""
    request = job_pb2.CreateJobRequest(
        work=work_message(work), request_id=request_id or uuid.uuid4().hex
    )
    with cluster.client() as client:
        client_ = client.asynchronous
        return str(wait_for(client_._call(client_._jobs.CreateJob, request)).job_id)


def items(*texts: str, limit_ms: int = 60_000) -> PackedWork:
    """What a user asks for."""
    return pack_work(KIND, EchoRequest(texts, Milliseconds(limit_ms)))


async def next_work(stream: AsyncIterator[node_pb2.ControlResponse]) -> node_pb2.WorkAssignment:
    """The next item on a control stream."""
    async with asyncio.timeout(60):
        async for message in stream:
            if message.HasField("work_assignment"):
                return message.work_assignment
    raise AssertionError("the stream ended without an item")


async def next_cancel(stream: AsyncIterator[node_pb2.ControlResponse]) -> node_pb2.Cancel:
    """The next void lease on a control stream."""
    async with asyncio.timeout(60):
        async for message in stream:
            if message.HasField("cancel"):
                return message.cancel
    raise AssertionError("the stream ended without a cancel")


async def give_back(
    node: WireNode, work: node_pb2.WorkAssignment, result: PackedWork | None = None
) -> None:
    """Send an item back, as it came unless told otherwise."""
    result = result or work_assignment_value(work).work
    request = node_pb2.ContributeRequest(lease=work.lease, result=work_message(result))
    await node.stub.Contribute(request, metadata=node.metadata, timeout=240)


async def test_a_job_ends_once_every_item_is_back(cluster: Cluster, node: WireNode) -> None:
    job_id = create(cluster, items("first", "second"))
    stream = node.control(WORKLOADS)
    for text in ("first", "second"):
        work = await next_work(stream)
        assert unpack_work(work_assignment_value(work).work, KIND, EchoItem).text == text
        await give_back(node, work)
    job = cluster.wait_until_finished(job_id)
    assert (job.phase, job.name, job.reason) == ("finished", KIND, "every item is back")
    async for message in stream:
        if message.HasField("release"):
            assert message.release.job_id == job_id
            break


async def test_a_result_that_is_sent_again_is_accepted_once(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, items("first", "second"))
    stream = node.control(WORKLOADS)
    work = await next_work(stream)
    await give_back(node, work)
    await give_back(node, work)
    await give_back(node, await next_work(stream))
    cluster.wait_until_finished(job_id)
    returns = [each for each in cluster.events(job_id) if each.kind == "ItemReturned"]
    assert [each.fields["number"] for each in returns] == [0, 1]


async def test_results_that_are_not_the_leases_are_refused_with_the_reason(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, items("first"))
    work = await next_work(node.control(WORKLOADS))
    wrong = {
        "another": pack_work(KIND, EchoItem(0, "another")),
        "malformed": PackedWork(KIND, b"\xc1"),
        "of kind 'other'": PackedWork("other", b""),
        "65537 bytes": PackedWork(KIND, bytes(65_537)),
    }
    for reason, result in wrong.items():
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as refusal:
            await give_back(node, work, result)
        assert reason_of(refusal.value) == "REQUEST_INVALID"
    void = node_pb2.WorkAssignment()
    void.CopyFrom(work)
    void.lease.number += 1
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await give_back(node, void)
    assert reason_of(refusal.value) == "LEASE_STALE"
    await give_back(node, work)
    assert cluster.wait_until_finished(job_id).phase == "finished"


async def test_an_item_that_is_handed_back_goes_to_another_node(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, items("first"))
    work = await next_work(node.control(WORKLOADS))
    coordinator = cluster.coordinator
    other = WireNode(coordinator.address, coordinator.node_address)
    await other.join(coordinator.node_token())
    stream = other.control(WORKLOADS)
    await asyncio.to_thread(
        cluster.wait_for,
        job_id,
        lambda each: each.kind == "NodeJoined" and each.fields["node"] == other.node_id,
    )
    back = node_pb2.HandBack(lease=work.lease, reason="too hot")
    node.say(node_pb2.ControlRequest(hand_back=back))
    again = await next_work(stream)
    assert again.lease.round == work.lease.round
    assert again.lease.number > work.lease.number
    await give_back(other, again)
    await other.close()
    cluster.wait_until_finished(job_id)
    reasons = [each.fields.get("reason") for each in cluster.events(job_id)]
    assert "too hot" in reasons


async def test_a_lease_ends_when_its_time_is_over(cluster: Cluster, node: WireNode) -> None:
    job_id = create(cluster, items("first", limit_ms=300))
    stream = node.control(WORKLOADS)
    work = await next_work(stream)
    assert (await next_cancel(stream)).lease == work.lease
    again = await next_work(stream)
    assert again.lease.number > work.lease.number
    with cluster.client() as client:
        client.stop(job_id)


async def test_a_paused_job_takes_its_items_back(cluster: Cluster, node: WireNode) -> None:
    job_id = create(cluster, items("first"))
    stream = node.control(WORKLOADS)
    work = await next_work(stream)
    with cluster.client() as client:
        client.pause(job_id)
        assert (await next_cancel(stream)).lease == work.lease
        assert client.job(job_id).job.phase == "paused"
        client.resume(job_id)
        assert (await next_work(stream)).lease.number > work.lease.number
        client.stop(job_id)
        assert client.job(job_id).job.phase == "stopped"


async def test_a_node_that_dials_in_again_is_told_its_item_again(
    cluster: Cluster, node: WireNode
) -> None:
    job_id = create(cluster, items("first"))
    work = await next_work(node.control(WORKLOADS))
    assert await next_work(node.control(WORKLOADS)) == work
    stale = node_pb2.Lease(job_id=job_id, number=work.lease.number + 7)
    session = node.control(WORKLOADS, working=[work.lease, stale])
    assert (await next_cancel(session)).lease == stale
    await give_back(node, work)
    assert cluster.wait_until_finished(job_id).phase == "finished"


async def test_nodes_work_for_jobs_of_both_kinds_and_only_for_those_they_can(
    cluster: Cluster, node: WireNode
) -> None:
    echo = create(cluster, items("first"))
    spec = JobSpec(workload="null", training=TrainingSettings(rounds=1, inner_steps=1, nodes=1))
    training = cluster.submit(spec)
    older = node.control([("null", 1)])
    assert (await next_assignment(older)).lease.job_id == training
    with cluster.client() as client:
        client.stop(training)
        (job_view,) = [job for job in client.jobs() if job.id == echo]
        assert job_view.phase == "working"
    stream = node.control(WORKLOADS)
    assert (await next_work(stream)).lease.job_id == echo
    with cluster.client() as client:
        (view,) = [each for each in client.nodes() if each.id == node.node_id]
        assert (view.state, view.job) == ("working", echo)
        client.stop(echo)


async def test_a_training_job_takes_no_packed_work(cluster: Cluster, node: WireNode) -> None:
    job_id = cluster.submit(WAITS)
    lease = node_pb2.Lease(job_id=job_id, number=1)
    with pytest.raises(grpc.aio.AioRpcError, match="takes no packed work"):
        await give_back(node, node_pb2.WorkAssignment(lease=lease), PackedWork(KIND, b""))
    foreign_lease = node_pb2.Lease(job_id="job-000000000000", number=1)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await give_back(node, node_pb2.WorkAssignment(lease=foreign_lease), PackedWork(KIND, b""))
    assert reason_of(refusal.value) == "JOB_UNKNOWN"
    with cluster.client() as client:
        client.stop(job_id)


def test_a_request_makes_one_job_and_only_of_a_kind_that_is_there(cluster: Cluster) -> None:
    request_id = uuid.uuid4().hex
    job_id = create(cluster, items("first"), request_id)
    assert create(cluster, items("first"), request_id) == job_id
    with pytest.raises(HyperGPUError, match="which differs"):
        create(cluster, items("second"), request_id)
    with pytest.raises(HyperGPUError, match="no packed work of kind 'other'"):
        create(cluster, PackedWork("other", b""))
    with pytest.raises(HyperGPUError, match="no packed work of kind 'training'"):
        create(cluster, PackedWork("training", b""))
    with pytest.raises(HyperGPUError, match="at least one item"):
        create(cluster, items())
    with pytest.raises(HyperGPUError, match="malformed"):
        create(cluster, PackedWork(KIND, b"\x90"))
    with cluster.client() as client:
        client.stop(job_id)


def test_an_ended_job_is_removed_and_one_of_another_kind_is_no_training(cluster: Cluster) -> None:
    job_id = create(cluster, items("first"))
    with cluster.client() as client:
        with pytest.raises(HyperGPUError, match="is working: stop it first"):
            client.remove(job_id)
        with pytest.raises(HyperGPUError, match="is a job of kind echo"):
            client.set_parameters(job_id, {"training.rounds": "3"})
        client.stop(job_id)
        client.remove(job_id)
        assert job_id not in {job.id for job in client.jobs()}


def test_a_coordinator_without_the_kind_lets_its_jobs_rest(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, *NOBODY_LOST)
    cluster.coordinator.module = MODULE
    with cluster:
        job_id = create(cluster, items("first"))
        cluster.coordinator.end()
        cluster.coordinator.module = "coordinator"
        cluster.coordinator.start()
        with cluster.client() as client:
            (job_view,) = client.jobs()
            assert (job_view.id, job_view.phase) == (job_id, "unreadable")
        cluster.coordinator.end()
        cluster.coordinator.module = MODULE
        cluster.coordinator.start()
        assert cluster.job(job_id).job.phase == "working"
