import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator

import aiohttp
import grpc
import numpy as np
import psutil
import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import CodecChoice, JobSpec, TrainingSettings
from hypergpu.part_file import Span
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.update_requests import PROTOCOL_HEADER, UPDATE_PATH, UpdateAnswer, answer_in
from tests.node_client import NOBODY_LOST, WireNode, next_assignment, reason_of
from tests.polling import first_true_of
from tests.processes import Cluster
from tests.warm_workers import UNFORKED

PARAMETERS = 1 << 20
UPDATE_BYTES = 4 * PARAMETERS
PART = UPDATE_BYTES // 4
BULK = "coordinator.shell.store.bulk"
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
        with pytest.raises(HyperGPUError) as failure:
            await self.node.submit(offer, self.update if update is None else update)
        return failure.value.reason.name

    async def wait_for_more(self, offer: node_pb2.OfferUpdateRequest, start: int) -> None:
        """Wait until bytes of an update from ``start`` on are there."""

        async def are_there() -> bool:
            return (await self.node.ask(offer)).missing[0].start != start

        await first_true_of(are_there)

    def offer(self, **changes: object) -> node_pb2.OfferUpdateRequest:
        """A right offer with some fields changed after it was signed."""
        offer = self.node.offer(self.assignment, self.update)
        for name, value in changes.items():
            setattr(offer, name, value)
        return offer

    async def missing(self) -> list[tuple[int, int]]:
        """The ranges that a fresh offer is told to send."""
        answer = await self.node.ask(self.offer())
        return [(each.start, each.end) for each in answer.missing]

    async def bring(self, start: int, end: int) -> UpdateAnswer:
        """Send some of the update under a fresh offer."""
        return await self.node.bring(self.offer(), start, self.update[start:end])

    async def kill_bulk_processes(self) -> None:
        """Kill those that take updates; the coordinator starts others."""
        coordinator = psutil.Process(self.cluster.coordinator.child.pid)
        processes = [each for each in coordinator.children() if BULK in each.cmdline()]
        assert processes
        for process in processes:
            process.kill()

    async def restart(self) -> None:
        """Kill the coordinator and start it again."""
        self.cluster.coordinator.kill()
        self.cluster.coordinator.start()
        self.node.bulk_port = self.cluster.coordinator.bulk_port
        await self.node.channel.channel_ready()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("admission")
    cluster = Cluster(folder, *NOBODY_LOST)
    cluster.coordinator.environment |= UNFORKED
    with cluster:
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
    await submission.node.ask(offer)
    await submission.bring(0, 2 * PART)
    assert await submission.expect_rejection(offer) == "NONCE_REPLAYED"
    await submission.bring(3 * PART, 3 * PART + 17)
    await submission.restart()

    assert await submission.expect_rejection(offer) == "NONCE_REPLAYED"
    gaps = [(2 * PART, 3 * PART), (3 * PART + 17, UPDATE_BYTES)]
    assert await submission.missing() == gaps
    await submission.node.submit(submission.offer(), submission.update)


async def test_what_came_before_a_kill_is_not_sent_again(submission: UpdateSubmission) -> None:
    await submission.bring(1, UPDATE_BYTES)
    await submission.restart()

    answer = await submission.bring(0, 1)
    assert answer == UpdateAnswer(is_accepted=True)


async def test_ranges_come_in_any_order_and_may_overlap_under_one_offer(
    submission: UpdateSubmission,
) -> None:
    offer = submission.offer()
    spans = [(PART, UPDATE_BYTES - 1), (2, 2 * PART), (0, 5), (1, UPDATE_BYTES - 1)]
    requests = [
        submission.node.bring(offer, start, submission.update[start:end]) for start, end in spans
    ]
    answers = await asyncio.gather(*requests)
    assert not any(answer.is_accepted for answer in answers)
    last = UPDATE_BYTES - 1
    assert await submission.node.ask(offer) == UpdateAnswer(missing=(Span(last, UPDATE_BYTES),))
    end = await submission.node.bring(offer, last, submission.update[last:])
    assert end == UpdateAnswer(is_accepted=True)
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 1


async def test_ranges_over_many_connections_are_accepted_once(
    submission: UpdateSubmission,
) -> None:
    offer, step = submission.offer(), UPDATE_BYTES // 16
    requests = [
        submission.node.bring(offer, start, submission.update[start : start + step])
        for start in range(0, UPDATE_BYTES, step)
    ]
    answers = await asyncio.gather(*requests)
    assert any(answer.is_accepted for answer in answers)
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 1


async def test_an_offer_ends_with_its_update(submission: UpdateSubmission) -> None:
    offer = submission.offer()
    await submission.node.submit(offer, submission.update)
    assert await submission.expect_rejection(offer, bytes(UPDATE_BYTES)) == "NONCE_REPLAYED"
    round_record = submission.cluster.wait_for(
        submission.job_id, lambda happening: happening.kind == "RoundRecorded"
    )
    assert round_record.fields["bytes_up"] == UPDATE_BYTES


async def test_a_request_under_way_is_cut_off_once_the_update_is_whole(
    submission: UpdateSubmission,
) -> None:
    offer = submission.offer()

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(PART)
        await asyncio.Event().wait()

    url = f"http://127.0.0.1:{submission.node.bulk_port}{UPDATE_PATH}"
    span = Span(0, UPDATE_BYTES)
    headers = submission.node.update_headers(offer, span) | {"Content-Length": str(UPDATE_BYTES)}
    async with aiohttp.ClientSession() as session:
        put_task = asyncio.create_task(session.put(url, data=slow(), headers=headers).__aenter__())
        await submission.wait_for_more(offer, 0)
        await submission.node.submit(offer, submission.update)
        with pytest.raises(aiohttp.ClientError):
            await put_task


async def test_bulk_processes_killed_in_the_middle_of_an_update_lose_no_range_of_it(
    submission: UpdateSubmission,
) -> None:
    offer = submission.offer()
    await submission.node.bring(offer, 0, submission.update[:PART])

    async def slow() -> AsyncIterator[bytes]:
        yield submission.update[PART : 2 * PART]
        await asyncio.Event().wait()

    url = f"http://127.0.0.1:{submission.node.bulk_port}{UPDATE_PATH}"
    span = Span(PART, UPDATE_BYTES)
    headers = submission.node.update_headers(offer, span)
    headers |= {"Content-Length": str(UPDATE_BYTES - PART)}
    async with aiohttp.ClientSession() as session:
        put_task = asyncio.create_task(session.put(url, data=slow(), headers=headers).__aenter__())
        await submission.wait_for_more(offer, PART)
        await submission.kill_bulk_processes()
        with pytest.raises(aiohttp.ClientError):
            await put_task
    ((start, _),) = await submission.missing()
    assert start >= PART
    await submission.node.submit(submission.offer(), submission.update)
    assert (await submission.node.ask(submission.offer())).is_accepted


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_byte_that_was_answered_for_is_asked_for_again_whatever_dies(
    submission: UpdateSubmission, seed: int
) -> None:
    dice = random.Random(seed)
    offer, answered_bytes = submission.offer(), np.zeros(UPDATE_BYTES, bool)

    async def bring_some(under: node_pb2.OfferUpdateRequest) -> bool:
        # The last bytes stay away, so that no request makes the update whole.
        start = dice.randrange(UPDATE_BYTES - PART)
        end = min(start + dice.randrange(1, PART), UPDATE_BYTES - 1)
        try:
            answer = await submission.node.bring(under, start, submission.update[start:end])
        except (aiohttp.ClientError, HyperGPUError):
            return False
        assert not answer.is_accepted
        answered_bytes[start:end] = True
        return True

    for death in (submission.kill_bulk_processes, submission.restart, None):
        requests = [asyncio.create_task(bring_some(offer)) for _ in range(4)]
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        if death is not None:
            await death()
        are_answered = await asyncio.gather(*requests)
        assert all(are_answered) or death is not None
        offer = submission.offer()
        missing_spans = (await submission.node.ask(offer)).missing
        assert missing_spans[-1].end == UPDATE_BYTES
        for span in missing_spans:
            assert not answered_bytes[span.start : span.end].any()
    assert answered_bytes.any()
    await submission.node.submit(submission.offer(), submission.update)
    assert (await submission.node.ask(submission.offer())).is_accepted
    assert submission.cluster.job(submission.job_id).job.updates_accepted == 1


async def test_an_update_is_refused_before_its_bytes_are_sent(
    submission: UpdateSubmission,
) -> None:
    offer = submission.offer(signature=bytes(65))
    headers = submission.node.update_headers(offer, Span(0, UPDATE_BYTES))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"PUT {UPDATE_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {UPDATE_BYTES}\r\n{lines}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", submission.node.bulk_port)
    writer.write(head.encode())
    answer_head = await reader.readuntil(b"\r\n\r\n")
    assert answer_head.startswith(b"HTTP/1.1 422")
    with pytest.raises(HyperGPUError, match="SIGNATURE_INVALID"):
        answer_in(await reader.read())
    writer.close()


async def test_an_update_has_to_come_later_while_the_coordinator_stands_still(
    submission: UpdateSubmission,
) -> None:
    process_id = submission.cluster.coordinator.child.pid
    os.kill(process_id, signal.SIGSTOP)  # Its bulk processes go on.
    try:
        assert await submission.expect_rejection(submission.offer()) == "NOT_READY"
    finally:
        os.kill(process_id, signal.SIGCONT)
    assert await submission.missing() == [(0, UPDATE_BYTES)]
    await submission.node.submit(submission.offer(), submission.update)


async def test_a_long_header_is_refused(submission: UpdateSubmission) -> None:
    url = f"http://127.0.0.1:{submission.node.bulk_port}{UPDATE_PATH}"
    offer = submission.node.update_headers(submission.offer())
    lines = {f"X-{number}": "x" * 3_000 for number in range(20)}
    for headers in ({**offer, "X-Long": "x" * (64 << 10)}, {**offer, **lines}):
        async with aiohttp.ClientSession() as session, session.put(url, headers=headers) as answer:
            assert answer.status == 400


async def test_a_call_for_a_ticket_is_told_where_updates_come_in(
    submission: UpdateSubmission,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await submission.node.stub.OfferUpdate(
            submission.offer(), metadata=submission.node.metadata, timeout=240
        )
    assert reason_of(failure.value) == "REQUEST_INVALID"


async def test_a_node_of_another_protocol_is_told_what_to_run(
    submission: UpdateSubmission,
) -> None:
    headers = submission.node.update_headers(submission.offer()) | {PROTOCOL_HEADER: "6"}
    with pytest.raises(HyperGPUError, match="pip install --upgrade hypergpu") as failure:
        await submission.node._put(headers, b"")
    assert failure.value.reason is Reason.VERSION_MISMATCH


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

    assert await submission.node.ask(again) == UpdateAnswer(is_accepted=True)
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
