"""Who works for whom: carries out plans of `coordinator.core.work.allocation` one by one."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import structlog
from msgspec.structs import replace

from coordinator.core.work.allocation import (
    RECALL_LIMIT_MS,
    Lend,
    Move,
    Withdraw,
    plan_allocation,
)
from coordinator.core.work.demand import JobDemand, NodeOffer, unfit_reason
from coordinator.core.work.job_turns import TURN_MS, turn_left_ms
from coordinator.core.work.members import LeasedJob
from coordinator.core.work.outlook import job_outlooks
from coordinator.core.work.waiting_kinds import WaitingKinds, waiting_kinds
from coordinator.core.work.work_events import NodeDraining, NodeJoined, NodeLost, NodePaused
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.kinds import ShellKind
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet_health import FleetHealth
from coordinator.shell.store.journal.journal import Journal
from hypergpu.clock import monotonic_ms
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import node_pb2, spec_pb2

log = structlog.get_logger()

_NOW = Milliseconds(0)
"""Placeholder: the driver stamps events with job time as they enter its inbox."""
_PAUSE_PARTS = 19
"""A pause so many times as long as a plan took follows it: thousands of nodes that come within a
minute are not planned with one by one."""
_PAUSE_S_MAX = 2.0
_LATER_S = 0.05
"""Turns are over by the time that a plan looks again."""
_TELL_MS = 5_000
"""Idle nodes are told at most so often which work they get none of."""
_IDLE_MOST = 500
"""Most idle nodes that are told: nobody looks for work for more by hand."""
_OUTLOOK_MS = 1_000
"""Outlooks of all jobs are made at most so often, however many ask."""


class _Turn(NamedTuple):
    is_served: bool
    since_ms: Milliseconds
    has_had_turn: bool


class NodeAllocator:
    """Moves nodes between jobs, one plan at a time."""

    def __init__(
        self,
        driver: Driver,
        nodes: ConnectedNodes,
        journal: Journal,
        turn_ms: Milliseconds = TURN_MS,
        health: FleetHealth | None = None,
    ) -> None:
        self._driver = driver
        self._health = health or FleetHealth()
        self._nodes = nodes
        self._journal = journal
        self._turn_ms = turn_ms
        self._wanted = asyncio.Event()
        self._settling: list[asyncio.Future[None]] = []
        self._turns: dict[JobId, _Turn] = {}
        self._recalled_ms: dict[tuple[NodeId, JobId], Milliseconds] = {}
        """When jobs were asked for nodes that they have still."""
        self._outlooks: dict[JobId, str] = {}
        self._outlooks_ms = Milliseconds(-_OUTLOOK_MS)
        self._told_ms = Milliseconds(-_TELL_MS)

    def review(self) -> None:
        """Something changed: plan again as soon as the moves under way are done."""
        self._wanted.set()

    async def settle(self) -> None:
        """Plan again, and wait until that plan is carried out."""
        plan_end = asyncio.get_running_loop().create_future()
        self._settling.append(plan_end)
        self.review()
        await plan_end

    async def run(self) -> None:
        """Carry out plans, for ever."""
        left_s: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._wanted.wait()
            self._wanted.clear()
            waiters, self._settling = self._settling, []
            began_s = time.monotonic()
            demands = self._demands()
            moves = plan_allocation(demands, self._offers(), self._turn_ms)
            left_s = self._time_left_s(demands)
            self._outlooks_ms = Milliseconds(-_OUTLOOK_MS)
            took_s = time.monotonic() - began_s
            await asyncio.gather(*(self._carry_out(move) for move in moves))
            for each in waiters:
                if not each.done():  # nobody waits for one that was cancelled
                    each.set_result(None)
            await asyncio.sleep(min(_PAUSE_PARTS * took_s, _PAUSE_S_MAX))

    def _time_left_s(self, demands: Sequence[JobDemand]) -> float | None:
        """Time until a plan may differ though nothing happens; None: it never does."""
        left_ms = turn_left_ms(demands, self._turn_ms)
        ends = [] if left_ms is None else [left_ms]
        if self._recalled_ms:
            now_ms, first_ms = monotonic_ms(), min(self._recalled_ms.values())
            ends.append(Milliseconds(max(0, first_ms + RECALL_LIMIT_MS - now_ms)))
        return min(ends) / 1000 + _LATER_S if ends else None

    def outlook(self, job_id: JobId) -> str:
        """Why a job waits for nodes that are there, and for about how long; empty: it does not."""
        now_ms = monotonic_ms()
        if now_ms - self._outlooks_ms >= _OUTLOOK_MS:
            self._outlooks = job_outlooks(self._demands(), self._offers(), self._turn_ms)
            self._outlooks_ms = now_ms
        return self._outlooks.get(job_id, "")

    async def watch(self, lost_after_ms: Milliseconds) -> None:
        """Report nodes that went silent, for ever."""
        while True:
            await asyncio.sleep(min(1.0, lost_after_ms / 4000))
            await self.lose_overdue(lost_after_ms)
            self._tell_waiting_kinds()

    def _tell_waiting_kinds(self) -> None:
        """Tell idle nodes which work they get none of, where that has changed."""
        now_ms = monotonic_ms()
        if now_ms - self._told_ms < _TELL_MS:
            return
        self._told_ms = now_ms
        idle_offers = [each for each in self._offers() if each.job_id is None]
        if len(idle_offers) > _IDLE_MOST:
            return
        demands = self._demands()
        for offer in idle_offers:
            stream = self._nodes.streams.get(offer.node)
            kinds = waiting_kinds(demands, offer)
            if stream is not None and kinds != stream.waiting_kinds:
                stream.waiting_kinds = kinds
                stream.send(_waiting_message(kinds))

    async def lose_overdue(self, lost_after_ms: Milliseconds) -> None:
        """Report nodes that went silent. One may be back while others are reported."""
        for node in self._nodes.overdue(lost_after_ms):
            if self._nodes.is_overdue(node, lost_after_ms, monotonic_ms()):
                silent_s = (self._nodes.silent_ms(node) or lost_after_ms) // 1000
                await self.lose(node, f"not heard of for {silent_s} s")

    async def lose(self, node: NodeId, reason: str) -> None:
        """A node is gone: its job goes on without it."""
        log.info("a node is lost", node=node, reason=reason)
        self._nodes.forget(node)
        runtime = self.runtime_of(node)
        if runtime is not None:
            event = NodeLost(at_ms=_NOW, node=node, reason=reason)
            await self._driver.insist(runtime.job.job_id, event)
        self.review()

    async def drain(self, node: NodeId, reason: str) -> None:
        """A node takes no further work; its job lets it finish what it holds."""
        self._nodes.drain(node, reason)
        runtime = self.runtime_of(node)
        if runtime is not None:
            event = NodeDraining(at_ms=_NOW, node=node, reason=reason)
            await self._driver.insist(runtime.job.job_id, event)
        self.review()

    def runtime_of(self, node: NodeId) -> WorkRuntime[Any] | None:
        """The job that the node is a present member of."""
        return next(
            (runtime for runtime in self._open_runtimes() if _is_present(runtime.job, node)), None
        )

    def _open_runtimes(self) -> Iterator[WorkRuntime[Any]]:
        return (
            runtime
            for runtime in self._driver.runtimes.values()
            if not self._kind_of(runtime).core.has_ended(runtime.job)
        )

    def _kind_of(self, runtime: WorkRuntime[Any]) -> ShellKind:
        return self._driver.kinds.of_job(runtime.job)

    def _demands(self) -> list[JobDemand]:
        demands = [
            self._demand(runtime)
            for runtime in self._open_runtimes()
            if self._kind_of(runtime).uses_nodes(runtime.job) and not runtime.is_recovering
        ]
        # A job that was paused waits from when it is back.
        self._turns = {each.job_id: self._turns[each.job_id] for each in demands}
        return demands

    def _demand(self, runtime: WorkRuntime[Any]) -> JobDemand:
        demand = self._kind_of(runtime).demand(runtime)
        return self._with_turn(replace(demand, excluded=self._exclusions(runtime.job)))

    def _with_turn(self, demand: JobDemand) -> JobDemand:
        """The demand with how long it has had its least nodes, or been without them."""
        now_ms, before = monotonic_ms(), self._turns.get(demand.job_id)
        if before is None or before.is_served is not demand.is_served:
            has_had_turn = before is not None and (before.has_had_turn or before.is_served)
            before = self._turns[demand.job_id] = _Turn(demand.is_served, now_ms, has_had_turn)
        passed_ms = Milliseconds(now_ms - before.since_ms)
        if demand.is_served:
            return replace(demand, served_ms=passed_ms)
        return replace(demand, waited_ms=passed_ms, has_had_turn=before.has_had_turn)

    def _exclusions(self, job: LeasedJob) -> dict[NodeId, str]:
        """Nodes without work in a job. One that left is tried again, unless others were due it."""
        streams = self._nodes.streams
        return {
            node: member.exclusion
            for node, member in job.members.items()
            if member.exclusion
            and (
                member.is_present or (node in streams and job.job_id in streams[node].recalled_from)
            )
        }

    def _offers(self) -> list[NodeOffer]:
        places: dict[NodeId, JobId] = {}
        recalls: dict[tuple[NodeId, JobId], Milliseconds] = {}
        for runtime in self._open_runtimes():
            for node, member in runtime.job.members.items():
                if member.is_present:
                    places[node] = runtime.job.job_id
                key = (node, runtime.job.job_id)
                if member.is_leaving and key in self._recalled_ms:
                    recalls[key] = self._recalled_ms[key]
        self._recalled_ms, now_ms = recalls, monotonic_ms()
        since_ms = {node: at_ms for (node, _), at_ms in recalls.items()}
        return [
            replace(
                _offer(session, places.get(node), self._nodes),
                leaving_ms=Milliseconds(now_ms - since_ms.get(node, now_ms)),
                health=self._health.rank(node),
                health_exclusion=self._exclusion_reason(node),
            )
            for node, session in self._nodes.streams.items()
            if not self._nodes.drain_reason(node)
        ]

    def _exclusion_reason(self, node: NodeId) -> str:
        exclusion = self._health.exclusion(node)
        return "" if exclusion is None else exclusion.reason

    def fitting_nodes(self, demand: JobDemand) -> int:
        """How many nodes that take work now could work for a new job."""
        return len(self.offers_for(demand)[0])

    def offers_for(self, demand: JobDemand) -> tuple[list[NodeOffer], str]:
        """Nodes that take work now and could work for a new job, and why another one could not;
        empty: there is none.
        """
        reasons = [
            (offer, offer.pause_reason or unfit_reason(demand, offer)) for offer in self._offers()
        ]
        fitting_offers = [offer for offer, reason in reasons if not reason]
        return fitting_offers, next((reason for _, reason in reasons if reason), "")

    def unmet_reasons(self, runtime: WorkRuntime[Any]) -> dict[NodeId, str]:
        """Connected nodes that do not meet a job's requirements, with the reason."""
        unmet_reason = self._kind_of(runtime).unmet_reason
        reasons = {
            node: unmet_reason(runtime, stream) for node, stream in self._nodes.streams.items()
        }
        return {node: reason for node, reason in reasons.items() if reason}

    def idle_reason(self, node: NodeId) -> str:
        """Why no job has a connected node."""
        if exclusion := self._exclusion_reason(node):
            return exclusion
        runtimes = list(self._open_runtimes())
        for runtime in runtimes:
            kind = self._kind_of(runtime)
            reason = kind.unmet_reason(runtime, self._nodes.streams[node])
            if reason and kind.uses_nodes(runtime.job):
                return f"not for {runtime.job.job_id}: {reason}"
        return "no job can use it now" if runtimes else "no job is open"

    async def _carry_out(self, move: Move) -> None:
        if isinstance(move, Withdraw):
            pause = NodePaused(at_ms=_NOW, node=move.node, reason=move.reason)
            await self._driver.insist(move.job_id, pause)
            return
        if not isinstance(move, Lend):
            if (stream := self._nodes.streams.get(move.node)) is not None:
                stream.recalled_from.add(move.job_id)
            self._recalled_ms[move.node, move.job_id] = monotonic_ms()
            event = NodeDraining(at_ms=_NOW, node=move.node, reason=move.reason)
            await self._driver.insist(move.job_id, event)
            return
        before = self.runtime_of(move.node)
        if before is not None and before.job.job_id != move.job_id:
            # Only a job that cannot use its nodes now, such as a paused one, is passed over.
            phase = self._kind_of(before).core.phase_name(before.job)
            reason = f"lent to {move.job_id} while {before.job.job_id} is {phase}"
            loss_event = NodeLost(at_ms=_NOW, node=move.node, reason=reason)
            await self._driver.insist(before.job.job_id, loss_event)
        if move.node in self._nodes.streams:
            await self._join(move.job_id, move.node)

    async def _join(self, job_id: JobId, node: NodeId) -> None:
        """Make a node a member; what became of it while that was written is caught up with."""
        tokens = await asyncio.to_thread(self._journal.joined_tokens, node)
        stream = self._nodes.streams.get(node)
        memory_bytes = Bytes(stream.capabilities.memory_bytes if stream is not None else 0)
        token = min(tokens, default="")
        event = NodeJoined(
            at_ms=_NOW,
            node=node,
            token=token,
            memory_bytes=memory_bytes,
            address=stream.address_digest if stream is not None else "",
            queues_work=stream is not None and stream.queues_work,
        )
        if await self._driver.insist(job_id, event):
            return
        if self._nodes.silent_ms(node) is None:
            await self.lose(node, "lost while it joined")
        elif reason := self._nodes.drain_reason(node):
            await self._driver.insist(job_id, NodeDraining(at_ms=_NOW, node=node, reason=reason))


def _offer(session: ControlStream, job_id: JobId | None, nodes: ConnectedNodes) -> NodeOffer:
    return NodeOffer(
        session.node,
        job_id,
        session.capabilities.workloads,
        nodes.pause_reason(session.node),
        session.features,
        session.capabilities.data_names,
        session.capabilities.torch,
        session.capabilities.lacking_operators,
        session.capabilities.optimizers,
        session.signs_results,
        session.signs_counts,
        nodes.trust_labels(session.node),
        share_permille=session.capabilities.share_permille,
    )


def _waiting_message(kinds: WaitingKinds) -> node_pb2.ControlResponse:
    messages = [spec_pb2.WaitingKind(kind=each.kind, reason=each.reason) for each in kinds]
    return node_pb2.ControlResponse(waiting_kinds=spec_pb2.WaitingKinds(kinds=messages))


def _is_present(job: LeasedJob, node: NodeId) -> bool:
    member = job.members.get(node)
    return member is not None and member.is_present
