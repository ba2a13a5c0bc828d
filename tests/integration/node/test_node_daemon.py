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
from tests.integration.node.daemon_kit import JOB, OTHER_JOB, DaemonKit
from tests.integration.node.fake_coordinator import is_signed, serve, state_paths_in


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[DaemonKit]:
    async with serve(tmp_path / "authority") as there:
        yield DaemonKit(there, tmp_path)


async def test_a_daemon_joins_trains_and_sends_its_signed_update(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        work = kit.assign(0, 1)
        digest = await kit.update()
    assert digest == digest_of(kit.service.stored)
    with state_paths_in(kit.folder) as paths:
        node = identity_key(paths).node_id
        (end,) = load_memory(paths).rounds(JOB)
    assert is_signed(node, kit.service.headers[-1], assignment_value(work))
    assert end.update.digest == digest


async def test_a_daemon_that_joined_once_needs_no_token_and_remembers_its_end_state(
    kit: DaemonKit,
) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        first = await kit.update()
    kit.service.forget_said()
    async with kit.daemon(None):
        kit.assign(1, 2, accepted=first)
        await kit.update()
    with state_paths_in(kit.folder) as paths:
        before, after = load_memory(paths).rounds(JOB)
    assert before.is_accepted
    assert after.start.resume_from == 0
    assert not after.start.returns_update


async def test_work_done_once_is_only_sent_again_under_another_lease(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        first = await kit.update()
        kit.service.accepted.clear()
        kit.service.stored.clear()
        kit.assign(0, 2)
        assert await kit.update() == first


async def test_a_shard_that_kills_its_worker_is_handed_back_and_the_next_job_is_trained(
    kit: DaemonKit,
) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1, samples=4_000_000)
        assert kit.running is not None
        killed: set[int | None] = {None}
        while len(killed) <= 4:
            await kit.service.next_said("progress")
            process_id = kit.running.worker_process_id
            # What a worker said just before it was killed may be heard only now.
            if process_id is not None and process_id not in killed:
                os.kill(process_id, signal.SIGKILL)
                killed.add(process_id)
        back = await kit.service.next_said("hand_back")
        kit.assign(0, 2, job=OTHER_JOB)
        await kit.update()
    assert back.reason == "the worker died 4 times: it was ended by SIGKILL"
    assert kit.service.headers[-1].lease.job_id == OTHER_JOB


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_dies_or_hangs_in_training_is_started_again(
    kit: DaemonKit, number: signal.Signals
) -> None:
    kit.settings = kit.settings.model_copy(update={"progress_limit_ms": 8_000})
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1, samples=400_000)
        await kit.service.next_said("progress")
        assert kit.running is not None
        process_id = kit.running.worker_process_id
        assert process_id is not None
        os.kill(process_id, number)
        await kit.update()
        assert kit.running.worker_process_id not in {None, process_id}


async def test_a_drain_announces_itself_and_leaves_in_good_order(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token) as serving:
        kit.assign(0, 1)
        await kit.update()
        assert kit.running is not None
        kit.running.drain("SIGTERM")
        assert (await kit.service.next_said("draining")).reason == "SIGTERM"
        assert await serving == Leave(Departure.DRAINED, "SIGTERM")


async def test_work_that_cannot_be_had_is_handed_back_with_the_reason(kit: DaemonKit) -> None:
    kit.service.blobs.clear()
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        back = await kit.service.next_said("hand_back")
    assert back.lease.number == 1
    assert "BLOB_UNKNOWN" in back.reason


async def test_a_release_deletes_what_was_kept_for_the_job(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        await kit.update()
        release = node_pb2.Release(job_id=JOB, reason="over")
        kit.service.to_say.put_nowait(node_pb2.ControlResponse(release=release))
        kit.assign(0, 2, job=OTHER_JOB)
        await kit.update()
    assert [path.name for path in (kit.settings.state_dir / "jobs").iterdir()] == [OTHER_JOB]


async def test_an_unreachable_coordinator_is_dialled_until_it_is_there(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        await kit.service.next_said("hello")
    address = kit.service.node_port
    await kit.there.server.stop(None)
    async with kit.daemon(None), serve(kit.folder / "authority", address) as again:
        await again.service.next_said("hello")
