"""Answers that are under way while their node is banned."""

from collections.abc import Iterable
from functools import partial

from coordinator.core.serving.events import WindowCounted
from coordinator.core.serving.leasing import with_serve_member
from coordinator.shell.kinds.serving.answer_checks import AnswerChecks
from coordinator.shell.kinds.serving.token_counter import TokenCounter, UnitTally
from hypergpu.ids import NodeId
from hypergpu.serving.calls import ModelCall
from tests.kinds.serving.test_honesty import model_on
from tests.unit.job_states import ALICE, BOB, CAROL

BAN = "two nodes agree: its tokens are not the model's"


class NoCheckers:
    """A model without a replica that scores answers."""

    def checkers(self) -> Iterable[NodeId]:
        return ()

    def send_check(self, node: NodeId, number: int, body: bytes) -> None:
        raise AssertionError(f"{node} is asked to score an answer")


async def test_what_is_passed_on_of_an_answer_after_its_node_is_banned_is_paid_to_nobody() -> None:
    job = model_on(ALICE, BOB, CAROL)
    reports: list[WindowCounted] = []
    checks = AnswerChecks(lambda: job, NoCheckers(), lambda _: None)
    begin_window = partial(checks.begin_window, ALICE, 1, reports.append)
    counter = TokenCounter(begin_window, checks.take, UnitTally())
    counter.begin(1, ModelCall(tokens=(1,)))
    counter.add_token(1, 7)
    job = with_serve_member(job, ALICE, ban=BAN)
    counter.close()
    for token in (8, 9):
        counter.add_token(1, token)
    counter.end(1)
    counts = [(report.count.new_tokens, report.fault) for report in reports]
    assert counts == [(1, ""), (2, BAN)]
