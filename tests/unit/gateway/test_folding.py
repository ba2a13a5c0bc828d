"""What a gateway passes on of a node's messages, and when."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.hub.folding import (
    PROGRESS_MS,
    REPORT_MS,
    Handling,
    NodeFolding,
    WorkMark,
    fold_other,
    fold_progress,
    fold_report,
    take_due,
)
from coordinator.shell.gateway.session import merged_report
from hypergpu.units import Milliseconds
from hypergpu.v1 import measurement_pb2

TRAINING = WorkMark("job-a", 7, phase=2)
UPLOADING = TRAINING._replace(phase=4)


def at(ms: int) -> Milliseconds:
    return Milliseconds(ms)


def after_progress(*times: int) -> NodeFolding:
    state = NodeFolding()
    for ms in times:
        state = fold_progress(state, TRAINING, at(ms)).state
    return state


def test_the_first_progress_of_a_phase_goes_on_at_once() -> None:
    state = after_progress(0)
    assert fold_progress(NodeFolding(), TRAINING, at(0)).handling is Handling.PASS
    assert fold_progress(state, UPLOADING, at(1)).handling is Handling.PASS
    assert fold_progress(state, TRAINING._replace(lease=8), at(1)).handling is Handling.PASS


def test_further_progress_is_held_and_goes_on_a_second_after_the_last() -> None:
    step = fold_progress(after_progress(0), TRAINING, at(1))
    assert step.handling is Handling.HOLD
    assert not take_due(step.state, at(PROGRESS_MS - 1)).has_progress
    due = take_due(step.state, at(PROGRESS_MS))
    assert due.has_progress
    assert not take_due(due.state, at(10 * PROGRESS_MS)).has_progress


def test_held_progress_goes_on_before_a_message_that_goes_on_at_once() -> None:
    held_state = fold_progress(after_progress(0), TRAINING, at(1)).state
    step = fold_other(held_state)
    assert step.handling is Handling.PASS_AFTER_PROGRESS
    assert not step.state.holds_progress


def test_a_report_goes_on_at_first_and_with_transfers_and_else_seldom() -> None:
    first = fold_report(NodeFolding(), 0, at(0))
    assert first.handling is Handling.PASS
    held_step = fold_report(first.state, 0, at(5_000))
    assert held_step.handling is Handling.HOLD
    assert fold_report(held_step.state, 1, at(6_000)).handling is Handling.PASS
    assert not take_due(held_step.state, at(REPORT_MS - 1)).has_report
    assert take_due(held_step.state, at(REPORT_MS)).has_report


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60))
def test_progress_goes_on_once_a_second_at_most_and_the_newest_is_never_lost(
    gaps: list[int],
) -> None:
    state, now_ms, passed_ms, handling = NodeFolding(), 0, list[int](), Handling.HOLD
    for gap in gaps:
        now_ms += gap
        due = take_due(state, at(now_ms))
        state, handling = fold_progress(due.state, TRAINING, at(now_ms))
        passed_ms += [now_ms] * (due.has_progress + (handling is Handling.PASS))
    assert all(later - earlier >= PROGRESS_MS for earlier, later in pairwise(passed_ms))
    assert state.holds_progress == (handling is Handling.HOLD)
    assert take_due(state, at(now_ms + PROGRESS_MS)).has_progress == state.holds_progress


def test_merged_reports_hold_all_measurements_and_the_newest_state() -> None:
    earlier = measurement_pb2.Measured(
        round_trips_us=[1, 2],
        trains=[measurement_pb2.ProbeTrain(sent=20, lost=1, bursts=1)],
        congestion_control="cubic",
        is_probing_blocked=True,
    )
    later = measurement_pb2.Measured(
        round_trips_us=[3],
        transfers=[measurement_pb2.MeasuredTransfer(size_bytes=9)],
        congestion_control="bbr",
    )
    joint_report = merged_report(earlier, later)
    assert list(joint_report.round_trips_us) == [1, 2, 3]
    assert (len(joint_report.trains), len(joint_report.transfers)) == (1, 1)
    assert (joint_report.congestion_control, joint_report.is_probing_blocked) == ("bbr", False)


def test_merged_reports_stay_as_short_as_what_a_coordinator_reads() -> None:
    joint_report = measurement_pb2.Measured()
    for trip in range(1_000):
        joint_report = merged_report(joint_report, measurement_pb2.Measured(round_trips_us=[trip]))
    assert list(joint_report.round_trips_us) == list(range(936, 1_000))
