"""A daemon over a state folder, and a service that has work for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gpu_node.config import NodeSettings
from gpu_node.core.commands import Leave
from gpu_node.shell.app import Daemon
from gpu_node.shell.worker.messages import WorkerCapabilities
from hypergpu.digest import digest_to_wire
from hypergpu.ids import Digest, JobId
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.statements import terms_message
from hypergpu.wire.token import Token
from hypergpu.workloads.registry import build, find
from hypergpu.workloads.workload import numpy_layout
from tests.integration.node.fake_coordinator import (
    FakeCoordinator,
    Served,
    state_paths_in,
    terms_for,
)

JOB = JobId("job-000000000001")
OTHER_JOB = JobId("job-000000000002")
CAPABILITIES = WorkerCapabilities(
    device="cpu",
    device_name="",
    memory_bytes=Bytes(0),
    kind="numpy",
    workloads={"digits-softmax": 1},
)


def message_of(digest: Digest) -> tensor_pb2.Digest:
    return tensor_pb2.Digest(value=digest_to_wire(digest))


class DaemonKit:
    """A service with a job to give, and a daemon that serves it."""

    def __init__(self, there: Served, folder: Path) -> None:
        self.there = there
        self.service: FakeCoordinator = there.service
        self.folder = folder
        self.settings = NodeSettings(
            state_dir=folder / "node", worker="numpy", drain_limit_ms=20_000
        )
        self.layout = numpy_layout(build(find("digits-softmax"), {}))
        flat = Flat.empty(self.layout)
        flat.parameters[:] = 0
        self.model = there.service.put(flat.parameters.tobytes())
        self.running: Daemon | None = None

    @asynccontextmanager
    async def daemon(self, token: Token | None) -> AsyncIterator["asyncio.Task[Leave]"]:
        """A daemon over the kit's state folder; stopped at the end if it still runs."""
        with state_paths_in(self.folder) as paths:
            self.running = Daemon(self.settings, paths, token=token)
            serving = asyncio.create_task(self.running.run(CAPABILITIES))
            yield serving
            self.running.stop("the test is over")
            await serving

    def assign(
        self,
        round_number: int,
        number: int,
        *,
        accepted: Digest | None = None,
        samples: int = 16,
        job: JobId = JOB,
        model: tensor_pb2.ModelRef | None = None,
    ) -> node_pb2.Assignment:
        """Give work on a model; on the kit's own, which no node can draw, unless told which."""
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
            model=model or self.plain(),
            terms=terms_message(terms_for(job), epoch=round_number // 2),
        )
        if accepted is not None:
            message.last_accepted.CopyFrom(message_of(accepted))
        self.service.to_say.put_nowait(node_pb2.ControlResponse(assignment=message))
        return message

    def plain(self) -> tensor_pb2.ModelRef:
        """The kit's model, of which nothing is said but its name."""
        return tensor_pb2.ModelRef(blob=self.model, layout=message_of(self.layout.digest))

    async def update(self) -> Digest:
        """The digest of the next update that arrives whole."""
        async with asyncio.timeout(240):
            return await self.service.arrived.get()
