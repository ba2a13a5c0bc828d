"""Drives a ring: passes on what its machine decides, and hidden states from stage to stage.

Stages have no way to each other. What one gives comes over the control stream that its node dials,
and goes on over the next one's: two legs a hop, of which the driver, at the relay, costs none.
Hidden states are sealed by one stage for the next one, which judges them: the driver holds their
size alone against what the pass may have, and passes them on to that stage and nobody else.
Messages have `MESSAGE_BYTES_MOST` each, a ring has as many passes under way as keep its stages at
work, and all rings together keep to the relay's rate.
"""

import asyncio
from collections.abc import Sequence

import structlog

from coordinator.core.rings.ring import advance, rejection
from coordinator.core.rings.ring_events import (
    DropSession,
    PassReturned,
    ReplayStates,
    RingCommand,
    RingEvent,
    SendPass,
    SessionClosed,
    SessionOpened,
    StageBecameReady,
    StageLost,
    StatesReplayed,
)
from coordinator.core.rings.ring_state import Ring, RingLimits, RingStage, StagePace
from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import (
    PendingRequest,
    RelayedStates,
    RingCall,
    RingPorts,
    StageFault,
    StageSeat,
    continuation,
    has_memory,
    membership_fault,
    pass_request,
    ring_readiness,
    seal_fault,
    session_results,
)
from coordinator.shell.kinds.serving.ring_requests import StageRequests
from coordinator.shell.kinds.serving.ring_trainer import RingTrainer
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.stage_checks import StageChecks
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet import Fleet
from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import ModelCut
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerPart,
    AnswerRefused,
    ModelCall,
)
from hypergpu.serving.check_messages import HandStates, TellDigests
from hypergpu.serving.stage_messages import (
    STATES_BYTES_MOST,
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    ForgetSession,
    JoinRing,
    ReplayRows,
    StageJudged,
    StageReady,
    StageRefused,
    StageReply,
    StageRequest,
    StageRows,
    unpack_stage_reply,
)
from hypergpu.tensors.hidden_states import state_codec
from hypergpu.v1 import work_pb2

PASS_TOKENS_MOST = 256
"""Tokens of a pass at most, so that a long prompt holds nobody up for long."""
INCOMPLETE_S = 60.0
"""How long conversations wait for another holder of lost layers."""

log = structlog.get_logger(__name__)


class RingDriver:
    """The ring of one served model.

    Args:
        runtime: The job.
        fleet: Its nodes.
        cut: How the model is cut.
        ports: Where the ring reports to.
        limit: Of the bytes that stages of all rings send each other.
        number: The ring, from 0 on, of several of a training.
    """

    def __init__(
        self,
        runtime: ServeRuntime,
        fleet: Fleet,
        cut: ModelCut,
        ports: RingPorts,
        limit: RelayLimit,
        number: int = 0,
    ) -> None:
        self._runtime = runtime
        self._fleet = fleet
        self._ports = ports
        self._row_bytes = state_codec(cut.codec).row_bytes(cut.hidden_size)
        self._layers = cut.layers
        self._limits = RingLimits(min(PASS_TOKENS_MOST, STATES_BYTES_MOST // self._row_bytes))
        self._spans: tuple[LayerSpan, ...] = ()
        self._seats: dict[LayerSpan, StageSeat] = {}
        self._ring: Ring | None = None
        self._calls: dict[int, RingCall] = {}
        self.sending = RelaySending(runtime.job.job_id, limit)
        """Sends stages what they are told."""
        self._requests = StageRequests(
            self.sending,
            pace_of=self._stated_pace,
            report_fault=self._fault,
            row_bytes=self._row_bytes,
        )
        self._states = RelayedStates()
        self._incomplete: asyncio.TimerHandle | None = None
        self.trainer: RingTrainer | None = None
        """Trains an adapter before the ring answers; None: there is none to train."""
        self.checks = StageChecks(self, ports.checks, self._requests, self._limits.tokens_most)
        """Has conversations computed again."""
        self.layer_us = ports.layer_us
        self._number = number
        self.ready_standby: tuple[NodeId, int] | None = None
        """The node that holds a stage ready, with its lease."""

    @property
    def seats(self) -> Sequence[StageSeat]:
        """Stages that are there, in order."""
        return [self._seats[span] for span in self._spans if span in self._seats]

    def begin(self, session: int, call: ModelCall) -> None:
        """Answer a call. Its parts are delivered by the session's number."""
        if refusal := self.sending.refusal:
            self._ports.deliver(session, [AnswerRefused(refusal, is_lasting=False)], True)
            return
        ring_call = self._calls[session] = RingCall(call)
        last = len(self._spans) - 1
        if self._ring is not None and self._ring.stages[last].is_ready:
            self._begin_answer(session, ring_call.call)

    def _begin_answer(self, session: int, call: ModelCall) -> None:
        try:
            self._tell(len(self._spans) - 1, BeginAnswer(session, call))
        except HyperGPUError as error:
            self._end_call(session, AnswerRefused(error.message))

    def cancel(self, session: int) -> None:
        """Answer a call no more."""
        if self._calls.pop(session, None) is not None:
            self._advance_if_accepted(SessionClosed(session))

    def drop_node(self, node: NodeId) -> None:
        """A node's stream ended."""
        if self.ready_standby is not None and self.ready_standby[0] == node:
            self._note_standby(None)  # It says so again if it still is.
        for seat in [each for each in self.seats if each.node == node]:
            self._lose(seat)

    def review_leases(self) -> None:
        """Let go of stages whose lease is void, and of the ring where its layers are cut anew."""
        stages = self._runtime.job.stages_of(self._number)
        for seat in self.seats:
            replica = stages.get(seat.node)
            if replica is None or (replica.lease, replica.span) != (seat.lease, seat.span):
                self._lose(seat)
        spans = {each.span for each in stages.values() if each.span is not None}
        if spans - set(self._spans) and not self._runtime.job.free_layers(self._number):
            self._end("its layers were placed anew")
            self._spans = tuple(sorted(spans))
            if self.trainer is not None:
                self.trainer.set_spans(self._spans)
                for seat in self.seats:
                    self.trainer.take_seat(seat)

    def hear(self, stream: ControlStream, output: work_pb2.WorkOutput) -> None:
        """Take in what a stage says under its lease.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is malformed.
        """
        if output.call and self.trainer is not None and self.trainer.hear(stream, output):
            return
        reply = unpack_stage_reply(output.body) if output.body else None
        if not output.call:
            if isinstance(reply, StageReady):
                self._seat(stream, output.lease, reply)
            return
        order = self._requests.take(output.call)
        seat = self._seat_at(order.stage) if order is not None else None
        if order is None and not self.checks.hear(stream.node, output.call, reply):
            self._note_unasked(stream.node, len(output.body))
        sender = (stream.node, output.lease)
        if order is None or seat is None or (seat.node, seat.lease) != sender:
            return
        if reply is None:  # Its work is not there: it says so once it is again.
            self._lose(seat)
            reason = "its worker has not the layers any more"
            self._ports.report_fault(StageFault(seat.node, seat.lease, reason, is_absent=True))
        elif reason := self._take(order, reply):
            self._fault(order.stage, reason)

    def _note_unasked(self, node: NodeId, size_bytes: int) -> None:
        """A stage gave what nobody asked for, or not any more."""
        stages = [self._spans.index(each.span) for each in self.seats if each.node == node]
        reason = self._requests.unasked_fault(node, size_bytes)
        if reason and stages:
            self._fault(stages[0], reason)

    def _seat(self, stream: ControlStream, lease: int, ready: StageReady) -> None:
        """A node holds its layers."""
        self.review_leases()
        replica = self._runtime.job.leases.get(stream.node)
        if replica is None or replica.span is None or replica.lease != lease:
            return
        self.layer_us[stream.node] = ready.layer_us
        seat = StageSeat(stream.node, lease, replica.span, stream, ready)
        if replica.is_standby:
            self._note_standby(seat)
            return
        if fault := seal_fault(self._runtime.job.job_id, seat):
            self._ports.report_fault(StageFault(seat.node, lease, fault, is_lasting=True))
            return
        if (before := self._seats.get(replica.span)) is not None:
            self._lose(before)
        self._seats[replica.span] = seat
        self._ports.note_stages()
        if self.trainer is None or self.trainer.take_seat(seat):
            self.join_seat(seat)

    def _note_standby(self, seat: StageSeat | None) -> None:
        self.ready_standby = None if seat is None else (seat.node, seat.lease)
        is_known = seat is not None and not seal_fault(self._runtime.job.job_id, seat)
        self.checks.set_checker(seat if is_known else None)

    def join_seat(self, seat: StageSeat) -> None:
        """Let a stage that is there answer."""
        if self._ring is None:
            self._form_if_whole()
        elif seat.span in self._spans:
            self._tell_members()
            self._join(self._spans.index(seat.span))

    def give_up_seat(self, seat: StageSeat, reason: str = "") -> None:
        """See `TrainedStages.give_up_seat`."""
        if reason and seat.span in self._spans:
            self._fault(self._spans.index(seat.span), reason)
        else:
            self._lose(seat)

    def _tell_members(self) -> None:
        """Once all stages are there, tell each who the others are, with their signed keys."""
        if self._ring is None or len(self.seats) < len(self._spans):
            return
        members = tuple(seat.member for seat in self.seats)
        for stage in range(len(self._spans)):
            self._tell(stage, JoinRing(self._ring.epoch, stage, members))

    def _form_if_whole(self) -> None:
        if not self._spans or len(self.seats) < len(self._spans):
            return
        if self._ring is not None or (self.trainer is not None and not self.trainer.is_complete):
            return
        self._ring = Ring(tuple(RingStage() for _ in self._spans), self._limits)
        self._tell_members()
        for stage in range(len(self._spans)):
            self._join(stage)
        readies = [seat.ready for seat in self.seats]
        self._ports.note_ready(ring_readiness(readies, self._runtime.job.request.dtype))

    def _join(self, stage: int) -> None:
        """A stage of the ring is there: the last one is told of the calls that are open."""
        if stage == len(self._spans) - 1:
            for session, ring_call in [*self._calls.items()]:
                self._begin_answer(session, continuation(session, ring_call, self._ring))
        self._advance_if_accepted(StageBecameReady(stage, self._pace(stage)))
        if self._ring is not None and self._ring.is_whole and self._incomplete is not None:
            self._incomplete.cancel()
            self._incomplete = None

    def _pace(self, stage: int) -> StagePace:
        seat = self._seats[self._spans[stage]]
        way_us = self._fleet.readings.reading(seat.node).round_trip_us.mean / 2
        return StagePace(seat.ready.pass_us, seat.ready.token_us, way_us)

    def _lose(self, seat: StageSeat) -> None:
        """A stage is gone, with what it was told."""
        self._seats.pop(seat.span, None)
        if self.trainer is not None:
            self.trainer.lose_seat(seat)
        self._ports.note_stages()
        if self._ring is None or seat.span not in self._spans:
            return
        self.checks.abandon(seat.node)
        stage = self._spans.index(seat.span)
        epoch = self._ring.epoch
        self._advance_if_accepted(StageLost(stage))
        if self._ring.epoch != epoch:
            self._states.clear()
        self._requests.drop_stage(stage)
        if self._incomplete is None:
            loop = asyncio.get_running_loop()
            reason = "no other node came to hold the layers of a lost one"
            self._incomplete = loop.call_later(INCOMPLETE_S, self._end, reason)

    def _end(self, reason: str) -> None:
        """Forget the ring. Stages that are there form the next one."""
        if self._incomplete is not None:
            self._incomplete.cancel()
            self._incomplete = None
        if self._ring is None:
            return
        self.checks.abandon()
        for stage in range(len(self._spans)):
            for session in self._ring.sessions:
                self.tell_stage(stage, ForgetSession(session))
        self._ring = None
        self._calls.clear()
        self._requests.clear()
        self._states.clear()
        self._ports.end(reason)

    def _take(self, order: PendingRequest, reply: StageReply) -> str:
        """Take in an answer of a stage; gives why it cannot be right, or nothing."""
        if isinstance(order.request, JoinRing | ForgetSession):
            return membership_fault(order.request, reply)
        if isinstance(order.request, TellDigests | HandStates):
            return self.checks.take(order.stage, order.request, reply)
        return self._take_answer(order, reply)

    def _take_answer(self, order: PendingRequest, reply: StageReply) -> str:
        match order.request, reply:
            case BeginAnswer(session=session), AnswerOpened(tokens=tokens):
                self._open(session, tokens)
            case BeginAnswer(session=session), StageRefused():
                refusal = AnswerRefused(reply.reason, reply.is_lasting, reply.is_too_long)
                self._end_call(session, refusal)
            case ReplayRows() as request, StageRows(states=states):
                return self._take_replay(order, request, states)
            case ComputePass() as request, StageRefused():
                return self._take_refusal(order, request, reply)
            case ComputePass() as request, StageRows(states=states):
                return self._take_states(order, request, states)
            case ComputePass() as request, StageJudged():
                return self._take_judgement(order, request, reply)
            case _:
                return f"it answered with {type(reply).__name__}"
        return ""

    def _open(self, session: int, prompt: tuple[int, ...]) -> None:
        ring_call = self._calls.get(session)
        if ring_call is None or self._ring is None or session in self._ring.sessions:
            return
        ring_call.prompt_tokens = len(prompt)
        tokens = (*prompt, *ring_call.call.tokens_out)
        ring_call.epoch = self._ring.epoch
        others = [each for number, each in self._calls.items() if number != session]
        if not has_memory(self.seats, (*others, ring_call)):
            reason = "the stages have no memory left for this conversation"
            self._end_call(session, AnswerRefused(reason, is_lasting=False))
            return
        self._advance_if_accepted(SessionOpened(session, tokens))

    def _take_replay(self, order: PendingRequest, request: ReplayRows, states: bytes) -> str:
        if fault := self._requests.size_fault(states, request.count):
            return fault
        self._states.replayed[request.session] = states
        count = request.count if states else 0
        event = StatesReplayed(request.session, order.epoch, request.start, count)
        self._advance_if_accepted(event)
        return ""

    def _take_refusal(
        self, order: PendingRequest, request: ComputePass, reply: StageRefused
    ) -> str:
        """A stage could not compute a pass: its sessions end, or the stage before is at fault."""
        if self._ring is None or order.epoch != self._ring.epoch:
            return ""
        if reply.blames_input and order.stage:
            self.checks.blame(order.stage, order.epoch, reply.reason)
            return ""
        for segment in request.segments:
            self._end_call(segment.session, AnswerRefused(reply.reason, is_lasting=False))
        return f"it could not compute a pass: {reply.reason}"

    def _take_states(self, order: PendingRequest, request: ComputePass, states: bytes) -> str:
        if fault := self._requests.size_fault(states, request.rows if request.wants_output else 0):
            return fault
        event = PassReturned(order.stage, order.number, order.epoch)
        self._states.passed[order.number] = states
        self._advance_if_accepted(event)
        self._states.passed.pop(order.number, None)
        return ""

    def _take_judgement(
        self, order: PendingRequest, request: ComputePass, reply: StageJudged
    ) -> str:
        results = session_results(reply)
        if results is None:
            return "its tokens are not those of its parts"
        event = PassReturned(order.stage, order.number, order.epoch, results)
        if self._ring is None or order.epoch != self._ring.epoch:
            return ""
        if reason := rejection(self._ring, event):
            return reason
        self._advance(event)
        for result, segment in zip(results, reply.segments, strict=True):
            self._deliver(result.session, list(segment.parts), has_ended=result.has_ended)
        return ""

    def _deliver(self, session: int, parts: list[AnswerPart], *, has_ended: bool) -> None:
        ring_call = self._calls.get(session)
        if ring_call is None:
            return
        if not ring_call.has_begun:
            ring_call.has_begun = True
            parts = [AnswerBegun(ring_call.prompt_tokens), *parts]
        if has_ended:
            del self._calls[session]
        self._ports.deliver(session, parts, has_ended)

    def _end_call(self, session: int, refusal: AnswerRefused) -> None:
        if self._calls.pop(session, None) is not None:
            self._advance_if_accepted(SessionClosed(session))
            self._ports.deliver(session, [refusal], True)

    def _fault(self, stage: int, reason: str) -> None:
        seat = self._seat_at(stage)
        if seat is not None:
            log.warning("a stage is at fault", node=seat.node, reason=reason)
            self._lose(seat)
            self._ports.report_fault(StageFault(seat.node, seat.lease, reason))

    def _seat_at(self, stage: int) -> StageSeat | None:
        return self._seats.get(self._spans[stage]) if stage < len(self._spans) else None

    def _advance_if_accepted(self, event: RingEvent) -> None:
        if self._ring is not None and not rejection(self._ring, event):
            self._advance(event)

    def _advance(self, event: RingEvent) -> None:
        if self._ring is not None:
            self._ring, commands = advance(self._ring, event)
            for command in commands:
                self._perform(command)

    def _perform(self, command: RingCommand) -> None:
        match command:
            case SendPass():
                is_last = command.stage == len(self._spans) - 1
                request = pass_request(command, self._states.take(command), is_last=is_last)
                self._tell(command.stage, request, command.number)
            case ReplayStates():
                replay = ReplayRows(command.session, command.start, command.count)
                self._tell(command.stage, replay)
            case DropSession(session=session):
                ring_call = self._calls.get(session)
                if not self.checks.keep(session, command.tokens, ring_call, self._ring):
                    for stage in range(len(self._spans)):
                        self.tell_stage(stage, ForgetSession(session))

    @property
    def stage_count(self) -> int:
        """See `CheckedRing.stage_count`."""
        return len(self._spans)

    def tell_stage(self, stage: int, request: StageRequest) -> None:
        """See `CheckedRing.tell_stage`."""
        if self._seat_at(stage) is not None:
            self._tell(stage, request)

    def _tell(self, stage: int, request: StageRequest, pass_number: int = 0) -> None:
        """Send a stage what it is to do.

        Raises:
            HyperGPUError: REQUEST_INVALID, a call is too large for a message.
        """
        seat = self._seat_at(stage)
        if seat is not None and self._ring is not None:
            self._requests.send(seat, PendingRequest(stage, request, self._ring.epoch, pass_number))

    def _stated_pace(self, stage: int) -> StagePace:
        stages = () if self._ring is None else self._ring.stages
        return stages[stage].pace if stage < len(stages) else StagePace()
