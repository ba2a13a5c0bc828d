"""A job's first model: drawn by the node's own worker, fetched where it draws another."""

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from gpu_node.core.events import NodeEvent, WorkerDied
from gpu_node.shell.supervision.supervisor import WorkerSupervisor
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.initial_models import InitialModels
from gpu_node.shell.worker.messages import WorkerCapabilities, encode
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings
from hypergpu.statements.assignment import Assignment, InitialModel
from hypergpu.tensors.codec import apply_delta, encode_update
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.assignment import blob_value
from hypergpu.wire.frames import frame
from tests.integration.node.daemon_kit import DaemonKit, message_of
from tests.integration.node.fake_coordinator import serve, state_paths_in
from tests.processes import Cluster, json_lines
from tests.unit.node.node_states import assignment

FETCHED = "the first model is fetched, not computed"


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[DaemonKit]:
    async with serve(tmp_path / "authority") as there:
        yield DaemonKit(there, tmp_path)


def first(kit: DaemonKit, blob: tensor_pb2.BlobRef) -> tensor_pb2.ModelRef:
    """A model that is said to be a job's first one."""
    model = tensor_pb2.ModelRef(blob=blob, layout=message_of(kit.layout.digest))
    model.initial.CopyFrom(tensor_pb2.InitialModel(digest=blob.digest, seed=3))
    return model


async def test_round_0_is_trained_without_fetching_a_byte(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1)
        fetched = await kit.update()
    kit.service.begin()
    kit.service.asked_bytes = 0
    kit.folder /= "another"
    kit.settings = kit.settings.model_copy(update={"state_dir": kit.folder / "node"})
    kit.service.blobs.clear()
    async with kit.daemon(kit.there.token):
        kit.assign(0, 1, model=first(kit, kit.model))
        assert await kit.update() == fetched
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
    (said,) = (log for log in logs if log["event"] == FETCHED)
    assert "DIGEST_MISMATCH" in said["reason"]


async def test_a_late_node_draws_the_first_model_and_fetches_only_what_came_after(
    kit: DaemonKit, tmp_path: Path
) -> None:
    change = Flat(
        np.ones(kit.layout.parameters_count, np.float32),
        np.empty(0, np.float32),
        np.empty(0, np.int64),
    )
    delta, base, made = tmp_path / "delta", tmp_path / "base", tmp_path / "made"
    base.write_bytes(kit.service.blobs[blob_value(kit.model).digest])
    delta.write_bytes(encode_update(kit.layout, "int4", change).payload.tobytes())
    apply_delta(base, delta, made, layout=kit.layout, scheme="int4")
    kit.service.put(kit.layout.to_json())
    model = first(kit, kit.model)
    model.blob.CopyFrom(kit.service.put(made.read_bytes()))
    blob = kit.service.put(delta.read_bytes())
    model.deltas.append(tensor_pb2.DeltaRef(base=kit.model.digest, blob=blob, scheme="int4"))
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
    worker = WorkerSupervisor(command, os.environ, report=events.append)
    wanted: Assignment = msgspec.structs.replace(
        assignment(), initial=InitialModel(Digest("0d" * 32), 3)
    )
    with state_paths_in(tmp_path) as paths, capture_logs() as logs:
        cache = BlobCache(paths, Bytes(1 << 30))
        initial_models = InitialModels(cache, worker, Milliseconds(limit_ms))
        assert await initial_models.compute(wanted) is None
        assert await initial_models.compute(wanted) is None
        assert list(paths.blobs.iterdir()) == []
        await worker.stop()
    (said,) = (log for log in logs if log["event"] == FETCHED)
    assert reason in said["reason"]
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
