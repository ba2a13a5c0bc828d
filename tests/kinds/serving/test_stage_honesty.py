"""Who of a ring is at fault where nodes contradict each other: a pure rule."""

from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.core.serving.commands import RefuseStage
from coordinator.core.serving.events import (
    AnswerDoubted,
    StageChecked,
    StagesContradicted,
    StandbyPlaced,
)
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.leasing import with_serve_member
from coordinator.core.serving.ring_placing import NodeFigures, ring_placement
from coordinator.core.serving.stage_honesty import (
    ALL_PERMILLE,
    CLEARING_SESSIONS,
    DISTANCE_MOST,
    TRIAL_PERMILLE,
    TRIAL_SESSIONS,
    USUAL_PERMILLE,
    may_check_stage,
    stage_check_share,
)
from coordinator.core.serving.standby import standby_placement
from coordinator.core.serving.state import ServeJob, StageRecord
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import AssignWork, CancelWork, WorkStep, WriteRecord
from coordinator.shell.driver.replay import event_entry, state_json
from coordinator.shell.kinds.serving.demand import serve_demand
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.table import KINDS
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId, TokenId
from hypergpu.journal.events import public_body, read_event
from hypergpu.journal.sentences import event_sentence
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, span_blobs
from hypergpu.serving.calls import MARGIN_MOST, CheckFigures
from hypergpu.serving.check_messages import StageFigures
from hypergpu.units import Bytes, Milliseconds
from tests.kinds.serving.walk import created_model

LATER = Milliseconds(10)
CUT = ModelCut(layers=6, hidden_size=64, layer_bytes=100, end_bytes=50, stages=3)
FILES = {
    name: BlobRef(digest_of(name.encode()), Bytes(100))
    for name in ("base", *span_blobs(LayerSpan(0, 6), 6))
}
LARGE = NodeFigures(Bytes(10_000))
NODES = [NodeId(f"0x{number:040x}") for number in range(1, 6)]
FIRST, MIDDLE, LAST, STANDBY, SPARE = NODES
RIGHT, WRONG = StageFigures(20, DISTANCE_MOST // 4), StageFigures(20, 4 * DISTANCE_MOST)


def ring_on(count: int, twins: dict[NodeId, NodeId] | None = None) -> ServeJob:
    """Three stages in order on three nodes, and a fourth that stands by if there is one.

    Args:
        count: Nodes that are there.
        twins: Nodes by the other one whose owner has them, too.
    """
    request: dict[str, Any] = {"engine": STAGE_KIND, "files": FILES, "cut": CUT}
    job: ServeJob = SERVING.transition(None, created_model(has_receipts=True, **request)).job
    for node in NODES[:count]:
        owner = (twins or {}).get(node, node)
        join_event = work_events.NodeJoined(
            at_ms=LATER, node=node, token=TokenId(f"token {owner}"), address=f"line {node}"
        )
        job = SERVING.transition(job, join_event).job
    placement_event = ring_placement(job, dict.fromkeys(NODES[:3], LARGE))
    job = SERVING.transition(job, placement_event).job
    standby = standby_placement(job, dict.fromkeys(NODES[3:4], LARGE))
    return job if standby is None else SERVING.transition(job, standby).job


def check(
    job: ServeJob, node: NodeId, figures: StageFigures, checker: NodeId = STANDBY
) -> WorkStep:
    event = StageChecked(
        at_ms=LATER,
        node=node,
        lease=job.leases[node].lease,
        checker=checker,
        check=7,
        figures=figures,
    )
    assert SERVING.rejection(job, event) == ""
    return SERVING.transition(job, event)


def contradiction(
    job: ServeJob, node: NodeId, other: NodeId, *, is_stuck: bool = False
) -> WorkStep:
    event = StagesContradicted(
        at_ms=LATER,
        node=node,
        lease=job.leases[node].lease,
        other=other,
        other_lease=job.leases[other].lease,
        reason="two digests",
        is_stuck=is_stuck,
        check=7,
    )
    assert SERVING.rejection(job, event) == ""
    return SERVING.transition(job, event)


def refusals(step: WorkStep) -> list[NodeId]:
    return [each.node for each in step.commands if isinstance(each, RefuseStage)]


def cancels(step: WorkStep) -> list[NodeId]:
    return [each.node for each in step.commands if isinstance(each, CancelWork)]


def share_of(job: ServeJob, node: NodeId) -> int:
    return stage_check_share(job.members[node].stage_record).permille


def test_new_nodes_are_checked_often_right_ones_rarely_and_doubted_ones_always() -> None:
    assert stage_check_share(StageRecord()).permille == TRIAL_PERMILLE
    assert stage_check_share(StageRecord(checked=TRIAL_SESSIONS)).permille == USUAL_PERMILLE
    doubted_record = StageRecord(checked=TRIAL_SESSIONS, contradictions={FIRST: 1})
    assert stage_check_share(doubted_record).permille == ALL_PERMILLE


def test_right_checks_change_nothing_but_the_record() -> None:
    step = check(ring_on(4), MIDDLE, RIGHT)
    assert not step.commands
    assert step.job.members[MIDDLE].stage_record == StageRecord(checked=1, right_checks=1)


def test_between_a_stage_and_one_checker_nobody_is_at_fault_and_nothing_is_paid() -> None:
    job = ring_on(4)
    step = check(job, MIDDLE, WRONG)
    assert refusals(step) == [MIDDLE]
    assert not cancels(step)
    assert step.job.leases == job.leases
    records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
    (record,) = records
    assert isinstance(record, AnswerDoubted)
    assert record.node == MIDDLE
    assert "20.0% from those of its layers, where honest ones stay below 5%" in record.reason
    for node in (MIDDLE, STANDBY):
        assert share_of(step.job, node) == ALL_PERMILLE
        assert not step.job.members[node].ban
    assert share_of(step.job, FIRST) == TRIAL_PERMILLE


def with_second_checker(job: ServeJob) -> ServeJob:
    span = job.leases[MIDDLE].span
    assert span is not None
    placement_event = StandbyPlaced(at_ms=LATER, node=SPARE, span=span, reason="-")
    assert SERVING.rejection(job, placement_event) == ""
    after: ServeJob = SERVING.transition(job, placement_event).job
    return after


def test_where_a_third_node_is_free_it_stands_by_next_and_decides() -> None:
    step = check(ring_on(5), MIDDLE, WRONG)
    assert cancels(step) == [STANDBY]
    placement_event = standby_placement(step.job, dict.fromkeys((STANDBY, SPARE), LARGE))
    assert placement_event is not None
    assert placement_event.node == SPARE  # Who is in doubt comes last.
    step = check(with_second_checker(step.job), MIDDLE, WRONG, SPARE)
    assert refusals(step) == [MIDDLE]
    assert cancels(step) == [MIDDLE]
    ban = step.job.members[MIDDLE].ban
    assert ban.startswith("2 nodes contradict it, which nobody else contradicts: ")
    # Its layers go to the one that stands by, which nobody doubts any more.
    (assign,) = [each for each in step.commands if isinstance(each, AssignWork)]
    assert assign.node == SPARE
    assert not step.job.free_layers()
    assert not step.job.members[STANDBY].stage_record.contradictions


def test_a_ring_in_doubt_asks_for_one_node_more_until_the_doubt_is_over() -> None:
    job = ring_on(4)
    assert serve_demand(ServeRuntime(job, 1)).nodes_max == 4
    step = check(job, MIDDLE, WRONG)
    assert serve_demand(ServeRuntime(step.job, 1)).nodes_max == 5
    event = StageChecked(
        at_ms=LATER,
        node=MIDDLE,
        lease=job.leases[MIDDLE].lease,
        checker=STANDBY,
        check=7,
        figures=WRONG,
    )
    assert SERVING.moves_nodes(job, event, step.job)
    assert not SERVING.moves_nodes(job, event, check(job, MIDDLE, RIGHT).job)


def test_right_checks_by_a_third_node_end_a_doubt() -> None:
    job = with_second_checker(check(ring_on(5), MIDDLE, WRONG).job)
    for count in range(CLEARING_SESSIONS):
        assert share_of(job, MIDDLE) == ALL_PERMILLE, count
        job = check(job, MIDDLE, RIGHT, SPARE).job
    assert share_of(job, MIDDLE) == USUAL_PERMILLE
    assert not job.members[STANDBY].stage_record.contradictions


def test_right_checks_by_the_one_that_contradicts_end_no_doubt() -> None:
    job = check(ring_on(4), MIDDLE, WRONG).job
    for _ in range(2 * CLEARING_SESSIONS):
        job = check(job, MIDDLE, RIGHT).job
    assert share_of(job, MIDDLE) == ALL_PERMILLE


def test_a_checker_that_finds_two_owners_wrong_alone_is_at_fault_itself() -> None:
    job = check(ring_on(4), MIDDLE, WRONG).job
    step = check(job, FIRST, WRONG)
    assert step.job.members[STANDBY].ban
    assert cancels(step) == [STANDBY]
    for node in (FIRST, MIDDLE):
        assert not step.job.members[node].ban
        assert not step.job.members[node].stage_record.contradictions


def test_two_nodes_of_one_owner_count_as_one_that_contradicts() -> None:
    job = ring_on(5, twins={SPARE: STANDBY})
    job = with_second_checker(check(job, MIDDLE, WRONG).job)
    step = check(job, MIDDLE, WRONG, SPARE)
    assert not step.job.members[MIDDLE].ban


def test_one_that_a_neighbour_and_a_checker_contradict_is_at_fault() -> None:
    job = check(ring_on(4), MIDDLE, WRONG).job
    step = contradiction(job, MIDDLE, LAST)
    assert sorted(refusals(step)) == sorted([MIDDLE, LAST])
    assert step.job.members[MIDDLE].ban
    assert not step.job.members[LAST].ban
    assert not step.job.members[LAST].stage_record.contradictions
    assert step.job.leases[STANDBY].span == job.leases[MIDDLE].span


def test_of_two_that_contradict_each_other_the_blamed_goes_first_and_the_other_next() -> None:
    job = ring_on(3)
    step = contradiction(job, FIRST, MIDDLE, is_stuck=True)
    assert cancels(step) == [FIRST]
    job = SERVING.transition(step.job, ring_placement(step.job, {FIRST: LARGE})).job
    step = contradiction(job, FIRST, MIDDLE, is_stuck=True)
    assert cancels(step) == [MIDDLE]
    assert not any(step.job.members[each].ban for each in (FIRST, MIDDLE))


def test_one_that_blames_two_neighbours_which_nobody_else_blames_is_at_fault() -> None:
    job = ring_on(4)
    step = contradiction(job, FIRST, MIDDLE, is_stuck=True)
    assert cancels(step) == [FIRST]
    assert step.job.leases[STANDBY].span == job.leases[FIRST].span
    step = contradiction(step.job, STANDBY, MIDDLE, is_stuck=True)
    assert cancels(step) == [MIDDLE]
    assert step.job.members[MIDDLE].ban
    assert not step.job.members[FIRST].stage_record.contradictions


def test_the_last_stage_is_judged_by_the_margins_of_its_tokens() -> None:
    job = ring_on(4)
    right = StageFigures(100, scored=CheckFigures(100, 1_000, 5, 5))
    assert not check(job, LAST, right).commands
    wrong = StageFigures(100, scored=CheckFigures(100, 50 * MARGIN_MOST, 5, 5))
    step = check(job, LAST, wrong)
    assert refusals(step) == [LAST]
    more_prompt = StageFigures(100, scored=CheckFigures(100, 0, 5, 50))
    assert refusals(check(job, LAST, more_prompt)) == [LAST]


def test_twins_and_stages_check_nobody() -> None:
    job = ring_on(5, twins={STANDBY: MIDDLE})
    assert may_check_stage(job, FIRST, STANDBY)
    assert not may_check_stage(job, MIDDLE, STANDBY)
    assert not may_check_stage(job, FIRST, LAST)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lease": 99}, "does not hold a stage under lease 99"),
        ({"node": STANDBY}, "does not hold a stage"),
        ({"checker": MIDDLE}, "cannot check"),
        ({"figures": StageFigures(0)}, "0 rows"),
    ],
)
def test_a_check_of_what_is_no_stage_changes_nothing(
    changes: dict[str, object], reason: str
) -> None:
    job = ring_on(4)
    event = StageChecked(
        at_ms=LATER,
        node=MIDDLE,
        lease=job.leases[MIDDLE].lease,
        checker=STANDBY,
        check=1,
        figures=RIGHT,
    )
    event = replace(event, **changes)
    assert reason in SERVING.rejection(job, event)
    assert SERVING.transition(job, event).job == job


def test_a_contradiction_of_a_lease_that_is_over_changes_nothing() -> None:
    job = ring_on(4)
    event = StagesContradicted(
        at_ms=LATER,
        node=FIRST,
        lease=99,
        other=MIDDLE,
        other_lease=job.leases[MIDDLE].lease,
        reason="-",
    )
    assert "no lease 99" in SERVING.rejection(job, event)


def test_a_ring_whose_journal_is_cut_anywhere_goes_on_with_what_is_known_of_its_nodes() -> None:
    job = ring_on(4)
    kind = KINDS.begun_by(created_model())
    assert kind is not None
    lease, other_lease = job.leases[MIDDLE].lease, job.leases[LAST].lease
    check_event = partial(
        StageChecked, at_ms=LATER, node=MIDDLE, lease=lease, checker=STANDBY, check=1
    )
    blame = partial(StagesContradicted, at_ms=LATER, node=MIDDLE, lease=lease, reason="-")
    for event in (
        check_event(figures=RIGHT),
        check_event(figures=WRONG),
        blame(other=LAST, other_lease=other_lease, is_stuck=True),
    ):
        stored_event = kind.stored_event(event_entry(job.job_id, 1, event).body_json)
        restored_job = kind.stored_state(state_json(job))
        step, again = SERVING.transition(job, event), SERVING.transition(restored_job, stored_event)
        assert state_json(again.job) == state_json(step.job)
        assert again.commands == step.commands
        job = step.job
    assert job.members[MIDDLE].ban


def test_members_of_an_earlier_version_have_a_clean_record() -> None:
    kind = KINDS.begun_by(created_model())
    assert kind is not None
    content = msgspec.json.decode(state_json(ring_on(4)))
    for member in content["members"].values():
        del member["stage_record"]
    restored_job = kind.stored_state(msgspec.json.encode(content))
    assert restored_job.members[MIDDLE].stage_record == StageRecord()


def test_readers_are_told_whose_stage_was_computed_again_and_who_is_contradicted() -> None:
    check_event = StageChecked(
        at_ms=LATER, node=MIDDLE, lease=1, checker=STANDBY, check=1, figures=RIGHT
    )
    blame = StagesContradicted(
        at_ms=LATER, node=MIDDLE, lease=1, other=LAST, other_lease=2, reason="two digests"
    )
    sentences = []
    for event in (check_event, blame):
        kind = type(event).__name__
        body = public_body(kind, msgspec.json.encode(event))
        content = read_event(kind, msgspec.json.decode(body))
        assert content is not None
        sentences.append(event_sentence(content, {MIDDLE: "anna"}))
    assert sentences == [
        "a stage of anna was computed again",
        "another node contradicts anna: two digests",
    ]


def test_a_node_that_is_taken_back_begins_without_a_record() -> None:
    job = check(ring_on(4), MIDDLE, WRONG).job
    job = contradiction(job, MIDDLE, LAST).job
    readmission = work_events.NodeReadmitted(at_ms=LATER, node=MIDDLE)
    job = SERVING.transition(job, readmission).job
    assert not job.members[MIDDLE].ban
    assert not job.members[MIDDLE].stage_record.contradictions
    assert with_serve_member(job, MIDDLE).members[MIDDLE].can_work
