"""Who works for whom: carries out `coordinator.core.allocation`'s plans and reports lost nodes."""

import asyncio
from collections.abc import Iterator

import structlog

from coordinator.core.allocation import JobDemand, Lend, Move, NodeOffer, plan_allocation
from coordinator.core.job.events import NodeDraining, NodeJoined, NodeLost
from coordinator.core.job.state import ENDED, Job, Phase
from coordinator.core.round.completion import nodes_needed
from coordinator.shell.runtime.connected_nodes import ConnectedNodes
from coordinator.shell.runtime.driver import Driver
from coordinator.shell.runtime.job_runtime import JobRuntime
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Milliseconds

log = structlog.get_logger()

NOW = Milliseconds(0)
"""Placeholder: the driver stamps events with job time as they enter its inbox."""
_USES_NODES = frozenset(
    {Phase.PREPARING, Phase.WAITING, Phase.PLANNING, Phase.TRAINING, Phase.AGGREGATING}
)


class NodeAllocator:
    """Moves nodes between jobs, one plan at a time."""

    def __init__(self, driver: Driver, nodes: ConnectedNodes) -> None:
        self._driver = driver
        self._nodes = nodes
        self._wanted = asyncio.Event()

    def review(self) -> None:
        """Something changed: plan again as soon as the moves under way are done."""
        self._wanted.set()

    async def run(self) -> None:
        """Carry out plans, for ever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            moves = plan_allocation(self._demands(), self._offers())
            await asyncio.gather(*(self._carry_out(move) for move in moves))

    async def watch(self, lost_after_ms: Milliseconds) -> None:
        """Report nodes that went silent, for ever."""
        while True:
            await asyncio.sleep(min(1.0, lost_after_ms / 4000))
            for node in self._nodes.overdue(lost_after_ms):
                await self.lose(node, f"not heard of for {lost_after_ms / 1000:g} s")

    async def lose(self, node: NodeId, reason: str) -> None:
        """A node is gone: its job goes on without it."""
        log.info("a node is lost", node=node, reason=reason)
        self._nodes.forget(node)
        runtime = self.runtime_of(node)
        if runtime is not None:
            event = NodeLost(at_ms=NOW, node=node, reason=reason)
            await self._driver.insist(runtime.job.job_id, event)
        self.review()

    async def drain(self, node: NodeId, reason: str) -> None:
        """A node takes no further work; its job lets it finish what it holds."""
        self._nodes.drain(node, reason)
        runtime = self.runtime_of(node)
        if runtime is not None:
            event = NodeDraining(at_ms=NOW, node=node, reason=reason)
            await self._driver.insist(runtime.job.job_id, event)
        self.review()

    def runtime_of(self, node: NodeId) -> JobRuntime | None:
        """The job that the node is a present member of."""
        return next(
            (runtime for runtime in self._open_runtimes() if _is_present(runtime.job, node)), None
        )

    def _open_runtimes(self) -> Iterator[JobRuntime]:
        return (
            runtime for runtime in self._driver.runtimes.values() if runtime.job.phase not in ENDED
        )

    def _demands(self) -> list[JobDemand]:
        return [
            JobDemand(
                job_id=runtime.job.job_id,
                nodes_min=nodes_needed(runtime.job),
                workload=runtime.job.spec.workload,
                workload_version=runtime.workload_version,
                members=frozenset(
                    node
                    for node, member in runtime.job.members.items()
                    if member.is_present and not member.is_leaving
                ),
            )
            for runtime in self._open_runtimes()
            if runtime.job.phase in _USES_NODES and not runtime.is_recovering
        ]

    def _offers(self) -> list[NodeOffer]:
        places: dict[NodeId, JobId] = {}
        for runtime in self._open_runtimes():
            for node, member in runtime.job.members.items():
                if member.is_present:
                    places[node] = runtime.job.job_id
        return [
            NodeOffer(node, places.get(node), session.capabilities.workloads)
            for node, session in self._nodes.streams.items()
            if not self._nodes.drain_reason(node)
        ]

    async def _carry_out(self, move: Move) -> None:
        if not isinstance(move, Lend):
            event = NodeDraining(at_ms=NOW, node=move.node, reason=move.reason)
            await self._driver.insist(move.job_id, event)
            return
        before = self.runtime_of(move.node)
        if before is not None and before.job.job_id != move.job_id:
            # Only a job that cannot use its nodes now, such as a paused one, is passed over.
            reason = f"lent to {move.job_id} while {before.job.job_id} is {before.job.phase.value}"
            lost = NodeLost(at_ms=NOW, node=move.node, reason=reason)
            await self._driver.insist(before.job.job_id, lost)
        if move.node in self._nodes.streams:
            await self._join(move.job_id, move.node)

    async def _join(self, job_id: JobId, node: NodeId) -> None:
        """Make a node a member; what became of it while that was written is caught up with."""
        if await self._driver.insist(job_id, NodeJoined(at_ms=NOW, node=node)):
            return
        if self._nodes.silent_ms(node) is None:
            await self.lose(node, "lost while it joined")
        elif reason := self._nodes.drain_reason(node):
            await self._driver.insist(job_id, NodeDraining(at_ms=NOW, node=node, reason=reason))


def _is_present(job: Job, node: NodeId) -> bool:
    member = job.members.get(node)
    return member is not None and member.is_present
