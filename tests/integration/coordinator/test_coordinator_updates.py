import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import grpc
import numpy as np
import pytest
from yarl import URL

from hypergpu.ids import JobId
from hypergpu.jobfile.spec import CodecChoice, JobSpec, TrainingSettings
from hypergpu.v1 import node_pb2, tensor_pb2
from tests.node_client import NOBODY_LOST, WireNode, next_assignment, put_range, reason_of
from tests.processes import Cluster

PARAMETERS = 1 << 20
UPDATE_BYTES = 4 * PARAMETERS
PART = UPDATE_BYTES // 4
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
        self, offer: node_pb2.OfferUpdateRequest, update: bytes | None = None
    ) -> str:
        """Why an update is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await self.node.submit(offer, self.update if update is None else update)
        return reason_of(failure.value)

    def offer(self, **changes: object) -> node_pb2.OfferUpdateRequest:
        """A right offer with some fields changed after it was signed."""
        offer = self.node.offer(self.assignment, self.update)
        for name, value in changes.items():
            setattr(offer, name, value)
        return offer

    async def missing(self) -> list[tuple[int, int]]:
        """The ranges that a fresh offer is told to send."""
        answer = await self.node.send_offer(self.offer())
        return [(each.start, each.end) for each in answer.ticket.ranges]

    async def bring(self, start: int, end: int) -> None:
        """Send some of the update under a fresh offer."""
        answer = await self.node.send_offer(self.offer())
        ticket_range = answer.ticket.ranges[0]
        assert await put_range(ticket_range, start, self.update[start:end]) == (204, "")

    async def restart(self) -> None:
        """Kill the coordinator and start it again."""
        self.cluster.coordinator.kill()
        self.cluster.coordinator.start()
        await self.node.channel.channel_ready()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("admission")
    with Cluster(folder, *NOBODY_LOST) as cluster:
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
    await submission.node.submit(submission.offer(), submission.update)

    round_record = submission.cluster.wait_for(
        submission.job_id, lambda happening: happening.kind == "RoundRecorded"
    )
    assert round_record.fields["bytes_up"] == UPDATE_BYTES


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
    assert await submission.expect_rejection(submission.offer()) == reason


async def test_late_offers_again_and_again_are_journalled_once_a_round(
    submission: UpdateSubmission,
) -> None:
    lease, first = submission.assignment.lease, submission.assignment.lease.number
    lease.round += 1
    for number in range(5):
        lease.number = first + number
        assert await submission.expect_rejection(submission.offer()) == "UPDATE_LATE"
    assert submission.cluster.job(submission.job_id).job.updates_rejected == 1
    with submission.cluster.coordinator.client() as client:
        counts = {each.id: each.updates_rejected for each in client.nodes()}
    assert counts[submission.node.node_id] == 5


async def test_a_size_that_no_update_has_is_refused(submission: UpdateSubmission) -> None:
    offer = submission.offer(size_bytes=10)
    assert await submission.expect_rejection(offer) == "UPDATE_TOO_LARGE"


async def test_a_signature_over_something_else_is_refused(submission: UpdateSubmission) -> None:
    other = submission.offer()
    assert await submission.expect_rejection(submission.offer(signature=other.signature)) == (
        "SIGNATURE_INVALID"
    )


async def test_after_a_kill_nonces_stay_used_and_only_what_is_missing_is_sent(
    submission: UpdateSubmission,
) -> None:
    offer = submission.offer()
    await submission.node.send_offer(offer)
    assert await submission.expect_rejection(offer) == "NONCE_REPLAYED"
    await submission.bring(0, 2 * PART)
    await submission.bring(3 * PART, 3 * PART + 17)
    await submission.restart()

    assert await submission.expect_rejection(offer) == "NONCE_REPLAYED"
    gaps = [(2 * PART, 3 * PART), (3 * PART + 17, UPDATE_BYTES)]
    assert await submission.missing() == gaps
    await submission.node.submit(submission.offer(), submission.update)


async def test_what_was_whole_before_a_kill_is_accepted_for_an_offer_alone(
    submission: UpdateSubmission,
) -> None:
    await submission.bring(0, UPDATE_BYTES)
    await submission.restart()

    assert await submission.missing() == []
    await submission.node.commit(submission.offer())


async def test_ranges_come_in_any_order_and_may_overlap(submission: UpdateSubmission) -> None:
    answer = await submission.node.send_offer(offer := submission.offer())
    spans = [(PART, UPDATE_BYTES), (2, 2 * PART), (0, 5), (1, UPDATE_BYTES - 1)]
    (ticket_range,) = answer.ticket.ranges
    puts = [put_range(ticket_range, start, submission.update[start:end]) for start, end in spans]
    assert await asyncio.gather(*puts) == [(204, "")] * 4
    assert await submission.missing() == []
    await asyncio.gather(*(submission.node.commit(offer) for _ in range(3)))
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 1


async def test_an_update_with_a_gap_is_not_committed(submission: UpdateSubmission) -> None:
    await submission.bring(1, UPDATE_BYTES)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await submission.node.commit(submission.offer())
    assert reason_of(failure.value) == "OFFSET_MISMATCH"
    assert await submission.missing() == [(0, 1)]


async def test_bytes_come_after_the_commit_to_nobody(submission: UpdateSubmission) -> None:
    answer = await submission.node.send_offer(offer := submission.offer())
    (ticket_range,) = answer.ticket.ranges
    assert await put_range(ticket_range, 0, submission.update) == (204, "")
    await submission.node.commit(offer)
    status, _ = await put_range(ticket_range, 0, bytes(UPDATE_BYTES))
    assert status == 404
    round_record = submission.cluster.wait_for(
        submission.job_id, lambda happening: happening.kind == "RoundRecorded"
    )
    assert round_record.fields["bytes_up"] == UPDATE_BYTES


async def test_a_request_under_way_is_cut_off_by_the_commit(submission: UpdateSubmission) -> None:
    answer = await submission.node.send_offer(submission.offer())
    (ticket_range,) = answer.ticket.ranges

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(PART)
        await asyncio.Event().wait()

    url = URL(ticket_range.url).with_host("127.0.0.1")
    headers = {
        **ticket_range.headers,
        "Content-Range": f"bytes 0-{UPDATE_BYTES - 1}/*",
        "Content-Length": str(UPDATE_BYTES),
    }
    async with aiohttp.ClientSession() as session:
        put_task = asyncio.create_task(session.put(url, data=slow(), headers=headers).__aenter__())
        while (await submission.missing())[0][0] == 0:
            pass
        assert await put_range(ticket_range, 0, submission.update) == (204, "")
        await submission.node.commit(submission.offer())
        with pytest.raises(aiohttp.ClientError):
            await put_task


async def test_a_value_that_is_not_finite_is_refused(submission: UpdateSubmission) -> None:
    values = np.zeros(PARAMETERS, np.float32)
    values[PARAMETERS // 2] = np.inf
    submission.update = values.tobytes()

    assert await submission.expect_rejection(submission.offer()) == "UPDATE_NOT_FINITE"
    assert submission.cluster.job(submission.job_id).job.updates_rejected == 1


async def test_bytes_that_are_not_the_declared_ones_are_refused(
    submission: UpdateSubmission,
) -> None:
    other = bytes(UPDATE_BYTES)
    assert await submission.expect_rejection(submission.offer(), other) == "DIGEST_MISMATCH"


async def test_an_accepted_update_sent_again_is_accepted_and_counted_once(
    submission: UpdateSubmission,
) -> None:
    await submission.node.submit(submission.offer(), submission.update)
    again = submission.offer()

    assert (await submission.node.send_offer(again)).is_accepted
    await submission.node.commit(again)
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 1


async def test_the_same_bytes_count_again_under_the_lease_of_the_next_round(
    submission: UpdateSubmission,
) -> None:
    await submission.node.submit(submission.offer(), submission.update)
    submission.assignment = await next_assignment(submission.stream)
    await submission.node.submit(submission.offer(), submission.update)
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 2


async def test_a_model_is_served_from_an_offset(submission: UpdateSubmission) -> None:
    model = submission.assignment.model.blob
    whole = await submission.node.fetch(model.digest)

    assert len(whole) == model.size_bytes
    offset = PART + 17
    assert await submission.node.fetch(model.digest, offset) == whole[offset:]


async def test_a_blob_of_nobody_is_not_served(submission: UpdateSubmission) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await submission.node.fetch(tensor_pb2.Digest(value=bytes(32)))
    assert reason_of(failure.value) == "BLOB_UNKNOWN"


async def test_an_offer_is_committed_for_its_own_job_alone(submission: UpdateSubmission) -> None:
    await submission.bring(0, UPDATE_BYTES)
    offer = submission.offer()
    offer.lease.round += 1
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await submission.node.commit(offer)
    assert reason_of(failure.value) == "OFFSET_MISMATCH"
    other = submission.cluster.submit(SPEC)
    offer = submission.offer()
    offer.lease.job_id = other
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await submission.node.commit(offer)
    assert reason_of(failure.value) == "OFFSET_MISMATCH"
    with submission.cluster.coordinator.client() as client:
        client.stop(other)


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
