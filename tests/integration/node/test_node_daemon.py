import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpu_node.config import Settings
from gpu_node.core.commands import Departure, Leave
from gpu_node.shell.runtime import Runtime
from gpu_node.shell.state.files import load_memory
from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.worker.messages import Ready
from hypergpu.catalogue.registry import build, find
from hypergpu.catalogue.workload import numpy_layout
from hypergpu.digest import digest_of, digest_to_wire
from hypergpu.ids import Digest, JobId
from hypergpu.layout import Flat
from hypergpu.token import Token
from hypergpu.units import Bytes
from hypergpu.v1 import node_pb2, tensor_pb2
from tests.integration.node.node_service import NodeService, Served, is_signed, places_in, served

JOB = JobId("job-000000000001")
OTHER_JOB = JobId("job-000000000002")
READY = Ready(
    device="cpu",
    device_name="",
    memory_bytes=Bytes(0),
    kind="numpy",
    workloads={"digits-softmax": 1},
)


def message_of(digest: Digest) -> tensor_pb2.Digest:
    return tensor_pb2.Digest(value=digest_to_wire(digest))


class Desk:
    """A service with a job to give, and a daemon that serves it."""

    def __init__(self, there: Served, folder: Path) -> None:
        self.there = there
        self.service: NodeService = there.service
        self.folder = folder
        self.settings = Settings(state_dir=folder / "node", worker="numpy", drain_limit_ms=20_000)
        self.layout = numpy_layout(build(find("digits-softmax"), {}))
        flat = Flat.empty(self.layout)
        flat.parameters[:] = 0
        self.model = there.service.put(flat.parameters.tobytes())
        self.runtime: Runtime | None = None

    @asynccontextmanager
    async def daemon(self, token: Token | None) -> AsyncIterator["asyncio.Task[Leave]"]:
        """A daemon over the desk's state folder; stopped at the end if it still runs."""
        with places_in(self.folder) as places:
            self.runtime = Runtime(self.settings, places, token=token)
            serving = asyncio.create_task(self.runtime.run(READY))
            yield serving
            self.runtime.stop("the test is over")
            await serving

    def assign(
        self,
        round_number: int,
        number: int,
        *,
        accepted: Digest | None = None,
        samples: int = 16,
        job: JobId = JOB,
    ) -> None:
        message = node_pb2.Assignment(
            lease=node_pb2.Lease(job_id=job, round=round_number, number=number),
            workload="digits-softmax",
            workload_version=1,
            training=node_pb2.Training(
                inner_steps=2, batch_size=8, learning_rate=0.01, codec="int8", schedule="constant"
            ),
            shard=node_pb2.Shard(
                partitions=1, ranges=[node_pb2.SampleRange(start=0, count=samples)]
            ),
            model=tensor_pb2.ModelRef(blob=self.model, layout=message_of(self.layout.digest)),
        )
        if accepted is not None:
            message.last_accepted.CopyFrom(message_of(accepted))
        self.service.to_say.put_nowait(node_pb2.ControlResponse(assignment=message))

    async def update(self) -> Digest:
        """The digest of the next update that arrives whole."""
        async with asyncio.timeout(60):
            return await self.service.arrived.get()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with served(tmp_path / "authority") as there:
        yield Desk(there, tmp_path)


async def test_a_daemon_joins_trains_and_sends_its_signed_update(desk: Desk) -> None:
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1)
        digest = await desk.update()
    assert digest == digest_of(desk.service.stored)
    with places_in(desk.folder) as places:
        node = identity_key(places).node_id
        (end,) = load_memory(places).ends(JOB)
    assert is_signed(node, desk.service.headers[-1])
    assert end.update.digest == digest


async def test_a_daemon_that_joined_once_needs_no_token_and_remembers_its_end_state(
    desk: Desk,
) -> None:
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1)
        first = await desk.update()
    desk.service.forget_said()
    async with desk.daemon(None):
        desk.assign(1, 2, accepted=first)
        await desk.update()
    with places_in(desk.folder) as places:
        before, after = load_memory(places).ends(JOB)
    assert before.is_accepted
    assert after.start.resume_from == 0
    assert not after.start.returns_update


async def test_work_done_once_is_only_sent_again_under_another_lease(desk: Desk) -> None:
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1)
        first = await desk.update()
        desk.service.accepted.clear()
        desk.service.stored.clear()
        desk.assign(0, 2)
        assert await desk.update() == first


async def test_a_shard_that_kills_its_worker_is_handed_back_and_the_next_job_is_trained(
    desk: Desk,
) -> None:
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1, samples=4_000_000)
        assert desk.runtime is not None
        for _ in range(4):
            await desk.service.next_said("progress")
            process_id = desk.runtime.worker_process_id
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)
        back = await desk.service.next_said("hand_back")
        desk.assign(0, 2, job=OTHER_JOB)
        await desk.update()
    assert back.reason == "the worker died 4 times: it was ended by SIGKILL"
    assert desk.service.headers[-1].lease.job_id == OTHER_JOB


async def test_a_worker_that_hangs_in_training_is_ended_and_started_again(desk: Desk) -> None:
    desk.settings = desk.settings.model_copy(update={"progress_limit_ms": 2_000})
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1, samples=400_000)
        await desk.service.next_said("progress")
        assert desk.runtime is not None
        process_id = desk.runtime.worker_process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        await desk.update()
        assert desk.runtime.worker_process_id not in {None, process_id}


async def test_a_worker_killed_in_training_is_started_again_and_finishes(desk: Desk) -> None:
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1, samples=400_000)
        await desk.service.next_said("progress")
        assert desk.runtime is not None
        process_id = desk.runtime.worker_process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGKILL)
        await desk.update()
        assert desk.runtime.worker_process_id not in {None, process_id}


async def test_a_drain_announces_itself_and_leaves_in_good_order(desk: Desk) -> None:
    async with desk.daemon(desk.there.token) as serving:
        desk.assign(0, 1)
        await desk.update()
        assert desk.runtime is not None
        desk.runtime.drain("SIGTERM")
        assert (await desk.service.next_said("draining")).reason == "SIGTERM"
        assert await serving == Leave(Departure.DRAINED, "SIGTERM")


async def test_work_that_cannot_be_had_is_handed_back_with_the_reason(desk: Desk) -> None:
    desk.service.blobs.clear()
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1)
        back = await desk.service.next_said("hand_back")
    assert back.lease.number == 1
    assert "BLOB_UNKNOWN" in back.reason


async def test_a_release_deletes_what_was_kept_for_the_job(desk: Desk) -> None:
    async with desk.daemon(desk.there.token):
        desk.assign(0, 1)
        await desk.update()
        release = node_pb2.Release(job_id=JOB, reason="over")
        desk.service.to_say.put_nowait(node_pb2.ControlResponse(release=release))
        desk.assign(0, 2, job=OTHER_JOB)
        await desk.update()
    assert [path.name for path in (desk.settings.state_dir / "jobs").iterdir()] == [OTHER_JOB]


async def test_an_unreachable_coordinator_is_dialled_until_it_is_there(desk: Desk) -> None:
    async with desk.daemon(desk.there.token):
        await desk.service.next_said("hello")
    address = desk.service.node_port
    await desk.there.server.stop(None)
    async with desk.daemon(None), served(desk.folder / "authority", address) as again:
        await again.service.next_said("hello")
