import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest

from hypergpu.ids import JobId
from hypergpu.jobfile.spec import CodecChoice, JobSpec, TrainingSettings
from hypergpu.v1 import node_pb2, tensor_pb2
from netsim.proxy.proxies import Proxies
from tests.integration.netsim.proxied import link, plan
from tests.node_client import (
    CHUNK_BYTES,
    NOBODY_LOST,
    WireNode,
    async_stub,
    next_assignment,
    reason_of,
)
from tests.processes import Cluster

PARAMETERS = 1 << 20
UPDATE_BYTES = 4 * PARAMETERS
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=3, inner_steps=1, nodes=1),
    codec=CodecChoice("fp32", "fp32"),
)


class UpdateSubmission:
    """A node with one assignment of a job, ready to submit."""

    def __init__(
        self,
        cluster: Cluster,
        node: WireNode,
        stream: AsyncIterator[node_pb2.ControlResponse],
        assignment: node_pb2.Assignment,
    ) -> None:
        self.cluster = cluster
        self.node = node
        self.stream = stream
        self.job_id = JobId(assignment.lease.job_id)
        self.assignment = assignment
        self.update = np.full(PARAMETERS, 0.25, np.float32).tobytes()

    async def expect_rejection(
        self, header: node_pb2.UpdateHeader, update: bytes | None = None
    ) -> str:
        """Why a submission is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await self.node.submit(header, self.update if update is None else update)
        return reason_of(broken.value)

    def header(self, **changes: object) -> node_pb2.UpdateHeader:
        """A right header with some fields changed after it was signed."""
        header = self.node.header(self.assignment, self.update)
        for name, value in changes.items():
            setattr(header, name, value)
        return header


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("admission")
    with Cluster(folder, "--read-timeout-ms", "4000", *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture
async def submission(cluster: Cluster) -> AsyncIterator[UpdateSubmission]:
    node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await node.join(cluster.coordinator.node_token())
    stream = node.control([("null", 1)])
    job_id = cluster.submit(SPEC)
    yield UpdateSubmission(cluster, node, stream, await next_assignment(stream))
    await node.close()
    with cluster.coordinator.client() as client:
        client.stop(job_id)


async def test_a_right_update_is_accepted_and_its_round_closes(
    submission: UpdateSubmission,
) -> None:
    answer = await submission.node.submit(submission.header(), submission.update)

    assert answer.committed_offset == UPDATE_BYTES
    recorded = submission.cluster.wait_for(
        submission.job_id, lambda happening: happening.kind == "RoundRecorded"
    )
    assert recorded.fields["bytes_up"] == UPDATE_BYTES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job_id": "job-000000000000"}, "JOB_UNKNOWN"),
        ({"number": 999}, "LEASE_STALE"),
        ({"round": 1}, "UPDATE_LATE"),
    ],
)
async def test_an_update_under_another_lease_is_refused(
    submission: UpdateSubmission, changes: dict[str, object], reason: str
) -> None:
    for name, value in changes.items():
        setattr(submission.assignment.lease, name, value)
    assert await submission.expect_rejection(submission.header()) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size_bytes": 10}, "UPDATE_TOO_LARGE"),
        ({"offset": CHUNK_BYTES}, "OFFSET_MISMATCH"),
    ],
)
async def test_a_header_that_does_not_fit_is_refused(
    submission: UpdateSubmission, changes: dict[str, object], reason: str
) -> None:
    assert await submission.expect_rejection(submission.header(**changes)) == reason


async def test_a_signature_over_something_else_is_refused(submission: UpdateSubmission) -> None:
    other = submission.header()
    assert await submission.expect_rejection(submission.header(signature=other.signature)) == (
        "SIGNATURE_INVALID"
    )


async def test_after_a_kill_a_nonce_stays_used_and_a_broken_upload_goes_on(
    submission: UpdateSubmission,
) -> None:
    node, header = submission.node, submission.header()
    await node.submit(header, submission.update, stop_at=5 * CHUNK_BYTES)

    assert await submission.expect_rejection(header) == "NONCE_REPLAYED"
    submission.cluster.coordinator.kill()
    submission.cluster.coordinator.start()
    await node.channel.channel_ready()
    assert await submission.expect_rejection(header) == "NONCE_REPLAYED"
    again = submission.header(offset=5 * CHUNK_BYTES)
    assert (await node.submit(again, submission.update)).committed_offset == UPDATE_BYTES


async def test_a_value_that_is_not_finite_is_refused(submission: UpdateSubmission) -> None:
    values = np.zeros(PARAMETERS, np.float32)
    values[PARAMETERS // 2] = np.inf
    submission.update = values.tobytes()

    assert await submission.expect_rejection(submission.header()) == "UPDATE_NOT_FINITE"
    assert submission.cluster.job(submission.job_id).job.updates_rejected == 1


async def test_bytes_that_are_not_the_declared_ones_are_refused(
    submission: UpdateSubmission,
) -> None:
    other = bytes(UPDATE_BYTES)
    assert await submission.expect_rejection(submission.header(), other) == "DIGEST_MISMATCH"


async def test_a_broken_upload_goes_on_at_its_committed_offset(
    submission: UpdateSubmission,
) -> None:
    node, update = submission.node, submission.update
    header = submission.header()
    partial = await node.submit(header, update, stop_at=3 * CHUNK_BYTES)

    assert partial.committed_offset == 3 * CHUNK_BYTES
    assert (await node.query(header)).committed_offset == 3 * CHUNK_BYTES
    again = submission.header(offset=3 * CHUNK_BYTES)
    assert (await node.submit(again, update)).committed_offset == UPDATE_BYTES


async def test_an_accepted_update_sent_again_is_accepted_and_counted_once(
    submission: UpdateSubmission,
) -> None:
    await submission.node.submit(submission.header(), submission.update)
    again = submission.header()

    assert (await submission.node.query(again)).is_accepted
    answer = await submission.node.submit(again, submission.update)
    assert answer.committed_offset == UPDATE_BYTES
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 1


async def test_the_same_bytes_count_again_under_the_lease_of_the_next_round(
    submission: UpdateSubmission,
) -> None:
    await submission.node.submit(submission.header(), submission.update)
    submission.assignment = await next_assignment(submission.stream)
    again = submission.header()

    assert not (await submission.node.query(again)).is_accepted
    await submission.node.submit(again, submission.update)
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 2


async def test_a_silent_upload_is_closed(submission: UpdateSubmission) -> None:
    async def half() -> AsyncIterator[node_pb2.SubmitUpdateRequest]:
        yield node_pb2.SubmitUpdateRequest(header=submission.header())
        chunk = tensor_pb2.Chunk(payload=submission.update[:CHUNK_BYTES])
        yield node_pb2.SubmitUpdateRequest(chunk=chunk)
        await asyncio.Event().wait()

    call = submission.node.stub.SubmitUpdate(half(), metadata=submission.node.metadata, timeout=240)
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        await call
    assert reason_of(broken.value) == "STREAM_SILENT"


async def test_a_chunk_over_a_slow_line_may_take_longer_than_a_call(
    submission: UpdateSubmission,
) -> None:
    update = submission.update
    await submission.node.submit(submission.header(), update, stop_at=7 * CHUNK_BYTES)
    node_port = int(submission.cluster.coordinator.node_address.rpartition(":")[2])
    async with Proxies(plan(node_port, node=link(1, 0.8))) as proxies:
        host, port = proxies.address("node")
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            submission.node.stub = async_stub(channel)
            again = submission.header(offset=7 * CHUNK_BYTES)
            answer = await submission.node.submit(again, update)
    assert answer.is_accepted


async def test_a_model_is_served_from_an_offset(submission: UpdateSubmission) -> None:
    model = submission.assignment.model.blob
    whole = await submission.node.fetch(model.digest)

    assert len(whole) == model.size_bytes
    offset = CHUNK_BYTES + 17
    assert await submission.node.fetch(model.digest, offset) == whole[offset:]


async def test_a_blob_of_nobody_is_not_served(submission: UpdateSubmission) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        await submission.node.fetch(tensor_pb2.Digest(value=bytes(32)))
    assert reason_of(broken.value) == "BLOB_UNKNOWN"


async def test_the_same_work_is_assigned_again_to_a_node_that_dials_in_again(
    submission: UpdateSubmission,
) -> None:
    again = await next_assignment(submission.node.control([("null", 1)]))
    assert again.lease == submission.assignment.lease


async def test_a_lease_that_is_not_current_is_cancelled_when_its_node_dials_in(
    submission: UpdateSubmission,
) -> None:
    void = node_pb2.Lease(job_id=submission.job_id, round=0, number=999)
    stream = submission.node.control([("null", 1)], working=[void])

    while not (message := await anext(stream)).HasField("cancel"):
        assert not message.HasField("assignment")
    assert message.cancel.lease == void
