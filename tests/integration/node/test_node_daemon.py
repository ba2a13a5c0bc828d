import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_node.core.commands import Departure, Leave
from gpu_node.shell.state.files import load_memory
from gpu_node.shell.state.keys import identity_key
from hypergpu.digest import digest_of
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import assignment_value
from tests.integration.node.daemon_desk import JOB, OTHER_JOB, Desk
from tests.integration.node.node_service import is_signed, places_in, served


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with served(tmp_path / "authority") as there:
        yield Desk(there, tmp_path)


async def test_a_daemon_joins_trains_and_sends_its_signed_update(desk: Desk) -> None:
    async with desk.daemon(desk.there.token):
        work = desk.assign(0, 1)
        digest = await desk.update()
    assert digest == digest_of(desk.service.stored)
    with places_in(desk.folder) as places:
        node = identity_key(places).node_id
        (end,) = load_memory(places).ends(JOB)
    assert is_signed(node, desk.service.headers[-1], assignment_value(work))
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
        killed: set[int | None] = {None}
        while len(killed) <= 4:
            await desk.service.next_said("progress")
            process_id = desk.runtime.worker_process_id
            # What a worker said just before it was killed may be heard only now.
            if process_id is not None and process_id not in killed:
                os.kill(process_id, signal.SIGKILL)
                killed.add(process_id)
        back = await desk.service.next_said("hand_back")
        desk.assign(0, 2, job=OTHER_JOB)
        await desk.update()
    assert back.reason == "the worker died 4 times: it was ended by SIGKILL"
    assert desk.service.headers[-1].lease.job_id == OTHER_JOB


async def test_a_worker_that_hangs_in_training_is_ended_and_started_again(desk: Desk) -> None:
    desk.settings = desk.settings.model_copy(update={"progress_limit_ms": 8_000})
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
