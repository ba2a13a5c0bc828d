"""Has a secret share of a ring's conversations computed again, stage by stage.

What is drawn is decided once a conversation is over, so that no stage can know. The stages then
keep what they have of it a little longer. The stage and both its neighbours first say by digests
what they received and sent; only then the stage and the one before it hand that to the node that
stands by, sealed for it, which computes the stage again. This process sees digests and a distance.

A conversation during which a stage was lost is not checked: its states are of several holders.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog
from msgspec.structs import replace

from coordinator.core.rings.ring_state import Ring
from coordinator.core.serving.events import StageChecked, StagesContradicted
from coordinator.core.serving.stage_honesty import may_check_stage, stage_check_share
from coordinator.shell.kinds.serving.check_adapters import AdapterGivingError, CheckAdapters
from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import CheckPorts, RingCall, StageEvent, StageSeat
from coordinator.shell.kinds.serving.ring_requests import StageRequests
from coordinator.shell.kinds.serving.token_counter import CountWindow
from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId
from hypergpu.serving.calls import AnswerClaim, CheckFigures, ModelCall
from hypergpu.serving.check_messages import (
    HandStates,
    RecomputeStage,
    StageCompared,
    StageFigures,
    StateDigests,
    TakeStates,
    TellDigests,
)
from hypergpu.serving.stage_messages import (
    ForgetSession,
    StageReply,
    StageRequest,
    StageRows,
    pack_stage_message,
)
from hypergpu.units import Milliseconds

WAITING_MOST = 4
"""Conversations that stages keep for checks at a time."""
CHECKER_S = 120.0
"""How long the checker may compute."""
_PERMILLE = 1_000
_NUMBER_BITS = 48
_NOW = Milliseconds(0)  # stamped by the driver
log = structlog.get_logger(__name__)


class CheckedRing(Protocol):
    """The ring as its checks see it."""

    @property
    def seats(self) -> Sequence[StageSeat]:
        """Stages that are there, in order."""
        ...

    @property
    def stage_count(self) -> int:
        """Stages that it has, there or not."""
        ...

    def tell_stage(self, stage: int, request: StageRequest) -> None:
        """Tell a stage something, if it is there; its answer comes to `StageChecks.take`."""
        ...

    @property
    def sending(self) -> RelaySending:
        """Sends a node that is no stage something."""
        ...


class EndedSession(NamedTuple):
    """A conversation that is over, and that all of its stages hold."""

    number: int
    tokens: tuple[int, ...]
    """All of it; the last one never went around the ring."""
    call: ModelCall
    """As it was asked."""
    prompt_tokens: int

    @property
    def rows(self) -> int:
        """Tokens that went around the ring."""
        return len(self.tokens) - 1

    @property
    def new_tokens(self) -> int:
        """Tokens that the last stage drew."""
        return len(self.tokens) - self.prompt_tokens - len(self.call.tokens_out)

    def claim(self) -> ModelCall:
        """What the last stage said, as a call that is scored."""
        before = self.call.tokens_out
        out = self.tokens[self.prompt_tokens :]
        claim = AnswerClaim(first=len(before))
        return replace(self.call, tokens_out=out, claim=claim, top_tokens=None)

    def with_claim(self, figures: StageFigures) -> StageFigures | None:
        """Figures of the last stage, with what it said of the prompt; None: they are not of it."""
        scored_figures = figures.scored
        if scored_figures is None or scored_figures.tokens != self.new_tokens:
            return None
        tokens, margin = scored_figures.tokens, scored_figures.margin
        claim_figures = CheckFigures(
            tokens, margin, scored_figures.prompt_tokens, self.prompt_tokens
        )
        return replace(figures, scored=claim_figures)


class _StageCheck:
    """A stage whose conversation is computed again."""

    def __init__(
        self, number: int, stage: int, session: EndedSession, window: CountWindow | None
    ) -> None:
        self.number, self.stage, self.session, self.window = number, stage, session, window
        self.digests: dict[int, StateDigests] = {}
        self.neighbours: tuple[int, ...] = ()
        """Stages that are asked for digests."""
        self.checker: StageSeat | None = None
        self.unasked: deque[tuple[int, HandStates]] = deque()
        """States that stages are still to be asked for: one piece at a time, so that a slow line
        is not taken for silence.
        """
        self.call = 0
        """Number of the checker's answer; 0: it was not asked yet."""


class StageChecks:
    """The checks of one ring. All calls are of the loop's thread.

    Args:
        ring: The ring.
        ports: Of its model.
        requests: Tells how large states may be.
        rows_most: Rows that one message takes.
    """

    def __init__(
        self, ring: CheckedRing, ports: CheckPorts, requests: StageRequests, rows_most: int
    ) -> None:
        self._ring, self._ports = ring, ports
        self._requests, self._rows_most = requests, rows_most
        self._waiting: deque[_StageCheck] = deque()
        """The first one is at work."""
        self._awaited: dict[int, _StageCheck] = {}
        """Checks whose event is being decided on."""
        self._numbers = itertools.count(secrets.randbits(_NUMBER_BITS) + 1)
        self._blamed_epoch = 0
        self._timer: asyncio.TimerHandle | None = None
        self._delivery: asyncio.Task[None] | None = None
        """Gives the checker adapters."""
        self._adapters: CheckAdapters | None = None
        """Those that it has."""
        self.checker: StageSeat | None = None
        """The node that stands by, once it holds its stage."""

    def set_checker(self, seat: StageSeat | None) -> None:
        """Another node stands by now, or none."""
        self.abandon()
        self.checker, self._adapters = seat, None
        if seat is not None and self._is_trained:
            values_of = self._ports.adapter_values
            self._adapters = CheckAdapters(seat, self._ring.sending, values_of)

    @property
    def _is_trained(self) -> bool:
        """Whether layers have adapters."""
        return self._ports.job().request.training is not None

    def keep(
        self, number: int, tokens: tuple[int, ...], ring_call: RingCall | None, ring: Ring | None
    ) -> bool:
        """Draw what of a conversation that is over is checked; False: stages may forget it.

        Args:
            number: Its number.
            tokens: All of it.
            ring_call: Its call; None: nobody waits for it any more.
            ring: As it is now.
        """
        is_whole = ring_call is not None and ring is not None and ring_call.epoch == ring.epoch
        if ring_call is None or not is_whole or len(tokens) < 2:
            return False
        session = EndedSession(number, tokens, ring_call.call, ring_call.prompt_tokens)
        for stage in range(len(self._ring.seats)):
            is_scored = stage == self._ring.stage_count - 1
            if is_scored and not session.new_tokens:
                continue
            if len(self._waiting) < WAITING_MOST and self._is_drawn(stage):
                self._waiting.append(self._open_check(stage, session))
        self._begin()
        return self._keeps(session.number)

    def _is_drawn(self, stage: int) -> bool:
        job, node = self._ports.job(), self._ring.seats[stage].node
        if self.checker is None or not may_check_stage(job, node, self.checker.node):
            return False
        if self._is_trained and not self.checker.ready.takes_adapters:
            return False
        share = stage_check_share(job.members[node].stage_record)
        return secrets.randbelow(_PERMILLE) < share.permille

    def _open_check(self, stage: int, session: EndedSession) -> _StageCheck:
        window = self._ports.window_of(self._ring.seats[stage].node)
        check = _StageCheck(next(self._numbers), stage, session, window)
        if window is not None:
            window.begin_check(check.number)
        return check

    def _keeps(self, session: int) -> bool:
        return any(each.session.number == session for each in self._waiting)

    def _begin(self) -> None:
        """Ask for the digests of the first check that waits."""
        if not self._waiting or self._waiting[0].neighbours:
            return
        check, last = self._waiting[0], len(self._ring.seats) - 1
        near = (check.stage - 1, check.stage, check.stage + 1)
        check.neighbours = tuple(each for each in near if 0 <= each <= last)
        check.checker = self.checker
        for stage in check.neighbours:
            self._ring.tell_stage(stage, TellDigests(check.session.number, check.session.rows))

    def take(self, stage: int, request: StageRequest, reply: StageReply) -> str:
        """Take in what a stage says; gives why it cannot be right, or nothing."""
        check = self._waiting[0] if self._waiting else None
        match request, reply:
            case TellDigests(), StateDigests():
                if check is not None and check.session.number == request.session:
                    self._take_digests(check, stage, reply)
            case HandStates(), StageRows(states=states) if states:
                if fault := self._requests.size_fault(states, request.count):
                    return fault
                if check is not None and check.number == request.check:
                    self._pass_on(check, stage, request, states)
            case _:
                return f"it does not show what it computed: {_text_of(reply)}"
        return ""

    def _take_digests(self, check: _StageCheck, stage: int, digests: StateDigests) -> None:
        check.digests[stage] = digests
        if set(check.digests) != set(check.neighbours) or check.checker is None:
            return
        for sender in check.neighbours[:-1]:
            if check.digests[sender].sent != check.digests[sender + 1].received:
                reason = "what one sent and the other received of a conversation has two digests"
                seats = self._ring.seats
                self._contradict(check, seats[sender], seats[sender + 1], reason)
                return
        self._ask_for_states(check, check.checker)

    def _ask_for_states(self, check: _StageCheck, checker: StageSeat) -> None:
        last = len(self._ring.seats) - 1
        senders = [check.stage - 1] if check.stage else []
        senders += [check.stage] if check.stage < last else []
        for sender in senders:
            for start in range(0, check.session.rows, self._rows_most):
                count = min(self._rows_most, check.session.rows - start)
                number = check.session.number
                request = HandStates(check.number, number, start, count, checker.member)
                check.unasked.append((sender, request))
        self._ask_next(check, checker)

    def _ask_next(self, check: _StageCheck, checker: StageSeat) -> None:
        if check.unasked:
            self._ring.tell_stage(*check.unasked.popleft())
        elif self._adapters is not None:
            work = self._recompute_with_adapter(check, checker, self._adapters)
            self._delivery = asyncio.create_task(work)
        else:
            self._recompute(check, checker)

    async def _recompute_with_adapter(
        self, check: _StageCheck, checker: StageSeat, adapters: CheckAdapters
    ) -> None:
        """The same for a stage that trained; cancelled where the check is over."""
        try:
            await adapters.give(self._ring.seats[check.stage].span)
        except AdapterGivingError as error:
            self._end(check, str(error))
        else:
            self._recompute(check, checker)

    def _pass_on(self, check: _StageCheck, stage: int, request: HandStates, states: bytes) -> None:
        if check.checker is None:
            return
        message = TakeStates(
            check=check.number,
            session=request.session,
            start=request.start,
            count=request.count,
            sender=self._ring.seats[stage].member,
            checker=request.checker,
            is_output=stage == check.stage,
            states=states,
        )
        self._ring.sending.send(check.checker, pack_stage_message(message), len(states))
        self._ask_next(check, check.checker)

    def _recompute(self, check: _StageCheck, checker: StageSeat) -> None:
        seats, session = self._ring.seats, check.session
        is_first, is_last = check.stage == 0, check.stage == len(seats) - 1
        message = RecomputeStage(
            check=check.number,
            span=seats[check.stage].span,
            count=session.rows,
            tokens=session.tokens[: session.rows] if is_first else (),
            call=session.claim() if is_last else None,
        )
        try:
            sent_call = self._ring.sending.send(checker, pack_stage_message(message), 0)
            check.call = sent_call.number
            why = f"{checker.node} said nothing for {CHECKER_S:g} s"
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CHECKER_S, self._end, check, why)
        except HyperGPUError as error:  # A prompt that is too long for a message.
            self._end(check, error.message)

    def blame(self, stage: int, epoch: int, reason: str) -> None:
        """A stage says that the one before gave what no stage gives: one of both goes.

        Args:
            stage: The one that says so.
            epoch: Of the ring, which is over then: further blame in it is of the same.
            reason: What it says.
        """
        if self._blamed_epoch == epoch:
            return
        self._blamed_epoch = epoch
        sender, receiver = self._ring.seats[stage - 1 : stage + 1]
        reason = f"the next stage says: {reason}"
        self._ports.report(_contradiction_of(sender, receiver, reason, is_stuck=True))

    def hear(self, node: NodeId, call: int, reply: StageReply | None) -> bool:
        """Take in what the checker says; False: it is no answer to a check."""
        check = self._waiting[0] if self._waiting else None
        if self.checker is None or node != self.checker.node:
            return False
        if check is None or check.call != call or check.checker is None:
            if self._adapters is not None:
                self._adapters.hear(call, reply)
            return True  # It has taken states, or says something of a check that is over.
        if isinstance(reply, StageCompared):
            self._judge(check, check.checker, reply)
        else:
            self._end(check, _text_of(reply))
        return True

    def _judge(self, check: _StageCheck, checker: StageSeat, compared: StageCompared) -> None:
        """Have a comparison decided on, once it is of what both ends have said."""
        seats = self._ring.seats
        digests = (
            (check.stage - 1, compared.received) if check.stage else None,
            (check.stage, compared.sent) if check.stage < len(seats) - 1 else None,
        )
        for sender, digest in filter(None, digests):
            if check.digests[sender].sent != digest:
                reason = "what one handed over and the other says it was has two digests"
                self._contradict(check, seats[sender], checker, reason)
                return
        figures, seat = check.session.with_claim(compared.figures), seats[check.stage]
        if (figures is None) == (check.stage == len(seats) - 1):
            self._end(check, f"{checker.node} compared something else")
            return
        event = StageChecked(
            at_ms=_NOW,
            node=seat.node,
            lease=seat.lease,
            checker=checker.node,
            check=check.number,
            figures=figures or compared.figures,
        )
        self._report(check, event)

    def _contradict(
        self, check: _StageCheck, sender: StageSeat, receiver: StageSeat, reason: str
    ) -> None:
        self._report(check, _contradiction_of(sender, receiver, reason, check=check.number))

    def _report(self, check: _StageCheck, event: StageEvent) -> None:
        self._awaited[check.number] = check
        self._ports.report(event)
        self._leave(check)

    def settle(self, number: int) -> None:
        """An event of a check was decided on."""
        check = self._awaited.pop(number, None)
        if check is not None and check.window is not None:
            check.window.end_check(number, is_checked=True)

    def refuse(self, number: int, node: NodeId, reason: str) -> None:
        """Pay a stage nothing for the window in which a check, or a pass, found it in doubt."""
        check = self._awaited.get(number)
        is_of_check = check is not None and check.window is not None and check.window.node == node
        window = check.window if check and is_of_check else self._ports.window_of(node)
        if window is not None:
            window.end_check(number, is_checked=number > 0, fault=reason)

    def _end(self, check: _StageCheck, why: str) -> None:
        """Go on without a check."""
        log.info("a check of a stage came to nothing", check=check.number, reason=why)
        if check.window is not None:
            check.window.end_check(check.number)
        self._leave(check)

    def _leave(self, check: _StageCheck) -> None:
        """Have stages forget a conversation of which nothing else is checked, and go on."""
        self._waiting.remove(check)
        self._stop_waiting()
        if not self._keeps(check.session.number):
            self._forget(check)
        self._begin()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The task that ends a check is over by itself.
        if self._delivery is not None and self._delivery is not asyncio.current_task():
            self._delivery.cancel()
        self._delivery = None

    def _forget(self, check: _StageCheck) -> None:
        for stage in range(self._ring.stage_count):
            self._ring.tell_stage(stage, ForgetSession(check.session.number))

    def abandon(self, lost: NodeId | None = None) -> None:
        """The ring has changed: what was kept is of another one.

        Args:
            lost: The node that is gone. What it was about to be checked for is not paid: else a
                liar would leave whenever it is asked. It is where the model itself was stopped or
                unloaded, as then no node has left.
        """
        self._stop_waiting()
        self._blamed_epoch = 0
        job = self._ports.job()
        if not job.is_served or job.is_unloaded:
            lost = None
        checks, self._waiting = [*self._waiting], deque()
        for place, check in enumerate(checks):
            node = check.window.node if check.window is not None else None
            is_gone = place == 0 and check.neighbours and lost is not None and lost == node
            fault = "it was gone while a conversation of it was computed again" if is_gone else ""
            if check.window is not None:
                check.window.end_check(check.number, fault=fault)
            self._forget(check)


def _contradiction_of(
    sender: StageSeat, receiver: StageSeat, reason: str, *, check: int = 0, is_stuck: bool = False
) -> StagesContradicted:
    """Two nodes say different things of what the first gave the second."""
    return StagesContradicted(
        at_ms=_NOW,
        node=sender.node,
        lease=sender.lease,
        other=receiver.node,
        other_lease=receiver.lease,
        reason=reason,
        is_stuck=is_stuck,
        check=check,
    )


def _text_of(reply: StageReply | None) -> str:
    return str(getattr(reply, "reason", "")) or type(reply).__name__
