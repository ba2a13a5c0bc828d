"""Updates that come as stripes over several connections."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest

from hypergpu.ids import JobId
from hypergpu.jobfile.spec import CodecChoice, JobSpec, TrainingSettings
from hypergpu.streams import Stripe
from hypergpu.v1 import node_pb2
from tests.node_client import CHUNK_BYTES, NOBODY_LOST, WireNode, next_assignment, reason_of
from tests.processes import Cluster

PARAMETERS = 1 << 20
UPDATE_BYTES = 4 * PARAMETERS
STRIPES = 4
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=3, inner_steps=1, nodes=1),
    codec=CodecChoice("fp32", "fp32"),
)


class StripedSubmission:
    """A node with one assignment, and its update in stripes."""

    def __init__(self, cluster: Cluster, node: WireNode, assignment: node_pb2.Assignment) -> None:
        self.cluster = cluster
        self.node = node
        self.assignment = assignment
        self.job_id = JobId(assignment.lease.job_id)
        self.update = np.full(PARAMETERS, 0.25, np.float32).tobytes()

    def headers(self, nonce: int | None = None) -> list[node_pb2.UpdateHeader]:
        """One attempt: right headers of all its stripes, under one nonce."""
        signed = self.node.header(self.assignment, self.update, nonce=nonce)
        headers = []
        for index in range(STRIPES):
            header = node_pb2.UpdateHeader()
            header.CopyFrom(signed)
            header.stripe, header.stripes = index, STRIPES
            header.offset = Stripe(index, STRIPES).start(UPDATE_BYTES)
            headers.append(header)
        return headers

    async def submit(
        self, header: node_pb2.UpdateHeader, stop_at: int | None = None
    ) -> node_pb2.SubmitUpdateResponse:
        """Send a stripe."""
        if stop_at is None:
            stop_at = Stripe(header.stripe, header.stripes).end(UPDATE_BYTES)
        return await self.node.submit(header, self.update, stop_at=stop_at)

    async def expect_rejection(self, header: node_pb2.UpdateHeader) -> str:
        """Why a stripe is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await self.submit(header)
        return reason_of(broken.value)

    async def committed_offset(self) -> list[int]:
        """Up to where each stripe is stored."""
        return [(await self.node.query(each)).committed_offset for each in self.headers()]

    async def restart(self) -> None:
        """Kill the coordinator and start it again."""
        self.cluster.coordinator.kill()
        self.cluster.coordinator.start()
        await self.node.channel.channel_ready()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("stripes")
    with Cluster(folder, *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture
async def submission(cluster: Cluster) -> AsyncIterator[StripedSubmission]:
    node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await node.join(cluster.coordinator.node_token())
    stream = node.control([("null", 1)])
    job_id = cluster.submit(SPEC)
    yield StripedSubmission(cluster, node, await next_assignment(stream))
    await node.close()
    with cluster.coordinator.client() as client:
        client.stop(job_id)


async def test_stripes_at_once_are_one_update(submission: StripedSubmission) -> None:
    answers = await asyncio.gather(*(submission.submit(each) for each in submission.headers()))

    assert sorted(each.is_accepted for each in answers) == [False] * (STRIPES - 1) + [True]
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 1
    assert (await submission.node.query(submission.headers()[0])).is_accepted


async def test_an_update_is_accepted_with_its_last_stripe_whichever_that_is(
    submission: StripedSubmission,
) -> None:
    *others, last = reversed(submission.headers())
    for header in others:
        answer = await submission.submit(header)
        assert not answer.is_accepted
        assert answer.committed_offset == Stripe(header.stripe, STRIPES).end(UPDATE_BYTES)

    assert (await submission.submit(last)).is_accepted


async def test_after_a_kill_nonces_stay_used_and_only_what_is_missing_is_sent(
    submission: StripedSubmission,
) -> None:
    headers = submission.headers()
    await submission.submit(headers[0])
    await submission.submit(headers[2], stop_at=headers[2].offset + CHUNK_BYTES)
    await submission.restart()

    assert await submission.expect_rejection(headers[1]) == "NONCE_REPLAYED"
    ends = [Stripe(index, STRIPES).end(UPDATE_BYTES) for index in range(STRIPES)]
    held = await submission.committed_offset()
    assert held == [ends[0], ends[0], ends[1] + CHUNK_BYTES, ends[2]]
    again = submission.headers()
    for header, offset in zip(again, held, strict=True):
        header.offset = offset
    answers = [await submission.submit(each) for each in again[1:]]
    assert [each.is_accepted for each in answers] == [False, False, True]


async def test_what_was_whole_before_a_kill_is_accepted_for_a_header_alone(
    submission: StripedSubmission,
) -> None:
    headers = submission.headers()
    for header in headers[:-1]:
        await submission.submit(header)
    await submission.submit(headers[-1], stop_at=UPDATE_BYTES - 4)
    await submission.restart()
    again = submission.headers()
    again[-1].offset = UPDATE_BYTES - 4

    assert (await submission.submit(again[-1])).is_accepted


async def test_a_stripe_is_taken_once_under_its_nonce(submission: StripedSubmission) -> None:
    first, second, *_ = submission.headers()
    await submission.submit(first, stop_at=CHUNK_BYTES)

    assert await submission.expect_rejection(first) == "NONCE_REPLAYED"
    await submission.submit(second)
    assert await submission.expect_rejection(second) == "NONCE_REPLAYED"


async def test_a_nonce_is_good_for_no_other_claim_and_no_other_cut(
    submission: StripedSubmission,
) -> None:
    headers = submission.headers()
    await submission.submit(headers[0])
    headers[1].stripes = 2
    assert await submission.expect_rejection(headers[1]) == "NONCE_REPLAYED"
    headers[2].lease.number += 1
    assert await submission.expect_rejection(headers[2]) == "NONCE_REPLAYED"


async def test_a_stripe_of_an_older_attempt_is_a_replay(submission: StripedSubmission) -> None:
    older, newer = submission.headers(), submission.headers()
    await submission.submit(older[0])
    await submission.submit(newer[1])

    assert await submission.expect_rejection(older[2]) == "NONCE_REPLAYED"


@pytest.mark.parametrize(("stripe", "stripes"), [(4, 4), (1, 1), (0, 17), (0, 1 << 31)])
async def test_a_stripe_that_cannot_be_is_refused(
    submission: StripedSubmission, stripe: int, stripes: int
) -> None:
    header = submission.headers()[0]
    header.stripe, header.stripes = stripe, stripes
    assert await submission.expect_rejection(header) == "REQUEST_INVALID"
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        await submission.node.query(header)
    assert reason_of(broken.value) == "REQUEST_INVALID"


async def test_wrong_bytes_are_found_with_the_last_stripe(submission: StripedSubmission) -> None:
    headers = submission.headers()
    submission.update = bytes(UPDATE_BYTES)
    for header in headers[:-1]:
        await submission.submit(header)

    assert await submission.expect_rejection(headers[-1]) == "DIGEST_MISMATCH"
    assert submission.cluster.job(submission.job_id).job.updates_rejected == 1
