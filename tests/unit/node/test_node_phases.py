"""How long a node says that the phases of its work took."""

from msgspec.structs import replace

from gpu_node.core import events
from gpu_node.core.phases import PhaseClock
from gpu_node.core.session import transition
from gpu_node.core.session_state import NodeSession
from hypergpu.phases import PHASE_MS_MAX, PhaseDurations
from hypergpu.units import Milliseconds
from hypergpu.wire.messages import phases_message, phases_value
from tests.unit.node.node_states import (
    ASSIGN,
    CONNECT,
    FETCH,
    LOSE,
    NODE,
    assignment,
    at,
    lease,
    update,
)

CONNECT_AGAIN = (
    events.TimerFired(at_ms=at(500), timer=events.Timer.RECONNECT),
    events.Connected(at_ms=at(600)),
)


def clock_after(*told: events.NodeEvent) -> PhaseClock:
    session, clock = NodeSession(node=NODE), PhaseClock()
    for event in told:
        session, commands = transition(session, event)
        clock.note(event, commands)
    return clock


def durations(*ms: int) -> PhaseDurations:
    return PhaseDurations(*(Milliseconds(each) for each in ms))


def training_end(encode_ms: int = 0) -> events.TrainingFinished:
    trained_update = replace(update(), encode_ms=at(encode_ms))
    return events.TrainingFinished(at_ms=at(50), lease=lease(), update=trained_update)


def test_each_phase_lasts_until_the_next_one_begins() -> None:
    planned_assignment = replace(assignment(), upload_after_ms=at(15))
    assigned_event = events.ShardAssigned(at_ms=at(10), assignment=planned_assignment)
    timer = events.TimerFired(at_ms=at(65), timer=events.Timer.RETRY)
    clock = clock_after(*CONNECT, assigned_event, FETCH, training_end(encode_ms=12), timer)
    assert clock.durations(lease(), at(100)) == durations(10, 18, 12, 15, 35)
    assert clock.durations(lease(number=8), at(100)) is None


def test_an_upload_counts_from_its_first_attempt_and_a_wait_for_the_link_is_a_wait() -> None:
    upload_break = events.UploadBroken(at_ms=at(55), lease=lease(), reason="reset")
    retried_clock = clock_after(
        *CONNECT, ASSIGN, FETCH, training_end(), upload_break, LOSE, *CONNECT_AGAIN
    )
    assert retried_clock.durations(lease(), at(700)) == durations(10, 30, 0, 0, 650)
    cut_off = clock_after(*CONNECT, ASSIGN, FETCH, LOSE, training_end(), *CONNECT_AGAIN)
    assert cut_off.durations(lease(), at(700)) == durations(10, 30, 0, 550, 100)


def test_work_that_was_done_under_another_lease_is_only_sent_under_this_one() -> None:
    again = events.ShardAssigned(at_ms=at(80), assignment=assignment(lease(number=9)))
    cancellation = events.ShardCancelled(at_ms=at(55), lease=lease(), reason="the job was paused")
    clock = clock_after(*CONNECT, ASSIGN, FETCH, training_end(), cancellation, again)
    assert clock.durations(lease(number=9), at(100)) == durations(0, 0, 0, 0, 20)


def test_durations_off_the_wire_are_bounded_and_the_upload_goes_on_after_the_header() -> None:
    message = phases_message(durations(1, 2, 3, 4, 5))
    assert phases_value(message, 10) == durations(1, 2, 3, 4, 15)
    message.train_ms = 2**32 - 1
    assert phases_value(message, 2**40) == durations(1, PHASE_MS_MAX, 3, 4, PHASE_MS_MAX)
