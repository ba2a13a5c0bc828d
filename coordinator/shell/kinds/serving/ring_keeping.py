"""Keeps the layers of models that are cut on nodes: places them, has one node stand by, and gives
it what another one lost.

A stage whose node is away waits for it for `STAGE_GRACE_S`, and for `STANDBY_GRACE_S` alone where
a node stands by that holds a stage already. Where several are away at once, as after the end of a
gateway, all are waited for. A node that is back without its layers would load them again for tens
of seconds: the one that stands by takes them at once.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence

from coordinator.core.serving.events import ReplicaHandedBack, RingPlaced, StageMoved
from coordinator.core.serving.ring_placing import NodeFigures, needs_placing, ring_placement
from coordinator.core.serving.standby import needs_standby, standby_placement
from coordinator.core.serving.state import ServeJob
from coordinator.core.work.members import free_nodes
from coordinator.shell.driver.performing import Performing
from coordinator.shell.kinds.serving.ring_driver import RingDriver
from coordinator.shell.kinds.serving.ring_parts import StageFault
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.nodes.fleet import Fleet
from hypergpu.ids import JobId, NodeId
from hypergpu.rings.stage_work import memory_for_models
from hypergpu.units import Milliseconds

STAGE_GRACE_S = 2.0
"""How long a stage may be away before another node is given its layers."""
STANDBY_GRACE_S = 0.25
"""The same where a node stands by."""
PLACE, FAULT, LOSE, MOVE = "place layers", "report a fault", "give a stage up", "move a stage"
_NOW = Milliseconds(0)  # stamped by the driver
_Placing = tuple[frozenset[NodeId], frozenset[NodeId]]


class RingKeeper:
    """Nodes of all rings.

    Args:
        performing: Runs what takes time.
        fleet: The nodes.
        ring_of: What drives a job's ring; None: it has none.
    """

    def __init__(
        self,
        performing: Performing,
        fleet: Fleet,
        ring_of: Callable[[ServeRuntime], RingDriver | None],
    ) -> None:
        self._performing = performing
        self._driver = performing.driver
        self._fleet = fleet
        self._ring_of = ring_of
        self._numbers = itertools.count()
        self._placed_for: dict[JobId, _Placing] = {}
        """Nodes and leases of models that are cut for which nodes were chosen last."""
        fleet.nodes.on_stream_begin.append(self._look_at_return)

    def place_if_due(self, runtime: ServeRuntime) -> None:
        """Place layers that no node holds, or a node that stands by, once for each change of nodes
        that are connected, and of leases.
        """
        job = runtime.job
        if not needs_placing(job) and not needs_standby(job):
            self._placed_for.pop(job.job_id, None)
            return
        present_nodes = self._fleet.nodes.streams.keys() & free_nodes(job, ())
        state = (frozenset(present_nodes), frozenset(job.leases))
        if self._placed_for.get(job.job_id) == state:
            return
        self._placed_for[job.job_id] = state
        self._start(runtime, PLACE, self._place(runtime, sorted(state[0])))

    def _start(
        self, runtime: ServeRuntime, name: str, work: Coroutine[object, object, object]
    ) -> None:
        self._performing.start(runtime, (name, next(self._numbers)), work)

    async def _place(self, runtime: ServeRuntime, nodes: Sequence[NodeId]) -> None:
        figures = self._figures(runtime, nodes)
        job = runtime.job
        if needs_placing(job):
            event = await asyncio.to_thread(ring_placement, job, figures)
            await self._driver.report(job.job_id, event)
            if isinstance(event, RingPlaced):
                return
        # A node may stand by for rings that are whole while another one waits for nodes.
        if needs_standby(job := runtime.job):
            standby = await asyncio.to_thread(standby_placement, job, figures)
            if standby is not None:
                await self._driver.report(job.job_id, standby)

    def _figures(self, runtime: ServeRuntime, nodes: Sequence[NodeId]) -> dict[NodeId, NodeFigures]:
        ring = self._ring_of(runtime)
        figures = {}
        for node in nodes:
            stream = self._fleet.nodes.streams.get(node)
            if stream is not None:
                offer = stream.capabilities
                figures[node] = NodeFigures(
                    memory_bytes=memory_for_models(offer.device, offer.memory_bytes),
                    round_trip_us=self._fleet.readings.reading(node).round_trip_us.mean,
                    layer_us=ring.layer_us.get(node, 0.0) if ring is not None else 0.0,
                    disk_bytes=offer.caps.get("disk_bytes", 0),
                    upload_bits_per_s=offer.caps.get("upload_bits_per_s", 0),
                )
        return figures

    def report_fault(self, runtime: ServeRuntime, fault: StageFault) -> None:
        """Take a stage from a node that did not compute as it must, or that has lost it."""
        if fault.is_absent:
            self.move(runtime, fault.node, fault.reason)
            return
        event = ReplicaHandedBack(
            at_ms=_NOW,
            node=fault.node,
            lease=fault.lease,
            reason=fault.reason,
            is_lasting=fault.is_lasting,
        )
        self._start(runtime, FAULT, self._driver.report(runtime.job.job_id, event))

    def note_absence(self, node: NodeId) -> None:
        """A node's stream ended: wait for it a little, then let others have its layers."""
        loop = asyncio.get_running_loop()
        for runtime in self._holding(node):
            loop.call_later(STANDBY_GRACE_S, self._move_alone, runtime, node)
            loop.call_later(STAGE_GRACE_S, self._give_up, runtime, node)

    def _holding(self, node: NodeId) -> list[ServeRuntime]:
        """Jobs of which a node holds a stage."""
        runtimes = self._driver.runtimes_of(ServeRuntime).values()
        return [each for each in runtimes if _holds_stage(each.job, node)]

    def _look_at_return(self, node: NodeId) -> None:
        """A node dialled in: where it is back without its layers, somebody else has them sooner,
        and it may stand by.
        """
        stream = self._fleet.nodes.streams.get(node)
        for runtime in self._holding(node):
            lease = (runtime.job.job_id, runtime.job.leases[node].lease)
            if stream is not None and lease not in stream.working_leases:
                self.move(runtime, node, "it has started anew without them")
        for runtime in self._driver.runtimes_of(ServeRuntime).values():
            if node in runtime.job.members and not runtime.is_recovering:
                self.place_if_due(runtime)

    def _move_alone(self, runtime: ServeRuntime, node: NodeId) -> None:
        streams = self._fleet.nodes.streams
        absent_nodes = [each for each in runtime.job.stages if each not in streams]
        if absent_nodes == [node]:
            self.move(runtime, node, f"it was away for {STANDBY_GRACE_S:g} s")

    def move(self, runtime: ServeRuntime, node: NodeId, reason: str) -> None:
        """Give a node's layers to the one that stands by, if that one holds a stage."""
        job, ring = runtime.job, self._ring_of(runtime)
        standby = job.standby
        if standby is None or ring is None or node not in job.stages:
            return
        if ring.ready_standby != (standby, job.leases[standby].lease):
            return
        if standby not in self._fleet.nodes.streams:
            return
        lease = job.leases[node].lease
        event = StageMoved(at_ms=_NOW, node=node, lease=lease, to=standby, reason=reason)
        self._start(runtime, MOVE, self._driver.report(job.job_id, event))

    def _give_up(self, runtime: ServeRuntime, node: NodeId) -> None:
        """Let another node hold layers whose node is away: conversations wait for them."""
        if node in self._fleet.nodes.streams or not _holds_stage(runtime.job, node):
            return
        reason = f"it was away for {STAGE_GRACE_S:g} s, and others wait for its layers"
        self._start(runtime, LOSE, self._fleet.allocator.lose(node, reason))


def _holds_stage(job: ServeJob, node: NodeId) -> bool:
    replica = job.stages.get(node)
    return replica is not None and replica.span is not None
