"""R1: a node is killed in the middle of its upload, at a random byte, and sends no byte twice."""

import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hypergpu.digests import digest_of, digest_to_wire
from hypergpu.tensors.codec import update_bytes
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.credentials import token_text
from hypergpu.wire.messages import terms_message
from hypergpu.workloads.layouts import numpy_layout
from hypergpu.workloads.registry import build, find
from tests.integration.node.fake_coordinator import FakeCoordinator, Served, serve, terms_for
from tests.integration.node.test_node_command import node, wait_for_end

KILLS = int(os.environ.get("CHAOS_NODE_KILLS", "2"))
OPTIONS = {"parameters": 2_000_000}
LAYOUT = numpy_layout(build(find("null"), OPTIONS))
SIZE_BYTES = update_bytes(LAYOUT, "fp32")


def assign(service: FakeCoordinator, model: tensor_pb2.BlobRef, round_number: int) -> None:
    layout = tensor_pb2.Digest(value=digest_to_wire(LAYOUT.digest))
    message = node_pb2.Assignment(
        lease=node_pb2.Lease(job_id="job-a", round=round_number, number=round_number + 1),
        workload="null",
        workload_version=find("null").version,
        workload_options='{"parameters": 2000000}',
        training=node_pb2.Training(inner_steps=1, batch_size=1, codec="fp32", seed=round_number),
        shard=node_pb2.Shard(partitions=1, ranges=[node_pb2.SampleRange(start=0, count=1)]),
        model=tensor_pb2.ModelRef(blob=model, layout=layout),
        terms=terms_message(terms_for("job-a"), epoch=0),
    )
    service.to_say.put_nowait(node_pb2.ControlResponse(assignment=message))


@pytest.fixture
async def there() -> AsyncIterator[Served]:
    async with serve() as there:
        yield there


async def test_a_node_killed_in_its_upload_goes_on_at_the_committed_offset(
    there: Served, tmp_path: Path
) -> None:
    service, folder = there.service, tmp_path / "node"
    model = service.put(bytes(LAYOUT.model_bytes))
    async with node(folder, "join", "--only", "--token-file", "-") as process:
        await process.communicate(token_text(there.token).encode() + b"\n")
    for seed in range(KILLS):
        service.begin()
        async with node(folder, "run") as process:
            service.kill_after_bytes = random.Random(seed).randrange(1, SIZE_BYTES)
            service.kill = lambda child=process: child.send_signal(signal.SIGKILL)  # type: ignore[misc]
            assign(service, model, seed)
            await process.wait()
        resent_from = len(service.offsets)
        stored_bytes = max((span.end for span in service.held), default=0)
        service.forget_said()
        async with node(folder, "run"):
            assign(service, model, seed)
            digest = await service.arrived.get()
        assert digest == digest_of(service.stored), f"seed {seed}"
        # What was in flight may have made the update whole: then there is no second attempt.
        for offset in service.offsets[resent_from:]:
            assert offset >= stored_bytes, f"seed {seed}"
        assert service.arrived.empty(), f"seed {seed}: accepted twice"


async def test_a_node_told_to_leave_in_its_upload_sends_the_rest_and_leaves_with_status_0(
    there: Served, tmp_path: Path
) -> None:
    service, folder = there.service, tmp_path / "node"
    model = service.put(bytes(LAYOUT.model_bytes))
    async with node(folder, "join", "--only", "--token-file", "-") as process:
        await process.communicate(token_text(there.token).encode() + b"\n")
    async with node(folder, "run") as process:
        service.kill_after_bytes = SIZE_BYTES // 2
        service.kill = lambda: process.send_signal(signal.SIGTERM)
        assign(service, model, 0)
        digest = await service.arrived.get()
        status, _ = await wait_for_end(process)
    assert status == 0
    assert digest_of(service.stored) == digest
