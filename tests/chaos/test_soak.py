"""R23: fifty nodes train on while one after the other fails: no round is stuck, nothing grows."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from enum import Enum, auto
from pathlib import Path
from statistics import median
from typing import NamedTuple

import grpc
import numpy as np
import psutil
import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import CodecChoice, JobSpec, RoundRule, TrainingSettings
from hypergpu.v1 import node_pb2
from tests.node_client import NOBODY_LOST, WireNode, next_assignment
from tests.processes import Cluster
from tests.warm_workers import UNFORKED

MINUTES = int(os.environ.get("SOAK_MINUTES", "0"))
"""0: the short form, which is over after some rounds and cannot judge memory."""
NODES = 50
PARAMETERS = 4_096
ROUNDS = 24
WARM_UP_ROUNDS = 100 if MINUTES else 4
STUCK_AFTER_S = 120
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=1_000_000, inner_steps=1, batch_size=1, nodes=NODES),
    round=RoundRule(deadline_ms=2_000),
    codec=CodecChoice("fp32", "fp32"),
)


class NodeFailure(Enum):
    """What a node does with one assignment."""

    VANISHES = auto()
    """It hangs up at once and dials in again."""
    VANISHES_IN_ITS_UPLOAD = auto()
    IS_SILENT = auto()
    SENDS_OTHER_BYTES = auto()
    SENDS_INFINITY = auto()


POOL_THREADS = 4
"""Threads that pools may still start late in a run: they start one only when all are busy."""
POOL_DESCRIPTORS = 3 * POOL_THREADS
"""What those threads may open: a database each, with its log and its index."""


class ProcessUsage(NamedTuple):
    """What the coordinator and its children hold together."""

    descriptors: int
    threads: int
    resident_bytes: int


class SoakRounds:
    """The newest round that any node was assigned to."""

    def __init__(self) -> None:
        self.newest = -1
        self._advanced = asyncio.Condition()

    async def advance(self, number: int) -> None:
        """Note an assignment."""
        async with self._advanced:
            self.newest = max(self.newest, number)
            self._advanced.notify_all()

    async def reach(self, number: int) -> None:
        """Wait until a round has begun; each one before it may take only so long."""
        while self.newest < number:
            before = self.newest
            async with asyncio.timeout(STUCK_AFTER_S), self._advanced:
                await self._advanced.wait_for(lambda: self.newest > before)  # noqa: B023


class SoakNode(WireNode):
    """A node that trains nothing, and fails once whenever it is told to."""

    def __init__(self, cluster: Cluster, rounds: SoakRounds) -> None:
        super().__init__(cluster.coordinator.address, cluster.coordinator.node_address)
        self.failure: NodeFailure | None = None
        self._rounds = rounds

    async def serve(self) -> None:
        """Answer assignments on one stream after the other."""
        while True:
            stream = self.control([("null", 1)])
            while await self._answer(await next_assignment(stream)):
                pass
            self.hang_up()
            with suppress(AssertionError, grpc.aio.AioRpcError):
                await next_assignment(stream)

    async def _answer(self, assignment: node_pb2.Assignment) -> bool:
        """Train, send and fail; returns whether its stream goes on."""
        await self._rounds.advance(assignment.lease.round)
        heartbeat = node_pb2.Heartbeat(sequence=assignment.lease.number)
        self.say(node_pb2.ControlRequest(heartbeat=heartbeat))
        update = self._update(assignment.lease.round)
        failure, self.failure = self.failure, None
        match failure:
            case None:
                # Late updates are refused, and whoever sent one trains on.
                with suppress(HyperGPUError):
                    await self.submit(self.offer(assignment, update), update)
            case NodeFailure.SENDS_OTHER_BYTES:
                with suppress(HyperGPUError):
                    await self.submit(self.offer(assignment, update), bytes(len(update)))
            case NodeFailure.SENDS_INFINITY:
                spoilt = np.full(PARAMETERS, np.inf, np.float32).tobytes()
                with suppress(HyperGPUError):
                    await self.submit(self.offer(assignment, spoilt), spoilt)
            case NodeFailure.VANISHES_IN_ITS_UPLOAD:
                await self.bring(self.offer(assignment, update), 0, update[: len(update) // 2])
            case NodeFailure.VANISHES | NodeFailure.IS_SILENT:
                pass
        return failure not in (NodeFailure.VANISHES, NodeFailure.VANISHES_IN_ITS_UPLOAD)

    def _update(self, number: int) -> bytes:
        """An update that agrees with those of other nodes, as honest ones do."""
        common = np.random.default_rng(number).standard_normal(PARAMETERS)
        own = np.random.default_rng((number, *self.node_id.encode())).standard_normal(PARAMETERS)
        return (1e-3 * (common + own)).astype(np.float32).tobytes()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, *NOBODY_LOST)
    cluster.coordinator.environment |= UNFORKED
    with cluster:
        yield cluster


@pytest.fixture
async def rounds() -> SoakRounds:
    return SoakRounds()


@pytest.fixture
async def nodes(cluster: Cluster, rounds: SoakRounds) -> AsyncIterator[list[SoakNode]]:
    token = cluster.coordinator.node_token()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        nodes = [SoakNode(cluster, rounds) for _ in range(NODES)]
        for node in nodes:
            await node.join(token)
            stack.push_async_callback(node.close)
        tasks = [group.create_task(node.serve()) for node in nodes]
        yield nodes
        for task in tasks:
            task.cancel()


def usage(process_id: int) -> ProcessUsage:
    """Measure a process with all its children."""
    process = psutil.Process(process_id)
    every = [process, *process.children(recursive=True)]
    return ProcessUsage(
        sum(each.num_fds() for each in every),
        sum(each.num_threads() for each in every),
        sum(each.memory_info().rss for each in every),
    )


@pytest.mark.timeout(600 + 60 * MINUTES)
async def test_a_long_job_of_fifty_nodes_that_fail_one_by_one_is_never_stuck_and_grows_by_nothing(
    cluster: Cluster, rounds: SoakRounds, nodes: list[SoakNode]
) -> None:
    cluster.submit(SPEC)
    await rounds.reach(WARM_UP_ROUNDS)
    child = cluster.coordinator.child.pid
    draws = random.Random(23)
    loop = asyncio.get_running_loop()
    ends_at_s = loop.time() + 60 * MINUTES
    failures_at_s = loop.time()
    usages: list[ProcessUsage] = []
    while rounds.newest < WARM_UP_ROUNDS + ROUNDS or loop.time() < ends_at_s:
        await rounds.reach(rounds.newest + 2)
        usages.append(usage(child))
        if MINUTES:
            print(rounds.newest, *usages[-1])  # noqa: T201  shown when the test fails
        if loop.time() >= failures_at_s:
            draws.choice(nodes).failure = draws.choice(list(NodeFailure))
            failures_at_s += 60 if MINUTES else 0
    early, late = usages[: len(usages) // 2], usages[-len(usages) // 4 :]
    # What is under way comes and goes, and pools fill; what leaks is above all that was before.
    most_descriptors = max(each.descriptors for each in early) + POOL_DESCRIPTORS
    assert min(each.descriptors for each in late) <= most_descriptors
    most_threads = max(each.threads for each in early) + POOL_THREADS
    assert min(each.threads for each in late) <= most_threads
    if MINUTES:
        assert resident_growth(usages) < 0.05


def resident_growth(used: list[ProcessUsage]) -> float:
    """Growth of the median of resident memory from the first to the last tenth, as a share."""
    tenth = max(1, len(used) // 10)
    first, last = used[:tenth], used[-tenth:]
    before, after = (median(each.resident_bytes for each in part) for part in (first, last))
    return after / before - 1
