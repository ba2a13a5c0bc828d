"""Nodes that hold a served model, reduced to their wire: they say what a test wants said."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_node.shell.transfer.counts import count_value
from hypergpu.crypto import sign
from hypergpu.errors import HyperGPUError
from hypergpu.packed_work import pack_work
from hypergpu.result_statements import count_contribution
from hypergpu.serving.calls import AnswerPart, ReplicaReady, pack_parts
from hypergpu.serving.serve_request import COUNT_KIND, ENGINE_KIND, ENGINE_VERSION, SignedCount
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.user.client.models import ServedModelView
from hypergpu.v1 import node_pb2, receipt_pb2, work_pb2
from hypergpu.wire.credentials import Role, parse_token
from hypergpu.wire.messages import lease_message
from hypergpu.wire.work import work_message
from tests.kinds.serving.small_model import serve_small_model
from tests.node_client import WireNode
from tests.polling import first_true_of
from tests.processes import Cluster

READY = ReplicaReady(tokens_most=64, fingerprint="f", device="cpu")


class WireReplica:
    """A node that holds the model, reduced to its wire."""

    def __init__(self, node: WireNode, stream: AsyncIterator[node_pb2.ControlResponse]) -> None:
        self._node = node
        self._stream = stream
        self._work = node_pb2.WorkAssignment()
        self.ready = READY
        """What it says once the model is loaded."""

    @property
    def lease(self) -> node_pb2.Lease:
        """The lease under which it has the model."""
        return self._work.lease

    @property
    def node_id(self) -> str:
        """Id of the node."""
        return self._node.node_id

    async def begin(self) -> None:
        """Wait for the lease, and say that the model is loaded."""
        message = await self._next("work_assignment")
        self._work = message.work_assignment
        self.say(0, self.ready)

    async def next_call(self) -> work_pb2.WorkCall:
        """The next call that is not one to be given up."""
        while (call := (await self._next("work_call")).work_call).is_cancelled:
            pass
        return call

    async def _next(self, kind: str) -> node_pb2.ControlResponse:
        async with asyncio.timeout(60):
            async for message in self._stream:
                if message.WhichOneof("message") == kind:
                    return message
        raise AssertionError("the stream ended")

    def say(self, call: int, *parts: AnswerPart, is_last: bool = False) -> None:
        """Say parts of an answer."""
        self.say_bytes(call, pack_parts([*parts]) if parts else b"", is_last=is_last)

    def say_bytes(self, call: int, body: bytes, *, is_last: bool = False) -> None:
        """Say anything."""
        output = work_pb2.WorkOutput(
            job_id=self._work.lease.job_id,
            lease=self._work.lease.number,
            call=call,
            body=body,
            is_last=is_last,
        )
        outputs = work_pb2.WorkOutputs(outputs=[output])
        self._node.say(node_pb2.ControlRequest(work_outputs=outputs))

    async def next_work(self) -> node_pb2.ControlResponse:
        """The next call, or count to be signed; it may take any time."""
        async for message in self._stream:
            if message.HasField("work_call") or message.HasField("work_count"):
                return message
        raise AssertionError("the stream ended")

    async def next_count(self) -> work_pb2.WorkCount:
        """The next count that is to be signed."""
        return (await self._next("work_count")).work_count

    async def next_receipt(self) -> receipt_pb2.Receipt:
        """The next receipt."""
        return (await self._next("receipts")).receipts.receipts[0]

    async def sign(self, count: work_pb2.WorkCount, *, signature: bytes = b"") -> None:
        """Answer with the node's signature of a count, or with another."""
        terms, statement = count_value(count)
        contribution = count_contribution(terms, self._node.node_id, statement)
        own_signature = sign(self._node.key, terms.domain.separator(), contribution)
        request = node_pb2.ContributeRequest(
            lease=lease_message(statement.lease),
            result=work_message(pack_work(COUNT_KIND, SignedCount(statement.units))),
            signature=signature or own_signature,
        )
        await self._node.stub.Contribute(request, metadata=self._node.metadata, timeout=240)

    def dial(self) -> None:
        """Open the control stream again."""
        self._stream = self._node.control([(ENGINE_KIND, ENGINE_VERSION)], [self._work.lease])

    async def end(self) -> None:
        """Read the stream to its end, which raises what ended it."""
        async with asyncio.timeout(60):
            async for _ in self._stream:
                pass


@asynccontextmanager
async def open_user(cluster: Cluster) -> AsyncIterator[AsyncCoordinator]:
    """A connection of a user of its own."""
    with cluster.client() as client:
        token = client.create_token(Role.USER, ttl_s=600).token
    target = ConnectionTarget(cluster.coordinator.address, parse_token(token), 60.0)
    async with await AsyncCoordinator.open(target) as user:
        yield user


@asynccontextmanager
async def replicas(
    cluster: Cluster,
    folder: Path,
    count: int,
    *,
    stops: bool = True,
    **request: Any,
) -> AsyncIterator[tuple[AsyncCoordinator, list[WireReplica]]]:
    """A model on so many nodes, and a connection of its user."""
    nodes = [
        WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
        for _ in range(count)
    ]
    signs_counts = bool(request.pop("signs_counts", True))
    ready = request.pop("ready", READY)
    for node in nodes:
        node.signs_counts = signs_counts
    async with open_user(cluster) as user:
        job = await serve_small_model(user, folder, replicas=count, **request)
        wires = []
        for node in nodes:
            await node.join(cluster.coordinator.node_token())
            wire = WireReplica(node, node.control([(ENGINE_KIND, ENGINE_VERSION)]))
            wire.ready = ready
            await wire.begin()
            wires.append(wire)
        await first_model(user, lambda model: model.ready_replicas >= count)
        yield user, wires
        if stops:
            with suppress(HyperGPUError):  # A test may have stopped it.
                await user.stop(job)
    for node in nodes:
        await node.close()


async def first_model(
    user: AsyncCoordinator, is_wanted: Callable[[ServedModelView], object]
) -> ServedModelView:
    """Ask for the user's one model until it is as wanted."""

    async def wanted_models() -> list[ServedModelView]:
        return [model for model in await user.models() if is_wanted(model)]

    (model,) = await first_true_of(wanted_models)
    return model


async def stop_and_wait(user: AsyncCoordinator, job: str) -> None:
    """Stop a model, and wait until its last counts are settled."""
    await user.stop(job)
    async for _ in user.watch(job):
        pass
