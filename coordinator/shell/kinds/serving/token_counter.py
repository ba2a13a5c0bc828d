"""Counts the tokens of one replica that were passed on, from one window to the next.

All of it is in memory: what was not reported when this process dies is lost, and paid to nobody. A
window that is over is reported once the secret checks of its answers have come in, or after a
while without them.
"""

import asyncio
import secrets
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from coordinator.core.serving.counting import WINDOW_MS, WINDOW_UNITS
from coordinator.core.serving.events import WindowCounted
from coordinator.core.serving.state import ServeJob
from hypergpu.ids import NodeId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.serving.calls import AnswerClaim, ModelCall, pack_call
from hypergpu.token_counts import (
    PROMPT_TOKENS_PER_UNIT,
    TokenCount,
    chain_digest,
    first_link,
    next_link,
)
from hypergpu.units import Milliseconds
from hypergpu.work_units import WorkUnit

ReportCount = Callable[[WindowCounted], None]
CHECKS_S = 60.0
"""Time after its end in which a window waits for checks."""
_SALT_BYTES = 16
WHOLE = Fraction(1)
_NOW = Milliseconds(0)  # stamped by the driver


class UnitTally:
    """Units of a model that were counted and are not in its journal."""

    def __init__(self) -> None:
        self.units = 0


class CountedPart(NamedTuple):
    """What of a ring's tokens is counted for a stage."""

    share: Fraction = WHOLE
    """Where units are tokens: its part of the layers, by which counts are rounded down."""
    layers: int = 0
    """Where units are layer-tokens: how many it holds; else 0."""

    @classmethod
    def of(cls, job: ServeJob, span: LayerSpan) -> "CountedPart":
        """The part of a stage of a model that is cut."""
        if job.request.unit is WorkUnit.LAYER_TOKENS:
            return cls(layers=span.count)
        layers = span.count if job.request.cut is None else job.request.cut.layers
        return cls(share=Fraction(span.count, layers))


_WHOLE_MODEL = CountedPart()


class CountWindow:
    """Answers that are counted together, and which of them are being checked.

    Args:
        node: Gave them.
        lease: Under which it did.
        report: Has the count decided on.
        part: What of the tokens is counted for the node.
        fault: Why the window is paid to nobody, whatever is counted in it; empty: nothing is
            known against it.
    """

    def __init__(
        self,
        node: NodeId,
        lease: int,
        report: ReportCount,
        part: CountedPart = _WHOLE_MODEL,
        *,
        fault: str = "",
    ) -> None:
        self.node = node
        self.count = TokenCount(layers=part.layers)
        """The node's part of what was counted, rounded down."""
        self._whole_count = self.count
        self._share = part.share
        self._lease = lease
        self._report = report
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._link = first_link(self._salt)
        self._open_checks: set[int] = set()
        self._checked_answers = 0
        self._fault = fault
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False
        """Whether nothing more is counted in it."""
        self.is_reported = False

    def add(self, count: TokenCount) -> None:
        """Count more; a node that holds a part of the model has that part of it."""
        whole = self._whole_count = self._whole_count.plus(count)
        if self._share == WHOLE:
            self.count = whole
            return
        # Shares are whole units, so that all of them are no more than the whole.
        prompt_units = int(whole.prompt_tokens * self._share) // PROMPT_TOKENS_PER_UNIT
        self.count = TokenCount(
            prompt_units * PROMPT_TOKENS_PER_UNIT,
            int(whole.new_tokens * self._share),
            whole.answers,
        )

    @property
    def is_full(self) -> bool:
        """Whether it has as much as a window may have, whatever it is counted in."""
        return self.count.units >= WINDOW_UNITS * max(1, self.count.layers)

    def link(self, call: ModelCall, tokens: list[int]) -> None:
        """Take what a replica wrote of an answer into the chain."""
        self._link = next_link(self._link, pack_call(call), tokens)

    def begin_check(self, answer: int) -> None:
        """An answer is being scored by another node."""
        self._open_checks.add(answer)

    def end_check(self, answer: int, *, is_checked: bool = False, fault: str = "") -> None:
        """An answer was scored, or cannot be.

        Args:
            answer: Its number.
            is_checked: Whether it was.
            fault: Why the window is not paid; empty: the answer is right, as far as is known.
        """
        self._fault = self._fault or fault
        if answer in self._open_checks:
            self._open_checks.discard(answer)
            self._checked_answers += is_checked
        if self._fault:
            # It is not paid, whatever else comes of it.
            self._open_checks.clear()
        self._report_if_checked()

    def end(self) -> None:
        """Count nothing more, and wait for the checks."""
        self.is_over = True
        if self._open_checks:
            self._timer = asyncio.get_running_loop().call_later(CHECKS_S, self.give_checks_up)
        self._report_if_checked()

    def give_checks_up(self) -> None:
        """Wait no longer."""
        self._open_checks.clear()
        self._report_if_checked()

    def _report_if_checked(self) -> None:
        if not self.is_over or self._open_checks or self.is_reported:
            return
        self.is_reported = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.count.units:
            return
        self._report(
            WindowCounted(
                at_ms=_NOW,
                node=self.node,
                lease=self._lease,
                count=self.count,
                answers=chain_digest(self._link),
                salt=self._salt.hex(),
                checked_answers=self._checked_answers,
                fault=self._fault,
            )
        )


class GivenAnswer:
    """What a replica wrote of one answer in one window, for whoever checks it."""

    def __init__(self, call: ModelCall, window: CountWindow, prompt_tokens: int) -> None:
        self.call = call
        """As it went to the replica, with what was out before this window."""
        self.window = window
        self.prompt_tokens = prompt_tokens
        """As the replica said; 0: it said so in an earlier window, or never."""
        self.tokens: list[int] = []
        self.has_ended = False
        """Whether the model ended the answer after these tokens."""

    @property
    def check_call(self) -> ModelCall:
        """The call by which another replica scores it."""
        out = self.call.tokens_out
        claim = AnswerClaim(first=len(out), has_ended=self.has_ended)
        return replace(self.call, tokens_out=(*out, *self.tokens), claim=claim, top_tokens=None)

    @property
    def scored_tokens(self) -> int:
        """Tokens that a check scores."""
        return len(self.tokens) + self.has_ended

    @property
    def is_counted(self) -> bool:
        """Whether anything of it was counted."""
        return bool(self.tokens or self.prompt_tokens)


NoteAnswer = Callable[[GivenAnswer], None]


class AnswerCounter(Protocol):
    """Counts what is passed on of answers."""

    def begin(self, number: int, call: ModelCall) -> None:
        """See `TokenCounter.begin`."""
        ...

    def add_read(self, number: int, prompt_tokens: int) -> None:
        """See `TokenCounter.add_read`."""
        ...

    def add_token(self, number: int, token: int) -> None:
        """See `TokenCounter.add_token`."""
        ...

    def end(self, number: int, *, has_ended: bool = False) -> None:
        """See `TokenCounter.end`."""
        ...

    def close(self) -> None:
        """See `TokenCounter.close`."""
        ...


class TokenCounter:
    """Tokens of a replica under one lease.

    Args:
        begin_window: Makes a window.
        note_answer: Called with each answer, or part of one, that a window has whole.
        tally: Has what is counted added.
    """

    def __init__(
        self, begin_window: Callable[[], CountWindow], note_answer: NoteAnswer, tally: UnitTally
    ) -> None:
        self._begin_window = begin_window
        self._note_answer = note_answer
        self._tally = tally
        self._answers: dict[int, GivenAnswer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._window = begin_window()

    @property
    def window(self) -> CountWindow:
        """The window in which tokens are counted now."""
        return self._window

    def begin(self, number: int, call: ModelCall) -> None:
        """A call goes to the replica, with the tokens that are out."""
        self._is_closed = False  # A ring that lost a stage answers again.
        self._answers[number] = GivenAnswer(call, self._window, 0)

    def add_read(self, number: int, prompt_tokens: int) -> None:
        """The replica has read the prompt of a call, and what another replica wrote of it."""
        answer = self._answers[number]
        is_new = not answer.is_counted
        answer.prompt_tokens = prompt_tokens
        read_tokens = prompt_tokens + len(answer.call.tokens_out)
        self._add(TokenCount(prompt_tokens=read_tokens, answers=int(is_new)))

    def add_token(self, number: int, token: int) -> None:
        """A token of the replica was passed on."""
        answer = self._answers[number]
        is_new = not answer.is_counted
        answer.tokens.append(token)
        self._add(TokenCount(new_tokens=1, answers=int(is_new)))

    def _add(self, count: TokenCount) -> None:
        window = self._window
        before = window.count.units
        window.add(count)
        self._tally.units += window.count.units - before
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(WINDOW_MS / 1000, self.end_window)
        if window.is_full:
            self.end_window()

    def end(self, number: int, *, has_ended: bool = False) -> None:
        """The replica does not answer a call any more.

        Args:
            number: The call's.
            has_ended: Whether the model ended the answer by itself.
        """
        answer = self._answers.pop(number, None)
        if answer is not None:
            answer.has_ended = has_ended
            self._take(answer)
        if self._is_closed and not self._answers:
            self.end_window()

    def close(self) -> None:
        """The replica is gone: count what of it is still passed on, and no longer."""
        self._is_closed = True
        self.end_window()

    def _take(self, answer: GivenAnswer) -> None:
        if answer.is_counted:
            self._window.link(answer.call, answer.tokens)
            self._note_answer(answer)

    def end_window(self) -> None:
        """End the window; open answers go on in the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        window = self._window
        for answer in self._answers.values():
            self._take(answer)
        self._window = self._begin_window()
        for number, answer in self._answers.items():
            out = (*answer.call.tokens_out, *answer.tokens)
            next_call = replace(answer.call, tokens_out=out)
            self._answers[number] = GivenAnswer(next_call, self._window, 0)
        window.end()
