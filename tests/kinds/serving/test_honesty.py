"""Who is at fault: a pure rule over checks, decided by a third node."""

import pytest
from msgspec.structs import replace

from coordinator.core.serving.commands import CheckAgain, RefuseAnswer
from coordinator.core.serving.events import AnswerChecked, AnswerDoubted, CheckUndecided
from coordinator.core.serving.honesty import (
    ALLOWANCE,
    EXCESS_MOST,
    MISJUDGEMENTS_MOST,
    TRIAL_TOKENS,
    after_check,
    check_share,
    fault_reason,
    may_check,
)
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.leasing import with_serve_member
from coordinator.core.serving.state import NodeHonesty, ServeJob
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import AssignWork, CancelWork, WorkStep, WriteRecord
from hypergpu.ids import NodeId, TokenId
from hypergpu.serving.calls import MARGIN_MOST, CheckFigures
from hypergpu.units import Milliseconds
from tests.kinds.serving.walk import created_model
from tests.unit.job_states import ALICE, BOB, CAROL

LATER = Milliseconds(10)
HONEST, LIAR = ALLOWANCE // 3, MARGIN_MOST // 2
"""Margins of a token on average."""
DAVE = NodeId("0x" + "dd" * 20)


def model_on(*nodes: NodeId, replicas: int = 3) -> ServeJob:
    """A model on nodes of different owners and lines."""
    job: ServeJob = SERVING.transition(
        None, created_model(has_receipts=True, replicas=replicas)
    ).job
    for node in nodes:
        event = work_events.NodeJoined(
            at_ms=LATER, node=node, token=TokenId(f"token {node}"), address=f"line {node}"
        )
        job = SERVING.transition(job, event).job
    return job


def check(
    job: ServeJob, node: NodeId, checker: NodeId, margin: int, *, tokens: int = 100
) -> WorkStep:
    """One answer of a node, scored."""
    event = AnswerChecked(
        at_ms=LATER,
        node=node,
        checker=checker,
        answer=7,
        figures=CheckFigures(tokens, tokens * margin, 5, 5),
    )
    assert SERVING.rejection(job, event) == ""
    return SERVING.transition(job, event)


def test_an_honest_node_is_never_doubted_however_long_it_answers() -> None:
    honesty = NodeHonesty()
    for _ in range(10_000):
        figures = CheckFigures(50, 50 * HONEST, 5, 5)
        honesty = after_check(honesty, figures)
        assert fault_reason(honesty, figures) == ""
    assert honesty.excess == 0


def test_a_liar_of_any_answer_length_is_doubted_within_a_thousand_tokens() -> None:
    for tokens in (1, 7, 300):
        honesty, count = NodeHonesty(), 0
        while not (reason := fault_reason(honesty, CheckFigures(tokens, tokens * LIAR, 5, 5))):
            honesty = after_check(honesty, CheckFigures(tokens, tokens * LIAR, 5, 5))
            count += tokens
        assert count <= 1_000
        assert "0.125 deviations" in reason


def test_who_counts_more_of_a_prompt_than_it_has_is_at_fault_at_once() -> None:
    figures = CheckFigures(10, 0, 5, 6)
    assert "counted 6 tokens of a prompt that has 5" in fault_reason(NodeHonesty(), figures)
    assert fault_reason(NodeHonesty(), CheckFigures(10, 0, 5, 0)) == ""


def test_new_and_doubted_nodes_are_checked_more() -> None:
    shares = [
        check_share(NodeHonesty()),
        check_share(NodeHonesty(checked_tokens=TRIAL_TOKENS)),
        check_share(NodeHonesty(checked_tokens=TRIAL_TOKENS, excess=EXCESS_MOST // 2)),
        check_share(NodeHonesty(checked_tokens=TRIAL_TOKENS, faults=1)),
    ]
    assert [share.permille for share in shares] == [500, 50, 1_000, 1_000]
    assert all(share.reason for share in shares)


def test_a_third_node_that_finds_the_same_makes_a_liar_lose_the_window_and_its_replica() -> None:
    job = model_on(ALICE, BOB, CAROL, DAVE)
    step = check(job, ALICE, BOB, LIAR)
    assert step.commands == (CheckAgain(7),)
    assert SERVING.outstanding(step.job)[-1] == CheckAgain(7)
    event = AnswerChecked(
        at_ms=LATER, node=ALICE, checker=BOB, answer=7, figures=CheckFigures(100, 0, 5, 5)
    )
    assert "scored answer 7 already" in SERVING.rejection(step.job, event)
    step = check(step.job, ALICE, CAROL, LIAR)
    assert isinstance(step.commands[0], RefuseAnswer)
    assert {type(each) for each in step.commands[1:]} == {WriteRecord, CancelWork, AssignWork}
    assert sorted(step.job.leases) == sorted([BOB, CAROL, DAVE])
    assert "two nodes agree" in step.job.members[ALICE].ban
    assert not step.job.disputes


def test_a_node_that_was_checked_enough_has_a_second_try() -> None:
    job = model_on(ALICE, BOB, CAROL)
    long_honest = NodeHonesty(checked_tokens=TRIAL_TOKENS)
    job = with_serve_member(job, ALICE, honesty=long_honest)
    job = check(check(job, ALICE, BOB, LIAR).job, ALICE, CAROL, LIAR).job
    assert ALICE in job.leases
    assert job.members[ALICE].honesty.faults == 1
    job = check(check(job, ALICE, BOB, LIAR).job, ALICE, CAROL, LIAR).job
    assert ALICE not in job.leases


def test_a_checker_that_a_third_node_contradicts_is_doubted_in_place_of_the_node() -> None:
    job = model_on(ALICE, BOB, CAROL)
    for _ in range(MISJUDGEMENTS_MOST):
        assert may_check(job, ALICE, BOB)
        step = check(check(job, ALICE, BOB, LIAR).job, ALICE, CAROL, HONEST)
        assert step.commands == ()
        job = step.job
    assert job.members[ALICE].honesty.excess == 0
    assert not may_check(job, ALICE, BOB)
    assert may_check(job, ALICE, CAROL)


def test_without_a_third_node_nobody_is_at_fault_and_the_answer_is_not_paid() -> None:
    job = check(model_on(ALICE, BOB), ALICE, BOB, LIAR).job
    step = SERVING.transition(job, CheckUndecided(at_ms=LATER, node=ALICE, answer=7))
    refusal, record = step.commands
    assert isinstance(refusal, RefuseAnswer)
    assert "no third node" in refusal.reason
    assert isinstance(record.record, AnswerDoubted)
    assert step.job.members[ALICE].honesty.faults == 0
    assert check_share(step.job.members[ALICE].honesty).permille == 1_000


@pytest.mark.parametrize("changes", [{"token": ""}, {"token": f"token {ALICE}"}])
def test_a_twin_never_checks_nor_does_a_node_of_the_same_line(changes: dict[str, str]) -> None:
    job = model_on(ALICE, BOB)
    assert may_check(job, ALICE, BOB)
    assert not may_check(job, ALICE, ALICE)
    assert not may_check(with_serve_member(job, BOB, **changes), ALICE, BOB)
    assert not may_check(with_serve_member(job, BOB, address=f"line {ALICE}"), ALICE, BOB)


@pytest.mark.parametrize("figures", [CheckFigures(0, 0, 5), CheckFigures(1, MARGIN_MOST + 1, 5)])
def test_figures_that_cannot_be_are_refused(figures: CheckFigures) -> None:
    event = AnswerChecked(at_ms=LATER, node=ALICE, checker=BOB, answer=1, figures=figures)
    assert "have no margin" in SERVING.rejection(model_on(ALICE, BOB), event)
    assert SERVING.rejection(model_on(ALICE), replace(event, figures=CheckFigures(1, 0, 5)))
