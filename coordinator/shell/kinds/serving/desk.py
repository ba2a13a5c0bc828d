"""Calls to one served model: each goes to a replica, and on to another one where that is lost.

Theory of operation. A replica is *ready* once its node has said so under its lease, on the stream
that is open now. A call waits in line until `choose_replica` names a replica. What comes of it is
passed on as it comes, and counted then (`token_counter`). Where the node's stream ends, the lease
is void, the replica starts anew or
says nothing for too long while another one is free, the call goes to another replica with the
tokens that are out: they never change and never come again. All of it is in memory alone: a
coordinator that restarts has forgotten every call, and its callers ask again.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from functools import partial

from coordinator.core.serving.budget import spent_reason, units_most
from coordinator.core.serving.prompt_prefixes import prompt_prefixes
from coordinator.core.serving.routing import (
    RouteChoice,
    choose_replica,
    queue_place,
)
from coordinator.core.serving.state import ServePhase
from coordinator.shell.kinds.serving.answer_checks import AnswerChecks, figures_in
from coordinator.shell.kinds.serving.open_call import OpenCall, RouteLost, RouteTold, with_seed
from coordinator.shell.kinds.serving.ready_replica import ReadyReplica
from coordinator.shell.kinds.serving.replica_link import ReplicaLink, StreamLink
from coordinator.shell.kinds.serving.ring_desk import (
    RING,
    CallReports,
    RingDesk,
    RingDeskPorts,
)
from coordinator.shell.kinds.serving.ring_driver import RingDriver
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.token_counter import (
    AnswerCounter,
    TokenCounter,
    UnitTally,
)
from coordinator.shell.kinds.serving.version_offers import VersionOffers
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet import Fleet
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    AnswerVector,
    ModelCall,
    ReplicaReady,
    unpack_parts,
)
from hypergpu.serving.serve_request import Replica
from hypergpu.units import Milliseconds, several
from hypergpu.v1 import work_pb2

WAITING_MOST = 256
"""Calls that wait for a replica, of one model."""
WAIT_S = 60.0
"""How long a call waits for a replica."""
_LOOK_S = 0.5
_SILENCE_MS_LEAST = 2_000
_SILENCE_TOKENS = 20
"""A replica that says nothing for as long as so many tokens take may be gone."""
_FIRST_SILENCE_MS = 60_000
"""The same before the first token: a long prompt takes its time."""
_NUMBER_BITS = 48


class CallDesk:
    """The calls of one served model."""

    def __init__(self, runtime: ServeRuntime, fleet: Fleet, reports: CallReports) -> None:
        self._runtime = runtime
        self._reports = reports
        self._report_count = reports.report_count
        self.tally = UnitTally()
        """Units that were counted and are not journalled yet."""
        self.checks = AnswerChecks(lambda: runtime.job, self, reports.report_check)
        """Secret checks of the model's answers."""
        self._fleet = fleet
        self._replicas: dict[NodeId, ReadyReplica] = {}
        self._waiting: deque[OpenCall] = deque()
        self._reserving: set[OpenCall] = set()
        """Calls for whose answers units are set aside."""
        self.used_ms = monotonic_ms()  # when a call came or ended last, or a replica became ready
        self._prefix_key = secrets.token_bytes(32)
        self._changed = asyncio.Event()
        self._ring_desk = self._opened_ring(reports)
        """What stands between calls and a ring; None: nodes hold the model whole."""
        # Answers to calls of a coordinator that was here before are nobody's.
        self._numbers = itertools.count(secrets.randbits(_NUMBER_BITS) + 1)
        self._offers = VersionOffers(reports.newest_offer, lambda: next(self._numbers))

    def _opened_ring(self, reports: CallReports) -> RingDesk | None:
        cut = self._runtime.job.request.cut
        if cut is None:
            return None

        def note_ready(
            link: ReplicaLink, ready: ReplicaReady, counter: AnswerCounter | None
        ) -> None:
            self._add(RING, ReadyReplica(RING, 0, link, ready, counter))

        def deliver(number: int, parts: list[AnswerPart], is_last: bool) -> None:  # noqa: FBT001
            replica = self._replicas.get(RING)
            call = replica.calls.get(number) if replica is not None else None
            if replica is not None and call is not None:
                self._take_parts(replica, call, parts, is_last=is_last)

        def end(reason: str) -> None:
            self._drop(RING, reason)

        ports = RingDeskPorts(note_ready, deliver, end, reports, self.tally)
        return RingDesk(self._runtime, self._fleet, cut, ports)

    @property
    def ring(self) -> RingDriver | None:
        """Drives the ring; None: nodes hold the model whole."""
        return self._ring_desk.driver if self._ring_desk is not None else None

    @property
    def ring_drivers(self) -> Sequence[RingDriver]:
        """Drive all rings of a training, or the model's only one; empty: nodes hold it whole."""
        return self._ring_desk.drivers if self._ring_desk is not None else ()

    @property
    def ready_replicas(self) -> int:
        """Replicas that answer."""
        return len(self._replicas)

    @property
    def open_calls(self) -> int:
        """Calls that replicas are answering."""
        return sum(len(replica.calls) for replica in self._replicas.values())

    @property
    def waiting_calls(self) -> int:
        """Calls that wait for a replica."""
        return len(self._waiting)

    @property
    def tokens_most(self) -> int:
        """Tokens of a prompt and its answer that every ready replica takes; 0: none is ready."""
        return min((each.ready.tokens_most for each in self._replicas.values()), default=0)

    async def answer(self, call: ModelCall) -> AsyncGenerator[RouteTold | AnswerPart, None]:
        """The parts of an answer, as they come.

        Raises:
            HyperGPUError: LIMIT_REACHED, too many calls wait, or the budget does not cover it;
                NOT_READY, no replica became free; JOB_PHASE, the model is not served any more.
        """
        prefixes = prompt_prefixes(call, self._prefix_key)
        open_call = OpenCall(next(self._numbers), with_seed(call), prefixes)
        self.used_ms = monotonic_ms()
        try:
            while True:
                yield await self._route(open_call)
                is_over = False
                async for part in self._parts_of_route(open_call):
                    is_over = isinstance(part, AnswerEnded | AnswerRefused)
                    yield part
                if is_over:
                    return
        finally:
            self._withdraw(open_call)
            self.used_ms = monotonic_ms()

    async def _parts_of_route(self, call: OpenCall) -> AsyncIterator[AnswerPart]:
        """What comes of a call from the replica that it is at, until that ends."""
        end: AnswerPart | None = None
        try:
            async for part in self._counted_parts(call):
                end = part
                yield part
        finally:
            call.end_count(end)

    async def _counted_parts(self, call: OpenCall) -> AsyncIterator[AnswerPart]:
        while True:
            part = await self._next_part(call)
            if call.node is not None and (reason := call.route_fault(part)):
                call.refusals[call.node] = reason
                self._withdraw(call)
                return
            match part:
                case RouteLost():
                    return
                case AnswerBegun():
                    call.note_read(part.prompt_tokens)
                    if not call.has_begun:
                        call.has_begun = True
                        yield part
                case AnswerToken() | AnswerVector():
                    call.note_output(part)
                    yield part
                case ReplicaReady():
                    pass
                case _:
                    yield part
                    return

    async def _next_part(self, call: OpenCall) -> AnswerPart | RouteLost:
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    return await call.inbox.get()
            except TimeoutError:
                self._review_silence(call)

    def _review_silence(self, call: OpenCall) -> None:
        """Take a call from a replica that says nothing, if another one could go on."""
        replica = self._replicas.get(call.node) if call.node is not None else None
        if replica is None or call.node is None:
            return
        limit_ms = _FIRST_SILENCE_MS
        if call.has_begun:
            pace_ms = replica.ms_per_token * max(1, len(replica.calls))
            limit_ms = max(_SILENCE_MS_LEAST, round(_SILENCE_TOKENS * pace_ms))
        silent_ms = monotonic_ms() - call.heard_ms
        if silent_ms < limit_ms or self._choice(call, beside=call.node).node is None:
            return
        reason = f"its replica said nothing for {silent_ms} ms"
        call.refusals[call.node] = reason
        self._withdraw(call)
        call.end_route(reason)

    async def _route(self, call: OpenCall) -> RouteTold:
        """Wait for a replica and give it the call."""
        if len(self._waiting) >= WAITING_MOST:
            detail = f"{several(len(self._waiting), 'call')} wait for {self._model} already"
            raise HyperGPUError(Reason.LIMIT_REACHED, detail, fix="ask again later")
        place, call.queue_reason = queue_place(
            [each.queue_entry for each in self._waiting], call.queue_entry
        )
        self._waiting.insert(place, call)
        choice = RouteChoice(None, "")
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    self._require_served()
                    self._require_version(call)
                    choice = self._choice(call)
                    if choice.node is not None and self._waiting[0] is call:
                        return self._assign(call, choice.node, choice.reason)
                    await self._changed.wait()
        except TimeoutError:
            detail = f"{self._model} was not free within {WAIT_S:g} s: {choice.reason}"
            refusals = "; ".join(f"{node}: {why}" for node, why in call.refusals.items())
            detail = f"{detail} ({refusals})" if refusals else detail
            raise HyperGPUError(
                Reason.NOT_READY, detail, fix="ask again, or serve more replicas"
            ) from None
        finally:
            self._waiting.remove(call)
            self._wake()

    def _require_served(self) -> None:
        job = self._runtime.job
        if job.is_unloaded:
            self._reports.report_wanted()
        if job.phase is not ServePhase.SERVING:
            detail = f"{self._model} is {job.phase.value}: {job.reason}"
            raise HyperGPUError(Reason.JOB_PHASE, detail)
        if job.is_training:
            detail = f"{self._model} answers once its ring has trained it: {job.reason}"
            raise HyperGPUError(Reason.NOT_READY, detail, fix=f"hypergpu job watch {job.job_id}")

    def _require_version(self, call: OpenCall) -> None:
        """Go on with an answer by the version of its model that it began with, or not at all."""
        version = call.version
        if version is None or not call.tokens_out or not self._replicas:
            return
        if any(version in each.ready.versions for each in self._replicas.values()):
            return
        detail = f"the answer began with the model of round {version}, which is on no node any more"
        raise HyperGPUError(Reason.NOT_READY, detail, fix="ask again")

    def _choice(self, call: OpenCall, beside: NodeId | None = None) -> RouteChoice:
        loads = [
            replica.load(
                call,
                round_trip_ms=self._round_trip_ms(node),
                calls_most=self._replica.conversations_most,
                newest=self._runtime.job.tuning,
            )
            for node, replica in self._replicas.items()
            if self._may_take(node, replica, call) and node != beside
        ]
        return choose_replica(loads)

    def _round_trip_ms(self, node: NodeId) -> Milliseconds:
        if node == RING:
            return Milliseconds(0)  # There is one ring, and no choice.
        return Milliseconds(round(self._fleet.readings.reading(node).round_trip_us.mean / 1000))

    def _assign(self, call: OpenCall, node: NodeId, reason: str) -> RouteTold:
        replica = self._replicas[node]
        if not call.tokens_out:
            call.version = replica.ready.newest_version
        needed_units = self._affordable_units(call, replica)
        call.begin_route(node, next(self._numbers), monotonic_ms())
        call.reading.expected_tokens = replica.expected_tokens(call)
        replica.calls[call.number] = call
        if replica.counter is not None:
            replica.counter.begin(call.number, call.continuation())
            call.counter, call.reserved_units = replica.counter, needed_units
            call.units_per_token = self._runtime.job.request.units_per_token
            self._reserving.add(call)
        replica.link.send(call.number, call.continuation())
        shown_node = self._ring_desk.node if self._ring_desk is not None else node
        reason = f"{reason}; {call.queue_reason}" if call.queue_reason else reason
        return RouteTold(shown_node, reason, replica.ready.fingerprint_of(call.version))

    def _affordable_units(self, call: OpenCall, replica: ReadyReplica) -> int:
        """Units of the rest of an answer at most, which are set aside for it."""
        job, tokens_most = self._runtime.job, replica.ready.tokens_most
        needed_units = units_most(call.continuation(), tokens_most, job.request.units_per_token)
        reason = spent_reason(job, needed_units, self._open_units)
        if not reason:
            return needed_units
        detail = f"{self._model} takes no such call: {reason}"
        fix = "ask for fewer tokens, or serve it anew with a larger --budget"
        raise HyperGPUError(Reason.LIMIT_REACHED, detail, fix=fix)

    @property
    def _open_units(self) -> int:
        """Units that are counted and not journalled yet, and those set aside for open calls."""
        self._reserving = {call for call in self._reserving if call.reserved_units}
        reserved_units = sum(call.reserved_units for call in self._reserving)
        return self.tally.units + reserved_units

    def checkers(self) -> Iterable[NodeId]:
        """See `CheckReplicas.checkers`."""
        return [
            node
            for node, each in self._replicas.items()
            if each.ready.takes_checks and self._is_trusted(node)
        ]

    def _may_take(self, node: NodeId, replica: ReadyReplica, call: OpenCall) -> bool:
        is_refused = node in call.refusals
        return not is_refused and self._is_trusted(node) and replica.holds_version_of(call)

    def _is_trusted(self, node: NodeId) -> bool:
        """Whether texts may go to a node: an operator may have taken its label."""
        # Nodes of a ring were reviewed one by one.
        labels = self._runtime.job.request.trusted
        return node == RING or self._fleet.nodes.trust_labels(node).issuperset(labels)

    def send_check(self, node: NodeId, number: int, body: bytes) -> None:
        """See `CheckReplicas.send_check`."""
        self._replicas[node].link.send_body(number, body)

    def _withdraw(self, call: OpenCall) -> None:
        """Take a call from its replica, which need not go on."""
        node, call.node = call.node, None
        replica = self._replicas.get(node) if node is not None else None
        if node is None or replica is None or call.number not in replica.calls:
            return
        replica.end_call(call)
        replica.link.cancel(call.number)
        self._wake()

    def hear(self, stream: ControlStream, output: work_pb2.WorkOutput) -> None:
        """Take in what a node says of a call, or of its replica.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is malformed.
        """
        lease = self._runtime.job.leases.get(stream.node)
        if lease is None or lease.lease != output.lease:
            return
        if self._ring_desk is not None:
            self._ring_desk.hear(stream, lease, output)
            return
        parts = unpack_parts(output.body) if output.body else []
        if not output.call:
            self._note_ready(stream, output.lease, parts)
            return
        if self.checks.is_open(output.call, stream.node):
            if output.is_last:
                self.checks.take_figures(output.call, figures_in(parts))
            return
        replica = self._replicas.get(stream.node)
        if replica is not None:
            self._hear_replica(replica, output, parts)

    def _hear_replica(
        self, replica: ReadyReplica, output: work_pb2.WorkOutput, parts: list[AnswerPart]
    ) -> None:
        """Take in what a replica says of an offer or of a call."""
        call = replica.calls.get(output.call)
        if output.call == replica.offer:
            if output.is_last:
                self._offers.end(replica, parts)
                self.offer_versions()
        elif call is not None:
            self._take_parts(replica, call, parts, is_last=output.is_last)
            if output.is_last and not (
                parts and isinstance(parts[-1], AnswerEnded | AnswerRefused)
            ):
                call.refusals[replica.node] = "its replica was not there"
                call.end_route("its replica was not there")

    def _take_parts(
        self, replica: ReadyReplica, call: OpenCall, parts: list[AnswerPart], *, is_last: bool
    ) -> None:
        replica.note_parts(call, parts, self._round_trip_ms(replica.node))
        if is_last:
            replica.end_call(call)
            self._wake()
        try:
            for part in parts:
                call.inbox.put_nowait(part)
        except asyncio.QueueFull:
            self._withdraw(call)
            call.end_route("")
            call.inbox.put_nowait(AnswerRefused("the caller does not read"))

    def _note_ready(self, stream: ControlStream, lease: int, parts: list[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, ReplicaReady):
                replica = self._replicas.get(stream.node)
                if part.updates and replica is not None and replica.is_of(lease, stream):
                    replica.ready = part
                    self._wake()
                    continue
                self._drop(stream.node, "its replica started anew")
                counter = None
                # A node of the version before signs no counts, and holds only what pays nothing.
                if self._runtime.job.has_receipts and stream.signs_counts:
                    begin_window = partial(
                        self.checks.begin_window, stream.node, lease, self._report_count
                    )
                    counter = TokenCounter(begin_window, self.checks.take, self.tally)
                link = StreamLink(stream, self._runtime.job.job_id, lease)
                self._add(stream.node, ReadyReplica(stream.node, lease, link, part, counter))
        self.offer_versions()

    def offer_versions(self) -> None:
        """Offer the newest version of a training's model to replicas that hold an older one."""
        self._offers.send(self._replicas.values())

    def _add(self, node: NodeId, replica: ReadyReplica) -> None:
        self._replicas[node] = replica
        self.used_ms = monotonic_ms()
        for call in self._waiting:
            call.refusals.pop(node, None)
        self._wake()

    def drop_node(self, node: NodeId) -> None:
        """A node's stream ended: what it was answering goes on elsewhere."""
        if self._ring_desk is not None:
            self._ring_desk.drop_node(node)
        self._drop(node, "its node is gone")

    def review_leases(self) -> None:
        """Let go of replicas whose lease is void."""
        if self._ring_desk is not None:
            self._ring_desk.review_leases()
            self._wake()
            return
        leases = self._runtime.job.leases
        for node, replica in [*self._replicas.items()]:
            if node not in leases or leases[node].lease != replica.lease:
                self._drop(node, "its lease is void")
        self._wake()

    def _drop(self, node: NodeId, reason: str) -> None:
        replica = self._replicas.pop(node, None)
        if replica is not None:
            for call in replica.calls.values():
                call.end_route(reason)
            if replica.counter is not None:
                replica.counter.close()
            self.checks.drop_checker(node)
            self._wake()

    def _wake(self) -> None:
        change, self._changed = self._changed, asyncio.Event()
        change.set()

    @property
    def _model(self) -> str:
        return self._replica.model

    @property
    def _replica(self) -> Replica:
        return self._runtime.job.request.replica
