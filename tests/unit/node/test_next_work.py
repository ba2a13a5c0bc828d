"""A node fetches its next work while it does one, and sends results in the order of leases."""

import pytest

from gpu_node.core import commands, events
from gpu_node.core.session import transition
from gpu_node.core.session_state import Contributing, Executing, Fetching, Idle, NodeSession
from hypergpu.assignment import FailureCause
from hypergpu.packed_work import PackedWork
from tests.unit.node.node_states import (
    ASSIGN_NEXT,
    ASSIGN_PACKED,
    CANCEL,
    CONNECT,
    DIE,
    DRAIN,
    EXECUTE,
    FETCH,
    FETCH_NEXT,
    FINISH_NEXT,
    FINISH_PACKED,
    LOSE,
    NEXT_LEASE,
    OTHER,
    OTHER_JOB,
    WITHHOLD,
    after,
    at,
    lease,
    packed_assignment,
    reach,
)

ACCEPT = events.UploadAccepted(at_ms=at(50), lease=lease())
THIRD_LEASE = lease(5, 9)
ASSIGN_THIRD = events.WorkAssigned(
    at_ms=at(52), assignment=packed_assignment(THIRD_LEASE, b"third", after_lease=8)
)


def names_of(step_commands: tuple[commands.NodeCommand, ...]) -> list[str]:
    return [type(each).__name__ for each in step_commands]


def commands_after(session: NodeSession, event: events.NodeEvent) -> list[str]:
    return names_of(transition(session, event).commands)


def test_inputs_of_the_next_work_are_fetched_while_the_worker_is_busy() -> None:
    step = after(reach(*EXECUTE), [ASSIGN_NEXT])
    assert names_of(step.commands) == ["FetchInputs"]
    assert isinstance(step.session.work, Executing)
    assert isinstance(step.session.next_work, Fetching)
    assert step.session.leases == (lease(), NEXT_LEASE)


def test_the_worker_goes_on_while_the_first_result_is_sent() -> None:
    step = after(reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT), [FINISH_PACKED])
    assert names_of(step.commands) == ["SendResult", "PerformWork", "SetTimer"]
    assert step.session.worker.busy == NEXT_LEASE
    assert step.session.unsent_lease == lease()


def test_the_second_result_is_sent_once_the_first_is_accepted() -> None:
    finished_step = after(reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED), [FINISH_NEXT])
    assert finished_step.commands == ()
    step = transition(finished_step.session, ACCEPT)
    assert names_of(step.commands) == ["SendResult"]
    assert step.session.leases == (NEXT_LEASE,)
    assert isinstance(step.session.next_work, Idle)


def test_work_that_is_still_being_computed_becomes_the_work_at_hand() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    step = transition(session, ACCEPT)
    assert step.commands == ()
    assert isinstance(step.session.work, Executing)
    assert step.session.worker == session.worker
    assert names_of(transition(step.session, FINISH_NEXT).commands) == ["SendResult"]


def test_a_first_result_that_nobody_waits_for_leaves_the_next_work_alone() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    step = transition(session, CANCEL)
    assert names_of(step.commands) == ["StopTransfer"]
    assert step.session.worker == session.worker
    assert step.session.leases == (NEXT_LEASE,)


def test_work_that_is_cancelled_makes_way_for_the_next() -> None:
    step = transition(reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT), CANCEL)
    assert names_of(step.commands) == ["AbortTraining"]
    abort_event = events.TrainingAborted(at_ms=at(60), lease=lease())
    assert "PerformWork" in commands_after(step.session, abort_event)


def test_next_work_that_is_cancelled_leaves_the_first_alone() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT)
    cancel = events.ShardCancelled(at_ms=at(40), lease=NEXT_LEASE, reason="taken back")
    step = transition(session, cancel)
    assert names_of(step.commands) == ["StopTransfer"]
    assert (step.session.leases, step.session.work) == ((lease(),), session.work)
    computing_next = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    assert commands_after(computing_next, cancel) == ["AbortTraining"]


def test_an_assignment_that_overtakes_an_answer_says_that_the_first_is_over() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    step = transition(session, ASSIGN_THIRD)
    assert names_of(step.commands) == ["StopTransfer", "FetchInputs"]
    assert step.session.leases == (NEXT_LEASE, THIRD_LEASE)
    assert step.session.worker == session.worker


def test_a_repeated_assignment_of_the_next_work_changes_nothing() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT)
    assert transition(session, ASSIGN_NEXT) == (session, ())


def test_a_coordinator_that_restarted_names_the_next_work_as_the_first() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    again = events.WorkAssigned(at_ms=at(60), assignment=packed_assignment(NEXT_LEASE, b"second"))
    step = transition(session, again)
    assert step.session.leases == (NEXT_LEASE,)
    assert step.session.worker.busy == NEXT_LEASE


def test_other_work_of_the_job_voids_both() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT)
    new_lease = lease(6, 12)
    newer = events.WorkAssigned(at_ms=at(60), assignment=packed_assignment(new_lease, b"new"))
    step = transition(session, newer)
    assert step.session.leases == (new_lease,)
    assert names_of(step.commands)[:2] == ["AbortTraining", "StopTransfer"]


def test_a_node_that_drains_hands_the_next_work_back_first() -> None:
    step = transition(reach(*EXECUTE, ASSIGN_NEXT), DRAIN)
    backs = [each.lease for each in step.commands if isinstance(each, commands.HandBack)]
    assert backs == [NEXT_LEASE]
    assert step.session.leases == (lease(),)


def test_an_owner_who_withholds_the_machine_has_both_handed_back_the_next_first() -> None:
    step = transition(reach(*EXECUTE, ASSIGN_NEXT), WITHHOLD)
    backs = [each for each in step.commands if isinstance(each, commands.HandBack)]
    assert [each.lease for each in backs] == [NEXT_LEASE, lease()]
    assert {each.cause for each in backs} == {FailureCause.OWNER}
    sending_step = transition(reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED), WITHHOLD)
    assert isinstance(sending_step.session.work, Contributing)
    assert sending_step.session.leases == (lease(),)


def test_next_work_whose_inputs_are_rejected_is_handed_back_alone() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT)
    rejection_event = events.FetchRejected(at_ms=at(40), lease=NEXT_LEASE, reason="unknown blob")
    step = transition(session, rejection_event)
    assert names_of(step.commands) == ["StopTransfer", "HandBack"]
    assert step.session.work == session.work


def test_next_work_that_fails_in_the_worker_is_handed_back_and_the_first_is_sent_on() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    failure_event = events.TrainingFailed(at_ms=at(60), lease=NEXT_LEASE, reason="no such file")
    step = transition(session, failure_event)
    assert names_of(step.commands) == ["HandBack"]
    assert step.session.leases == (lease(),)


def test_a_worker_that_dies_at_the_next_work_is_started_again_for_it() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    step = transition(session, DIE)
    rest = events.TimerFired(at_ms=step.session.worker.retry_at_ms, timer=events.Timer.WORKER)
    assert "PerformWork" in commands_after(step.session, rest)


def test_a_download_for_the_next_work_that_breaks_is_tried_again() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT)
    break_event = events.FetchBroken(at_ms=at(40), lease=NEXT_LEASE, reason="reset")
    step = transition(session, break_event)
    (timer,) = (each for each in step.commands if isinstance(each, commands.SetTimer))
    assert timer.timer is events.Timer.RETRY_NEXT
    timer_event = events.TimerFired(at_ms=timer.at_ms, timer=timer.timer)
    assert commands_after(step.session, timer_event) == ["FetchInputs"]
    sooner = transition(step.session, CANCEL)
    retry_timers = [each for each in sooner.commands if isinstance(each, commands.SetTimer)]
    assert [each.timer for each in retry_timers] == [events.Timer.RETRY]


def test_both_transfers_go_on_over_the_next_link() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FINISH_PACKED, LOSE)
    step = after(
        session,
        [
            events.TimerFired(at_ms=session.link.retry_at_ms, timer=events.Timer.RECONNECT),
            events.Connected(at_ms=at(90_000)),
        ],
    )
    assert step.commands[0] == commands.OpenLink((lease(), NEXT_LEASE))
    assert names_of(step.commands)[1:] == ["SendResult", "FetchInputs"]


def test_next_work_that_waits_behind_another_job_stays_next() -> None:
    other_at_work = reach(*CONNECT, OTHER, ASSIGN_PACKED, ASSIGN_NEXT)
    assert other_at_work.leases[1:] == (lease(), NEXT_LEASE)
    release_event = events.JobReleased(at_ms=at(60), job_id=OTHER_JOB, reason="over")
    step = transition(other_at_work, release_event)
    assert step.session.leases == (lease(), NEXT_LEASE)
    assert isinstance(step.session.next_work, Fetching)


@pytest.mark.parametrize("end", [ACCEPT, CANCEL])
def test_next_work_that_is_not_fetched_yet_goes_on_being_fetched(end: events.NodeEvent) -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FINISH_PACKED)
    step = transition(session, end)
    assert isinstance(step.session.work, Fetching)
    assert "PerformWork" in commands_after(step.session, FETCH_NEXT)


def test_a_result_of_next_work_that_was_dropped_is_forgotten() -> None:
    session = reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED)
    cancel = events.ShardCancelled(at_ms=at(40), lease=NEXT_LEASE, reason="taken back")
    remaining_session = transition(session, cancel).session
    late_result = events.WorkFinished(
        at_ms=at(60), lease=NEXT_LEASE, result=PackedWork("other", b"late")
    )
    step = transition(remaining_session, late_result)
    assert step.session.worker.busy is None
    assert step.session.leases == (lease(),)


def test_the_first_assignment_begins_at_once_whatever_it_is_said_to_come_after() -> None:
    stray = events.WorkAssigned(
        at_ms=at(10), assignment=packed_assignment(NEXT_LEASE, b"second", after_lease=7)
    )
    session = reach(*CONNECT, stray)
    assert isinstance(session.work, Fetching)
    assert session.leases == (NEXT_LEASE,)
    assert "FetchInputs" in names_of(after(reach(*CONNECT), [stray]).commands)
    assert FETCH.lease == ASSIGN_PACKED.assignment.lease
