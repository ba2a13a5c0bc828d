"""What the owner of a node is shown: a fold of the session's steps."""

from msgspec.structs import replace

from gpu_node.core import events
from gpu_node.core.activity import (
    SETBACKS_KEPT,
    NodeActivity,
    advance_activity,
    judgement_reports,
    setback_reports,
    work_report,
)
from gpu_node.core.session import transition
from gpu_node.core.session_state import NodeSession
from hypergpu.node_report import WorkReport, WorkTotals
from hypergpu.phases import WorkPhase
from hypergpu.units import Bytes
from tests.unit.node.node_states import (
    ASSIGN,
    ASSIGN_PACKED,
    CANCEL,
    CONNECT,
    DIE,
    DRAIN,
    FETCH,
    FINISH_PACKED,
    LOSE,
    NODE,
    TRAIN,
    all_events,
    assignment,
    at,
    lease,
    packed_assignment,
    states,
    update,
)

ACCEPT = events.UploadAccepted(at_ms=at(50), lease=lease())
REJECT = events.UploadRejected(at_ms=at(50), lease=lease(), reason="not finite")
LATE = events.UploadLate(at_ms=at(50), lease=lease(), reason="round closed")
NEXT_ROUND = assignment(lease(4, 9))


def fold(*happened: events.NodeEvent) -> tuple[NodeSession, NodeActivity]:
    session, activity = NodeSession(node=NODE), NodeActivity()
    for event in happened:
        step = transition(session, event)
        activity = advance_activity(activity, session, event, step)
        session = step.session
    return session, activity


def progress(steps: int, loss: float | None = 0.5) -> events.TrainingProgressed:
    return events.TrainingProgressed(at_ms=at(25), lease=lease(), steps_done=steps, loss=loss)


def work(*happened: events.NodeEvent) -> WorkReport:
    session, activity = fold(*happened)
    report = work_report(session, activity, 1_000, moved_bytes=Bytes(7))
    assert report is not None
    return report


def test_a_node_goes_through_the_phases_of_its_work() -> None:
    course = [*CONNECT, ASSIGN, FETCH, progress(2), progress(4), TRAIN, ACCEPT]
    phases = [fold(*course[:count])[1].phase for count in range(2, len(course) + 1)]
    assert phases == [
        None,
        WorkPhase.DOWNLOAD,
        WorkPhase.TRAIN,
        WorkPhase.TRAIN,
        WorkPhase.ENCODE,
        WorkPhase.UPLOAD,
        None,
    ]


def test_training_is_reported_with_steps_and_loss_and_since_when() -> None:
    report = work(*CONNECT, ASSIGN, FETCH, progress(2))
    assert (report.phase, report.steps_done, report.steps_total) == ("train", 2, 4)
    assert (report.loss, report.since_ms, report.round) == (0.5, 1_020, 3)
    assert work(*CONNECT, ASSIGN, FETCH, progress(3, None)).loss is None


def test_waiting_says_for_what() -> None:
    upload_break = events.UploadBroken(at_ms=at(60), lease=lease(), reason="reset")
    assert work(*CONNECT, ASSIGN, FETCH, TRAIN, LOSE).reason == "there is no connection"
    assert work(*CONNECT, ASSIGN, FETCH, TRAIN, upload_break).reason == "reset"
    assert work(*CONNECT, ASSIGN, FETCH, DIE).reason == "the worker died: signal 11"
    planned_assignment = replace(assignment(), upload_after_ms=at(500))
    later = events.ShardAssigned(at_ms=at(10), assignment=planned_assignment)
    assert "one after another" in work(*CONNECT, later, FETCH, TRAIN).reason


def test_an_accepted_update_counts_once_with_its_samples() -> None:
    assert fold(*CONNECT, ASSIGN, FETCH, TRAIN, ACCEPT, ACCEPT)[1].totals == WorkTotals(1, 32)


def test_an_assignment_that_overtakes_the_answer_tells_what_was_accepted() -> None:
    counted_assignment = replace(NEXT_ROUND, last_accepted=update().digest)
    overtaking_event = events.ShardAssigned(at_ms=at(50), assignment=counted_assignment)
    late_answer = (*CONNECT, ASSIGN, FETCH, TRAIN, overtaking_event, ACCEPT)
    assert fold(*late_answer)[1].totals == WorkTotals(1, 32)
    elsewhere = events.ShardAssigned(at_ms=at(50), assignment=NEXT_ROUND)
    session, activity = fold(*CONNECT, ASSIGN, FETCH, TRAIN, elsewhere)
    assert activity.totals == WorkTotals(cancelled=1)
    assert activity.setbacks[0].reason == "the coordinator went on to round #5"
    assert session.current == NEXT_ROUND


def test_work_that_does_not_count_is_kept_with_its_reason() -> None:
    sent_events = (*CONNECT, ASSIGN, FETCH, TRAIN)
    for course, kind, reason in (
        ((*sent_events, REJECT), "rejected", "not finite"),
        ((*sent_events, LATE), "late", "round closed"),
        ((*sent_events, CANCEL), "cancelled", "closed"),
        ((*CONNECT, ASSIGN, DRAIN), "handed back", "SIGTERM"),
    ):
        activity = fold(*course)[1]
        (setback,) = setback_reports(activity, 1_000)
        assert (setback.kind, setback.reason, setback.round) == (kind, reason, 3)
        assert setback.at_ms == 1_000 + course[-1].at_ms
        assert getattr(activity.totals, kind.replace(" ", "_")) == 1


def test_packed_work_goes_through_its_phases_and_counts_without_samples() -> None:
    course = [*CONNECT, ASSIGN_PACKED, FETCH, FINISH_PACKED, ACCEPT]
    phases = [fold(*course[:count])[1].phase for count in range(3, len(course) + 1)]
    assert phases == [WorkPhase.DOWNLOAD, WorkPhase.TRAIN, WorkPhase.UPLOAD, None]
    assert fold(*course)[1].totals == WorkTotals(accepted=1)


def test_packed_work_is_reported_by_its_kind_without_steps() -> None:
    report = work(*CONNECT, ASSIGN_PACKED, FETCH)
    assert (report.workload, report.phase, report.steps_total) == ("other", "train", 0)


def test_other_packed_work_overtakes_only_the_answer_to_a_result() -> None:
    others = packed_assignment(lease(4, 9), b"second")
    other_work = events.WorkAssigned(at_ms=at(50), assignment=others)
    again = events.WorkAssigned(at_ms=at(50), assignment=packed_assignment(lease(3, 9)))
    course = [*CONNECT, ASSIGN_PACKED, FETCH]
    assert fold(*course, FINISH_PACKED, other_work)[1].totals == WorkTotals(accepted=1)
    assert fold(*course, FINISH_PACKED, again)[1].totals == WorkTotals(cancelled=1)
    assert fold(*course, other_work)[1].totals == WorkTotals(cancelled=1)


def test_only_the_newest_setbacks_are_kept() -> None:
    course: list[events.NodeEvent] = [*CONNECT]
    for number in range(SETBACKS_KEPT + 3):
        held_lease = lease(number, number + 1)
        course += [
            events.ShardAssigned(at_ms=at(10), assignment=assignment(held_lease)),
            events.ShardCancelled(at_ms=at(10), lease=held_lease, reason=f"reason {number}"),
        ]
    activity = fold(*course)[1]
    assert activity.totals.cancelled == SETBACKS_KEPT + 3
    assert [each.reason[-1] for each in activity.setbacks] == list("34567")


def test_what_an_assignment_says_of_an_earlier_update_is_kept_once() -> None:
    next_round = replace(NEXT_ROUND, judgement="round #4: counts 0.25 in the fold")
    course = [
        events.ShardAssigned(at_ms=at(50), assignment=it)
        for it in (next_round, next_round, NEXT_ROUND)
    ]
    (judgement,) = judgement_reports(fold(*CONNECT, *course)[1], 1_000)
    assert (judgement.reason, judgement.at_ms) == (next_round.judgement, 1_050)
    assert judgement.job == next_round.lease.job_id


def test_every_event_in_every_state_can_be_shown() -> None:
    for session in states().values():
        for event in all_events().values():
            step = transition(session, event)
            activity = advance_activity(NodeActivity(), session, event, step)
            report = work_report(step.session, activity, 0, moved_bytes=Bytes(0))
            assert (report is None) == (activity.phase is None)
