"""A daemon's jobs from joining to signed updates, first models included."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from gpu_node.core.commands import Departure, Leave
from gpu_node.core.events import NodeEvent, WorkerDied
from gpu_node.shell.daemon.app import Daemon
from gpu_node.shell.daemon.machine import serve_machine
from gpu_node.shell.folder.state import identity_key, load_memory
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.inputs import InitialModels
from gpu_node.shell.worker.protocol import WorkerCapabilities, encode
from gpu_node.shell.worker_host.staging import Stage
from gpu_node.shell.worker_host.supervision import WorkerSupervisor
from gpu_node.shell.worker_host.worker_process import WorkerLaunch
from hypergpu.assignment import Assignment, InitialModel
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.frames import frame
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings
from hypergpu.tensors.codec import apply_delta, encode_update
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.messages import assignment_value, blob_value
from tests.integration.node.fake_coordinator import (
    JOB,
    OTHER_JOB,
    DaemonKit,
    is_signed,
    message_of,
    serve,
    state_paths_in,
)
from tests.processes import Cluster, json_lines
from tests.unit.node.node_states import assignment


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
    assert is_signed(node, kit.service.offers[-1], assignment_value(work))
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


async def test_a_model_is_fetched_by_the_ticket_of_its_assignment(kit: DaemonKit) -> None:
    kit.service.assigns_tickets = True
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        await kit.update()
    # The update's alone.
    assert kit.service.tickets == 0


async def test_a_model_that_comes_beside_its_assignment_costs_no_request(kit: DaemonKit) -> None:
    kit.service.blob_beside = kit.service.blobs[blob_value(kit.model).digest]
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        await kit.update()
    # The update's alone.
    assert (kit.service.tickets, kit.service.asked_bytes) == (0, 0)


async def test_a_model_that_comes_damaged_beside_its_assignment_is_fetched(kit: DaemonKit) -> None:
    kit.service.blob_beside = b"x" + kit.service.blobs[blob_value(kit.model).digest][1:]
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        await kit.update()
    assert (kit.service.tickets, kit.service.asked_bytes) == (1, kit.model.size_bytes)


async def test_a_fetch_that_broke_asks_for_a_ticket_of_its_own(kit: DaemonKit) -> None:
    kit.service.assigns_tickets = True
    kit.service.break_after_bytes = 0
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        await kit.update()
    assert kit.service.tickets == 1


async def test_work_done_once_is_only_sent_again_under_another_lease(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        first = await kit.update()
        kit.service.accepted.clear()
        kit.service.offered = b""
        kit.assign(0, 2)
        assert await kit.update() == first


async def test_a_shard_that_kills_its_worker_is_handed_back_and_the_next_job_is_trained(
    kit: DaemonKit,
) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1, samples=4_000_000)
        assert kit.running is not None
        killed_ids: set[int | None] = {None}
        while len(killed_ids) <= 4:
            await kit.training_progress()
            process_id = kit.running.worker_process_id
            # What a worker said just before it was killed may be heard only now.
            if process_id is not None and process_id not in killed_ids:
                kit.signal_worker(signal.SIGKILL)
                killed_ids.add(process_id)
        back = await kit.service.next_said("hand_back")
        kit.assign(0, 2, job=OTHER_JOB)
        await kit.update()
    assert back.reason == "the worker died 4 times: it was ended by SIGKILL"
    assert kit.service.offers[-1].lease.job_id == OTHER_JOB


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_dies_or_hangs_in_training_is_started_again(
    kit: DaemonKit, number: signal.Signals
) -> None:
    kit.settings = kit.settings.model_copy(update={"progress_limit_ms": 8_000})
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1, samples=400_000)
        assert kit.running is not None
        await kit.training_progress()
        process_id = kit.running.worker_process_id
        assert process_id is not None
        kit.signal_worker(number)
        await kit.update()
        assert kit.running.worker_process_id not in {None, process_id}


async def test_a_drain_announces_itself_and_leaves_in_good_order(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token) as daemon:
        kit.assign(0, 1)
        await kit.update()
        assert kit.running is not None
        kit.running.drain("SIGTERM")
        assert (await kit.service.next_said("draining")).reason == "SIGTERM"
        assert await daemon == Leave(Departure.DRAINED, "SIGTERM")


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
        greeting = await kit.service.next_said("hello")
        assert greeting.capabilities.caps == node_pb2.Caps(cache_bytes=20 << 30)
    address = kit.service.node_port
    await kit.there.server.stop(None)
    async with kit.daemon(None), serve(kit.folder / "authority", address) as again:
        await again.service.next_said("hello")


FETCHED = "the first model is fetched, not computed"


def first(kit: DaemonKit, blob: tensor_pb2.BlobRef) -> tensor_pb2.ModelRef:
    """A model that is said to be a job's first one."""
    model = tensor_pb2.ModelRef(blob=blob, layout=message_of(kit.layout.digest))
    model.initial.CopyFrom(tensor_pb2.InitialModel(digest=blob.digest, seed=3))
    return model


async def test_round_0_is_trained_without_fetching_a_byte(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        fetched_update = await kit.update()
    kit.service.begin()
    kit.service.asked_bytes = 0
    kit.folder /= "another"
    kit.settings = kit.settings.model_copy(update={"state_dir": kit.folder / "node"})
    kit.service.blobs.clear()
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1, model=first(kit, kit.model))
        assert await kit.update() == fetched_update
    assert kit.service.asked_bytes == 0


async def test_a_node_that_draws_another_model_fetches_the_jobs_and_says_why(
    kit: DaemonKit,
) -> None:
    theirs = np.full(kit.layout.parameters_count, 0.01, np.float32).tobytes()
    with capture_logs() as logs:
        async with kit.daemon(kit.there.token):
            model = first(kit, kit.service.put(theirs))
            kit.assign(0, 1, model=model)
            await kit.update()
            kit.assign(0, 2, samples=32, model=model)
            await kit.update()
    assert kit.service.asked_bytes == len(theirs)
    (fetch_log,) = (log for log in logs if log["event"] == FETCHED)
    assert "DIGEST_MISMATCH" in fetch_log["reason"]


async def test_a_late_node_draws_the_first_model_and_fetches_only_what_came_after(
    kit: DaemonKit, tmp_path: Path
) -> None:
    change = Flat(
        np.ones(kit.layout.parameters_count, np.float32),
        np.empty(0, np.float32),
        np.empty(0, np.int64),
    )
    delta, base, made_path = tmp_path / "delta", tmp_path / "base", tmp_path / "made"
    base.write_bytes(kit.service.blobs[blob_value(kit.model).digest])
    delta.write_bytes(encode_update(kit.layout, "int4", change).payload.tobytes())
    apply_delta(base, delta, made_path, layout=kit.layout, codec="int4")
    kit.service.put(kit.layout.to_json())
    model = first(kit, kit.model)
    model.blob.CopyFrom(kit.service.put(made_path.read_bytes()))
    blob = kit.service.put(delta.read_bytes())
    model.deltas.append(tensor_pb2.DeltaRef(base=kit.model.digest, blob=blob, codec="int4"))
    kit.service.blobs.pop(blob_value(kit.model).digest)
    kit.service.blobs.pop(blob_value(model.blob).digest)
    async with kit.daemon(kit.there.token):
        kit.assign(1, 1, model=model)
        await kit.update()
    assert kit.service.asked_bytes == blob.size_bytes + len(kit.layout.to_json())


READY = WorkerCapabilities(
    device="cpu", device_name="", memory_bytes=Bytes(0), kind="numpy", workloads={}
)
HANGS = f"import sys, time; sys.stdout.buffer.write({frame(encode(READY))!r}); "
HANGS += "sys.stdout.flush(); sys.stdin.buffer.read(1); "


@pytest.mark.parametrize(
    ("then", "limit_ms", "reason"),
    [
        ("sys.exit(7)", 60_000, "the worker died: it left with status 7"),
        ("time.sleep(600)", 500, "the worker computed no model within 0.5 s"),
    ],
)
async def test_a_worker_that_dies_or_hangs_over_a_drawing_is_not_asked_again(
    tmp_path: Path, then: str, limit_ms: int, reason: str
) -> None:
    events: list[NodeEvent] = []
    command = (sys.executable, "-c", HANGS + then)
    worker = WorkerSupervisor(WorkerLaunch(command, os.environ), report=events.append)
    drawn_assignment: Assignment = msgspec.structs.replace(
        assignment(), initial=InitialModel(Digest("0d" * 32), 3)
    )
    with state_paths_in(tmp_path) as paths, capture_logs() as logs:
        cache = BlobCache(paths, Bytes(1 << 30))
        initial_models = InitialModels(cache, worker, Stage(paths), Milliseconds(limit_ms))
        assert await initial_models.compute(drawn_assignment) is None
        assert await initial_models.compute(drawn_assignment) is None
        assert list(paths.blobs.iterdir()) == []
        await worker.stop()
    (fetch_log,) = (log for log in logs if log["event"] == FETCHED)
    assert reason in fetch_log["reason"]
    assert sum(isinstance(event, WorkerDied) for event in events) <= 1


def test_a_real_job_serves_nobody_its_first_model(tmp_path: Path) -> None:
    spec = JobSpec(
        workload="digits-cnn",
        options={"channels": 8},
        training=TrainingSettings(rounds=2, inner_steps=1, batch_size=4, nodes=2, seed=11),
        evaluation=Evaluation(every=100),
    )
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(2, "torch")
        job_id = cluster.submit(spec)
        rounds = [each for each in cluster.events(job_id) if each.kind == "RoundRecorded"]
        model_bytes = cluster.job(job_id).model_bytes
    assert rounds[0].fields["bytes_down"] == 0
    assert 0 < rounds[1].fields["bytes_down"] < 2 * model_bytes
    logs = [log for node in cluster.nodes for log in json_lines(node.log)]
    assert sum(log["event"] == "the first model was computed here" for log in logs) == 2


async def test_an_error_of_one_devices_node_is_told_at_once_and_drains_the_others(
    kit: DaemonKit,
) -> None:
    unusable = kit.settings.model_copy(update={"worker_module": "no_such_worker"})
    with (
        capture_logs() as logs,
        state_paths_in(kit.folder / "1") as first,
        state_paths_in(kit.folder / "2") as second,
    ):
        machine = [
            Daemon(unusable, first, token=kit.there.token),
            Daemon(kit.settings, second, token=kit.there.token),
        ]
        async with asyncio.timeout(60):
            with pytest.raises(HyperGPUError, match="the worker never got ready"):
                await serve_machine(machine)
    assert machine[1].session.drain == "the node of another device failed"
    (failure_log,) = [each for each in logs if each["event"].startswith("a device's node failed")]
    assert failure_log["number"] == 1
