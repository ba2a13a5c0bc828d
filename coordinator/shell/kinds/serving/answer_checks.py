"""Has a secret share of answers scored again by other replicas of the model.

Which answers are drawn is decided once they are over, so that no replica can know. Texts are in
this process's memory alone, as long as their window is open, and no more of them than
`TEXT_BYTES_MOST`: the oldest that nobody scores go first. They go to replicas of the same job,
which are on nodes that meet its requirements, and to nobody else.
"""

import itertools
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from coordinator.core.serving.events import AnswerChecked, CheckUndecided
from coordinator.core.serving.honesty import check_share, may_check
from coordinator.core.serving.state import ServeJob
from coordinator.shell.kinds.serving.token_counter import CountWindow, GivenAnswer, ReportCount
from hypergpu.ids import NodeId
from hypergpu.serving.calls import AnswerPart, CheckFigures, CheckResult, pack_call
from hypergpu.units import Milliseconds

TEXT_BYTES_MOST = 32 << 20
"""Texts of answers that a model keeps for checks."""
_TOKEN_BYTES = 8
_NUMBER_BITS = 48
_PERMILLE = 1_000
_NOW = Milliseconds(0)  # stamped by the driver
CheckEvent = AnswerChecked | CheckUndecided
ReportCheck = Callable[[CheckEvent], None]


class CheckReplicas(Protocol):
    """Replicas of the model as checks see them."""

    def checkers(self) -> Iterable[NodeId]:
        """Nodes whose replicas are ready and score answers."""

    def send_check(self, node: NodeId, number: int, body: bytes) -> None:
        """Give a check to a replica, as a call of the number."""


class _KeptAnswer:
    """An answer whose text is kept."""

    def __init__(self, given: GivenAnswer) -> None:
        self.given = given
        packed_bytes = len(pack_call(given.call))
        self.size_bytes = packed_bytes + _TOKEN_BYTES * len(given.tokens)
        self.checkers: list[NodeId] = []
        """Nodes that score it, or have."""
        self.check = 0
        """Number of the check at work; 0: none is."""
        self.is_checked = False


class _OpenCheck(NamedTuple):
    answer: int
    checker: NodeId


class AnswerChecks:
    """The checks of one model.

    Args:
        job: Tells the job as it is now.
        replicas: Score.
        report: Has an event decided on.
    """

    def __init__(
        self, job: Callable[[], ServeJob], replicas: CheckReplicas, report: ReportCheck
    ) -> None:
        self._job = job
        self._replicas = replicas
        self._report = report
        self._answers: dict[int, _KeptAnswer] = {}
        self._checks: dict[int, _OpenCheck] = {}
        # Disputes of a process that was here before are about other answers.
        self._answer_numbers = itertools.count(secrets.randbits(_NUMBER_BITS) + 1)
        self._check_numbers = itertools.count(secrets.randbits(_NUMBER_BITS) + 1)

    def begin_window(self, node: NodeId, lease: int, report: ReportCount) -> CountWindow:
        """A window for what is passed on of a node's answers from now on.

        Answers may be under way while their node is banned, and what came of them before its
        replica was dropped is still passed on. That is paid to nobody, so nobody is asked to sign
        it.
        """
        member = self._job().members.get(node)
        return CountWindow(node, lease, report, fault="" if member is None else member.ban)

    def take(self, given: GivenAnswer) -> None:
        """Keep an answer that is over, and draw whether it is checked."""
        self._forget_reported()
        if not given.scored_tokens:
            return
        number = next(self._answer_numbers)
        self._answers[number] = answer = _KeptAnswer(given)
        self._bound_texts()
        member = self._job().members.get(given.window.node)
        if member is None or number not in self._answers:
            return
        if secrets.randbelow(_PERMILLE) < check_share(member.honesty).permille:
            self._begin(number, answer)

    def _forget_reported(self) -> None:
        self._answers = {
            number: answer
            for number, answer in self._answers.items()
            if answer.check or not answer.given.window.is_reported
        }

    def _bound_texts(self) -> None:
        size_bytes = sum(answer.size_bytes for answer in self._answers.values())
        for number, answer in [*self._answers.items()]:
            if size_bytes <= TEXT_BYTES_MOST:
                return
            if not answer.check and number not in self._job().disputes:
                size_bytes -= answer.size_bytes
                del self._answers[number]

    def _begin(self, number: int, answer: _KeptAnswer) -> bool:
        """Give an answer to a checker by chance; False: there is none."""
        source, job = answer.given, self._job()
        checkers = [
            node
            for node in self._replicas.checkers()
            if node not in answer.checkers and may_check(job, source.window.node, node)
        ]
        if not checkers:
            return False
        checker = secrets.choice(checkers)
        answer.checkers.append(checker)
        answer.check = next(self._check_numbers)
        self._checks[answer.check] = _OpenCheck(number, checker)
        source.window.begin_check(number)
        self._replicas.send_check(checker, answer.check, pack_call(source.check_call))
        return True

    def is_open(self, check: int, node: NodeId) -> bool:
        """Whether a node is at work at a check."""
        return check in self._checks and self._checks[check].checker == node

    def take_figures(self, check: int, figures: CheckFigures | None) -> None:
        """Take in what came of a check; None: its checker could not score the answer."""
        number, checker = self._checks.pop(check)
        answer = self._answers.get(number)
        if answer is None:
            return
        answer.check = 0
        source = answer.given
        if figures is None or figures.tokens != source.scored_tokens:
            self._go_without(number, answer)
            return
        answer.is_checked = True
        figures = CheckFigures(
            figures.tokens, figures.margin, figures.prompt_tokens, source.prompt_tokens
        )
        self._report(
            AnswerChecked(
                at_ms=_NOW,
                node=source.window.node,
                checker=checker,
                answer=number,
                figures=figures,
            )
        )

    def _go_without(self, number: int, answer: _KeptAnswer) -> None:
        """Have another one score the answer; where there is none, it stays as it is."""
        if self._begin(number, answer):
            return
        if number in self._job().disputes:
            self._leave_undecided(number)
        else:
            answer.given.window.end_check(number)

    def _leave_undecided(self, number: int) -> None:
        dispute = self._job().disputes.get(number)
        if dispute is not None:
            self._report(CheckUndecided(at_ms=_NOW, node=dispute.node, answer=number))

    def settle(self, number: int) -> None:
        """An event of an answer was decided on: unless it is in dispute, it is done."""
        answer = self._answers.get(number)
        if answer is not None and number not in self._job().disputes:
            answer.given.window.end_check(number, is_checked=answer.is_checked)

    def check_again(self, number: int) -> None:
        """Have a third node score an answer in dispute."""
        answer = self._answers.get(number)
        if answer is not None and answer.check:
            return
        if answer is None or not self._begin(number, answer):
            self._leave_undecided(number)

    def refuse(self, number: int, reason: str) -> None:
        """Pay the window of an answer to nobody, and check all that its node has in others."""
        refused_answer = self._answers.get(number)
        if refused_answer is None:
            return
        node = refused_answer.given.window.node
        refused_answer.given.window.end_check(number, is_checked=True, fault=reason)
        for other, answer in [*self._answers.items()]:
            window = answer.given.window
            is_open = not window.is_reported and not answer.checkers
            if window.node == node and is_open and window is not refused_answer.given.window:
                self._begin(other, answer)

    def drop_checker(self, node: NodeId) -> None:
        """A replica is gone: others score what it was at."""
        for check, open_check in [*self._checks.items()]:
            if open_check.checker == node:
                self.take_figures(check, None)


def figures_in(parts: list[AnswerPart]) -> CheckFigures | None:
    """What came of a check; None: its checker could not score the answer."""
    return next((part.figures for part in parts if isinstance(part, CheckResult)), None)
