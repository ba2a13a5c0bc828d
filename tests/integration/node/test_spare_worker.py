"""A worker in reserve: it takes the next job, and no process works for two jobs."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from gpu_node.core.events import NodeEvent, TrainingFinished, TrainingProgressed, WorkerReady
from gpu_node.core.limits import OwnerLimits
from gpu_node.core.spares import FREE_BYTES, SPARE_BYTES, spare_refusal
from gpu_node.shell.owner.limits_file import watch_worker
from gpu_node.shell.worker.protocol import TrainShard
from gpu_node.shell.worker_host.spare import SpareWorker
from gpu_node.shell.worker_host.staging import Stage
from gpu_node.shell.worker_host.supervision import WorkerSupervisor
from gpu_node.shell.worker_host.worker_process import WorkerLaunch
from hypergpu.ids import JobId
from hypergpu.process import memory_of
from hypergpu.units import Bytes
from tests.conformance.worker_process import JOB, ShardKit, Subject
from tests.integration.node.fake_coordinator import state_paths_in

OTHER = JobId("job-000000000002")
COMMAND = (sys.executable, "-m", "gpu_node.shell.worker", "--kind", "numpy")


class SparedWorker:
    """A worker with a spare, and shards of two jobs."""

    def __init__(self, folder: Path) -> None:
        self.refusal = ""
        self.spare = SpareWorker(lambda: self.refusal)
        self.events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self.own_launches: dict[JobId, WorkerLaunch] = {}
        first, second = (WorkerLaunch(COMMAND, os.environ, str(folder / each)) for each in "ab")
        self.worker = WorkerSupervisor(
            first,
            report=self.events.put_nowait,
            launch_of=self.own_launches.get,
            spares=(self.spare, second),
        )
        self.kit = ShardKit(folder, Subject("numpy", "digits-softmax", {}))

    def request(self, job_id: JobId) -> TrainShard:
        request = self.kit.request(0, state=job_id)
        lease = replace(request.assignment.lease, job_id=job_id)
        return replace(request, assignment=replace(request.assignment, lease=lease))

    async def train(self, job_id: JobId) -> int:
        """Train a shard of the job; gives the id of the process that did."""
        await self.worker.begin_job(job_id)
        await self.worker.compute(self.request(job_id))
        process_id = self.worker.process_id
        assert process_id is not None
        event: NodeEvent | None = None
        async with asyncio.timeout(240):
            while not isinstance(event, TrainingFinished):
                event = await self.events.get()
                assert isinstance(event, TrainingFinished | TrainingProgressed | WorkerReady)
        return process_id

    async def spare_id(self) -> int:
        async with asyncio.timeout(240):
            return await self.spare.ready_process_id()


@pytest.fixture
async def in_reserve(tmp_path: Path) -> AsyncIterator[SparedWorker]:
    in_reserve = SparedWorker(tmp_path)
    yield in_reserve
    await in_reserve.worker.stop()
    assert in_reserve.spare.process_id is None


async def test_a_spare_takes_the_next_job_and_no_process_works_for_two(
    in_reserve: SparedWorker,
) -> None:
    first = await in_reserve.train(JOB)
    assert await in_reserve.train(JOB) == first
    ready, home = await in_reserve.spare_id(), in_reserve.spare.home
    await in_reserve.worker.begin_job(OTHER)
    # Nobody removes what its sandbox was started with before it has work.
    assert in_reserve.worker.clean_homes() == (home,)
    assert await in_reserve.train(OTHER) == ready
    assert home not in in_reserve.worker.clean_homes()
    assert not psutil.pid_exists(first)
    third = await in_reserve.spare_id()
    assert third not in {first, ready}
    # Its job comes back: the process that saw the other one is not asked again.
    assert await in_reserve.train(JOB) == third
    assert not psutil.pid_exists(ready)


async def test_a_spare_that_waits_takes_no_processor(in_reserve: SparedWorker) -> None:
    await in_reserve.train(JOB)
    spare = psutil.Process(await in_reserve.spare_id())
    before = spare.cpu_times()
    await in_reserve.train(JOB)
    after = spare.cpu_times()
    assert (after.user, after.system) == (before.user, before.system)


async def test_a_job_whose_worker_sees_a_folder_of_its_own_gets_no_spare(
    in_reserve: SparedWorker,
) -> None:
    await in_reserve.train(JOB)
    ready = await in_reserve.spare_id()
    in_reserve.own_launches[OTHER] = WorkerLaunch(COMMAND, {**os.environ, "HYPERGPU_OWN": "1"}, "")
    assert await in_reserve.train(OTHER) != ready


async def test_a_spare_ends_where_there_is_no_more_room_for_it(in_reserve: SparedWorker) -> None:
    await in_reserve.train(JOB)
    process = psutil.Process(await in_reserve.spare_id())
    in_reserve.refusal = "the machine is short of memory"
    await in_reserve.train(JOB)
    await asyncio.to_thread(psutil.wait_procs, [process], timeout=60)
    assert in_reserve.spare.process_id is None


async def test_the_spare_ends_before_a_worker_that_needs_its_memory(
    in_reserve: SparedWorker,
) -> None:
    worker = await in_reserve.train(JOB)
    process = psutil.Process(await in_reserve.spare_id())
    limits = OwnerLimits(memory_bytes=Bytes(memory_of(worker) + memory_of(process.pid) // 2))
    end_reasons: list[str] = []
    watch_task = asyncio.create_task(
        watch_worker(
            limits,
            lambda: worker,
            lambda: 0,
            lambda reason, _: end_reasons.append(reason),
            spare=in_reserve.spare,
        )
    )
    await asyncio.to_thread(psutil.wait_procs, [process], timeout=60)
    watch_task.cancel()
    assert end_reasons == []
    assert psutil.pid_exists(worker)


def test_a_cleared_stage_leaves_the_home_of_the_spare(tmp_path: Path) -> None:
    with state_paths_in(tmp_path) as paths:
        for folder in (paths.scratch, paths.second_scratch):
            (folder / "left").write_text("x")
        Stage(paths, lambda: (str(paths.second_scratch),)).clear()
        assert not (paths.scratch / "left").exists()
        assert (paths.second_scratch / "left").exists()


@pytest.mark.parametrize(
    ("limit_bytes", "worker_bytes", "available_bytes", "reason"),
    [
        (0, 10**12, SPARE_BYTES + FREE_BYTES, ""),
        (0, 0, SPARE_BYTES + FREE_BYTES - 1, "the machine is short of memory"),
        (2 * SPARE_BYTES, SPARE_BYTES, 10**12, ""),
        (
            2 * SPARE_BYTES,
            SPARE_BYTES + 1,
            10**12,
            "it does not fit into the memory that the owner allows",
        ),
    ],
)
def test_a_spare_stays_within_the_memory_of_owner_and_machine(
    limit_bytes: int, worker_bytes: int, available_bytes: int, reason: str
) -> None:
    assert reason == spare_refusal(
        limit_bytes=limit_bytes, worker_bytes=worker_bytes, available_bytes=available_bytes
    )
