from collections import Counter

import pytest
from msgspec.structs import replace

from gpu_node.core.backoff import CAP_MS, backoff_ms
from gpu_node.core.commands import (
    AbortTraining,
    AnnounceDraining,
    DeleteJobState,
    Departure,
    EndWorker,
    FetchInputs,
    HandBack,
    Leave,
    OpenLink,
    SendUpdate,
    SetTimer,
    StartTraining,
    StartWorker,
)
from gpu_node.core.events import (
    Connected,
    InputsFetched,
    LinkLost,
    LinkRejected,
    NodeEvent,
    ShardAssigned,
    ShardCancelled,
    Timer,
    TimerFired,
    TrainingAborted,
    TrainingFailed,
    TrainingFinished,
    TrainingProgressed,
    UploadAccepted,
    UploadBroken,
    UploadLate,
    WorkerDied,
    WorkerReady,
)
from gpu_node.core.link import TOLD_WAIT_MS_MAX, ToldPace
from gpu_node.core.memory import FRESH, JOBS_MAX, TrainingStart
from gpu_node.core.session import transition
from gpu_node.core.session_state import Idle, NodeSession, SessionStep, Training, Uploading
from hypergpu.assignment import FailureCause, Lease
from hypergpu.ids import Digest, JobId
from tests.unit.node.node_states import (
    ASSIGN,
    CANCEL,
    CONNECT,
    DIE,
    DRAIN,
    FETCH,
    LOSE,
    NO_START,
    NODE,
    OTHER,
    OTHER_JOB,
    SESSION_JOB,
    TRAIN,
    about_to_give_up,
    after,
    assignment,
    at,
    digest,
    lease,
    reach,
    rests,
    unhealthy,
    update,
)


def train(held: Lease, accepted: Digest | None = None) -> tuple[NodeEvent, ...]:
    """A round from its assignment to its upload; the update is named after the lease."""
    return (
        ShardAssigned(at_ms=at(50), assignment=assignment(held, accepted=accepted)),
        InputsFetched(at_ms=at(60), lease=held),
        TrainingFinished(at_ms=at(70), lease=held, update=update(f"{held.round}/{held.number}")),
    )


def sent_as(held: Lease) -> Digest:
    return digest(f"{held.round}/{held.number}")


def start_of(session: NodeSession, held: Lease, accepted: Digest | None) -> TrainingStart:
    """Where the training of an assignment starts."""
    step = after(session, train(held, accepted)[:2])
    (command,) = (command for command in step.commands if isinstance(command, StartTraining))
    return command.start


ROUND_3, ROUND_4 = lease(3, 7), lease(4, 8)
AFTER_3 = reach(*CONNECT, *train(ROUND_3))


def test_the_first_training_of_a_job_starts_fresh() -> None:
    assert start_of(reach(*CONNECT), ROUND_3, None) == FRESH


def test_an_accepted_update_is_not_returned() -> None:
    assert start_of(AFTER_3, ROUND_4, sent_as(ROUND_3)) == TrainingStart(3, returns_update=False)


def test_an_update_that_the_assignment_does_not_name_is_returned() -> None:
    assert start_of(AFTER_3, ROUND_4, None) == TrainingStart(3, returns_update=True)


def test_the_assignment_overrules_an_answer_that_said_accepted() -> None:
    answered_session = transition(AFTER_3, UploadAccepted(at_ms=at(80), lease=ROUND_3)).session
    assert answered_session.memory.rounds(SESSION_JOB)[-1].is_accepted
    assert start_of(answered_session, ROUND_4, None) == TrainingStart(3, returns_update=True)


def test_a_late_update_is_returned_at_the_next_training() -> None:
    late = transition(AFTER_3, UploadLate(at_ms=at(80), lease=ROUND_3, reason="closed")).session
    assert late.work == Idle()
    assert start_of(late, ROUND_4, None) == TrainingStart(3, returns_update=True)


def test_a_residual_three_rounds_old_is_dropped() -> None:
    assert start_of(AFTER_3, lease(5, 9), sent_as(ROUND_3)) == TrainingStart(
        3, returns_update=False
    )
    assert start_of(AFTER_3, lease(6, 9), sent_as(ROUND_3)) == FRESH


def test_a_round_assigned_again_with_another_shard_starts_where_it_started_before() -> None:
    after_4 = after(AFTER_3, train(ROUND_4, sent_as(ROUND_3))).session
    again = assignment(lease(4, 9), accepted=sent_as(ROUND_3), start=32)
    step = transition(after_4, ShardAssigned(at_ms=at(90), assignment=again))
    step = step.then(lambda s: transition(s, InputsFetched(at_ms=at(95), lease=again.lease)))
    training = step.commands[-2]
    assert training == StartTraining(
        again, TrainingStart(3, returns_update=False), kept_rounds=(3,)
    )


def test_the_same_work_under_another_lease_is_only_sent() -> None:
    again = assignment(lease(3, 9))
    step = transition(AFTER_3, ShardAssigned(at_ms=at(90), assignment=again))
    assert step.commands[-1] == SendUpdate(again, update("3/7"))


def test_the_same_work_is_done_again_when_its_start_was_judged_differently_since() -> None:
    after_4 = after(AFTER_3, train(ROUND_4, sent_as(ROUND_3))).session
    assert start_of(after_4, lease(4, 9), None) == TrainingStart(3, returns_update=True)


def test_a_restarted_daemon_sends_a_finished_update_without_training() -> None:
    restarted_session = after(NodeSession(node=NODE, memory=AFTER_3.memory), CONNECT).session
    step = transition(restarted_session, ShardAssigned(at_ms=at(9), assignment=assignment(ROUND_3)))
    assert step.commands == (SendUpdate(assignment(ROUND_3), update("3/7")),)


def test_training_goes_on_while_the_link_is_down() -> None:
    lost_step = after(reach(*CONNECT, ASSIGN, FETCH, LOSE), (TRAIN,))
    assert isinstance(lost_step.session.work, Uploading)
    assert lost_step.commands == ()
    again = TimerFired(at_ms=lost_step.session.link.retry_at_ms, timer=Timer.RECONNECT)
    step = after(lost_step.session, (again, Connected(at_ms=at(900))))
    assert step.commands == (OpenLink((lease(),)), SendUpdate(assignment(), update()))


def test_an_assignment_said_again_after_a_reconnect_is_ignored() -> None:
    training = reach(*CONNECT, ASSIGN, FETCH)
    assert transition(training, ASSIGN) == (training, ())


def test_the_next_round_aborts_the_one_in_training_and_waits_for_the_worker() -> None:
    training = reach(*CONNECT, ASSIGN, FETCH)
    next_assignment = assignment(lease(4, 8))
    step = after(
        training,
        (
            ShardAssigned(at_ms=at(50), assignment=next_assignment),
            InputsFetched(at_ms=at(60), lease=lease(4, 8)),
        ),
    )
    assert step.commands == (AbortTraining(lease()), FetchInputs(next_assignment))
    step = transition(step.session, TrainingAborted(at_ms=at(70), lease=lease()))
    assert step.commands[0] == StartTraining(next_assignment, FRESH, kept_rounds=())


def test_a_shard_that_finishes_after_its_cancel_is_forgotten() -> None:
    cancel = ShardCancelled(at_ms=at(25), lease=lease(), reason="closed")
    step = after(reach(*CONNECT, ASSIGN, FETCH), (cancel, TRAIN))
    assert step.session.memory.rounds(SESSION_JOB) == ()
    assert step.session.worker.busy is None


def test_inputs_of_an_earlier_lease_start_no_training_under_the_newer_one() -> None:
    newer = ShardAssigned(at_ms=at(15), assignment=assignment(ROUND_4))
    fetching_session = reach(*CONNECT, ASSIGN, newer)
    step = transition(fetching_session, InputsFetched(at_ms=at(20), lease=ROUND_3))
    assert step == SessionStep(fetching_session)


def test_the_answer_to_an_earlier_lease_ends_no_upload_of_the_newer_one() -> None:
    uploading_session = after(AFTER_3, train(ROUND_4, sent_as(ROUND_3))).session
    step = transition(uploading_session, UploadLate(at_ms=at(80), lease=ROUND_3, reason="closed"))
    assert step.session.work == uploading_session.work


def test_another_job_waits_its_turn() -> None:
    step = after(
        reach(*CONNECT, ASSIGN, OTHER, FETCH, TRAIN),
        (UploadAccepted(at_ms=at(80), lease=lease()),),
    )
    assert step.commands == (FetchInputs(assignment(lease(0, 2, OTHER_JOB))),)


def test_a_drain_lets_training_finish_and_then_leaves() -> None:
    step = after(
        reach(*CONNECT, ASSIGN, FETCH),
        (DRAIN, TRAIN, UploadAccepted(at_ms=at(80), lease=lease())),
    )
    assert step.commands == (
        AnnounceDraining("SIGTERM"),
        SetTimer(Timer.DRAIN, at(25_040)),
        SendUpdate(assignment(), update()),
        Leave(Departure.DRAINED, "SIGTERM"),
    )


def test_a_drain_out_of_time_hands_back_and_leaves() -> None:
    step = after(
        reach(*CONNECT, ASSIGN, FETCH, DRAIN),
        (TimerFired(at_ms=at(25_040), timer=Timer.DRAIN),),
    )
    assert step.commands == (
        AbortTraining(lease()),
        HandBack(lease(), "SIGTERM; out of time"),
        Leave(Departure.DRAINED, "SIGTERM"),
    )


def test_a_worker_that_dies_is_restarted_three_times_and_then_that_shard_is_handed_back() -> None:
    session = reach(*CONNECT, ASSIGN, FETCH)
    waits = []
    for _ in range(3):
        step = transition(session, DIE)
        waits.append(step.session.worker.retry_at_ms - DIE.at_ms)
        step = transition(step.session, rests(step.session))
        assert isinstance(step.commands[0], StartTraining)
        session = step.session
    assert waits == sorted(waits)
    step = transition(session, DIE)
    reason = "the worker died 4 times: signal 11"
    assert step.commands == (HandBack(lease(), reason),)
    assert step.session.unhealthy == ""


def test_a_shard_that_does_not_fit_into_memory_is_handed_back_at_once() -> None:
    death = replace(DIE, reason="out of memory: 2 GiB", cause=FailureCause.OUT_OF_MEMORY)
    step = transition(reach(*CONNECT, ASSIGN, FETCH), death)
    back = HandBack(lease(), death.reason, FailureCause.OUT_OF_MEMORY)
    assert step.commands == (back,)
    repeated_step = transition(step.session, ASSIGN)
    assert repeated_step.commands == (back,)


def test_a_shard_that_the_worker_cannot_train_is_handed_back_with_its_cause() -> None:
    failure = TrainingFailed(
        at_ms=at(70), lease=lease(), reason="data set wards: empty", cause=FailureCause.OWNER
    )
    step = transition(reach(*CONNECT, ASSIGN, FETCH), failure)
    assert step.commands == (HandBack(lease(), failure.reason, FailureCause.OWNER),)


def given_up_on_a_shard() -> NodeSession:
    return transition(about_to_give_up(DIE), DIE).session


def test_a_shard_that_kills_the_worker_does_not_keep_the_node_from_other_work() -> None:
    session = given_up_on_a_shard()
    for held_lease in (lease(0, 2, OTHER_JOB), lease(4, 8)):
        step = after(session, train(held_lease)[:2])
        assert step.session.worker.deaths == 0
        assert isinstance(step.commands[-2], StartTraining)


def test_a_round_that_killed_the_worker_gets_one_more_try_when_it_is_given_again() -> None:
    step = after(given_up_on_a_shard(), (*train(lease(3, 9))[:2], DIE))
    assert step.commands[-1] == HandBack(lease(3, 9), "the worker died again: signal 11")
    assert step.session.work == Idle()


def test_a_worker_that_never_gets_ready_makes_the_node_unhealthy() -> None:
    reason = "no worker got ready in 4 starts: no driver"
    step = transition(about_to_give_up(NO_START), NO_START)
    assert step.commands[:2] == (AnnounceDraining(reason), HandBack(lease(), reason))
    declined_step = transition(step.session, OTHER)
    assert declined_step.commands == (HandBack(lease(0, 2, OTHER_JOB), reason),)


def test_an_unhealthy_node_goes_on_starting_its_worker_ever_slower() -> None:
    session, waits = unhealthy(), []
    for _ in range(8):
        waits.append(session.worker.retry_at_ms - NO_START.at_ms)
        step = transition(session, rests(session))
        limit = SetTimer(Timer.STALL, at(session.worker.retry_at_ms + 600_000))
        assert step.commands == (StartWorker(), limit)
        session = transition(step.session, NO_START).session
    assert waits[0] < waits[1] < waits[2]
    assert all(CAP_MS // 2 <= wait < CAP_MS for wait in waits[4:])


def test_an_unhealthy_node_whose_worker_starts_after_all_greets_the_coordinator_anew() -> None:
    step = transition(unhealthy(), WorkerReady(at_ms=at(90_000)))
    assert step.commands == (OpenLink(()),)
    well = transition(step.session, Connected(at_ms=at(90_010)))
    assert (well.session.unhealthy, well.commands) == ("", ())
    assert isinstance(after(well.session, train(lease(4, 8))[:2]).commands[-2], StartTraining)


def test_a_start_that_hangs_is_ended_like_a_training() -> None:
    session = unhealthy()
    step = transition(session, rests(session))
    due = TimerFired(at_ms=at(session.worker.retry_at_ms + 600_000), timer=Timer.STALL)
    assert transition(step.session, due).commands == (EndWorker("it made no progress for 600 s"),)


def test_starts_that_failed_are_forgiven_once_a_worker_got_ready() -> None:
    session = about_to_give_up(NO_START)
    step = after(session, (WorkerReady(at_ms=at(41)), NO_START))
    assert step.session.unhealthy == ""
    assert step.session.worker.false_starts == 1


def test_a_training_without_any_progress_has_its_worker_ended_after_ten_minutes() -> None:
    step = after(reach(*CONNECT, ASSIGN), (FETCH,))
    stall = step.commands[-1]
    assert stall == SetTimer(Timer.STALL, at(FETCH.at_ms + 600_000))
    step = transition(step.session, TimerFired(at_ms=stall.at_ms, timer=Timer.STALL))
    assert step.commands == (EndWorker("it made no progress for 600 s"),)
    dead = WorkerDied(at_ms=stall.at_ms, reason="it made no progress for 600 s")
    assert transition(step.session, dead).session.worker.deaths == 1


def test_after_the_first_progress_silence_is_borne_for_two_minutes() -> None:
    progress = TrainingProgressed(at_ms=at(1_000), lease=lease(), steps_done=5)
    step = transition(reach(*CONNECT, ASSIGN, FETCH), progress)
    assert step.commands == (SetTimer(Timer.STALL, at(121_000)),)
    early = TimerFired(at_ms=at(120_999), timer=Timer.STALL)
    assert transition(step.session, early) == (step.session, ())
    due = transition(step.session, TimerFired(at_ms=at(121_000), timer=Timer.STALL))
    assert due.commands == (EndWorker("it made no progress for 120 s"),)


def test_slow_inner_steps_are_waited_for_longer() -> None:
    first = TrainingProgressed(at_ms=at(30_020), lease=lease(), steps_done=1)
    quick = TrainingProgressed(at_ms=at(31_020), lease=lease(), steps_done=2)
    step = after(reach(*CONNECT, ASSIGN, FETCH), (first, quick))
    assert step.commands[-1] == SetTimer(Timer.STALL, at(31_020 + 20 * 30_000))


def test_a_restarted_training_has_all_its_time_again() -> None:
    progress = TrainingProgressed(at_ms=at(1_000), lease=lease(), steps_done=5)
    session = after(reach(*CONNECT, ASSIGN, FETCH), (progress, DIE)).session
    step = transition(session, rests(session))
    assert step.commands[-1] == SetTimer(Timer.STALL, at(session.worker.retry_at_ms + 600_000))


def test_a_worker_that_is_dropping_its_shard_is_not_ended_for_a_stall() -> None:
    aborting_session = reach(*CONNECT, ASSIGN, FETCH, CANCEL)
    stall_timer = TimerFired(at_ms=at(700_000), timer=Timer.STALL)
    assert transition(aborting_session, stall_timer) == (aborting_session, ())


def test_an_unhealthy_node_says_so_on_each_new_link() -> None:
    session = transition(unhealthy(), LinkLost(at_ms=at(90_000), reason="reset")).session
    again = TimerFired(at_ms=session.link.retry_at_ms, timer=Timer.RECONNECT)
    step = after(session, (again, Connected(at_ms=at(99_000))))
    assert step.commands[-1] == AnnounceDraining("no worker got ready in 4 starts: no driver")


def test_a_finished_training_forgives_the_worker_its_deaths() -> None:
    session = reach(*CONNECT, ASSIGN, FETCH, DIE)
    step = after(session, (rests(session), TRAIN))
    assert step.session.worker.deaths == 0


def test_an_idle_worker_may_die_without_a_word() -> None:
    idle = reach(*CONNECT)
    assert transition(idle, WorkerDied(at_ms=at(50), reason="signal 9")) == (idle, ())


def test_work_handed_back_without_a_link_is_told_once_the_link_is_there() -> None:
    lost_session = after(unhealthy(), (LinkLost(at_ms=at(90_000), reason="reset"),)).session
    assert lost_session.owed == ()
    training = reach(*CONNECT, ASSIGN, FETCH, LOSE)
    aborted_session = transition(training, TrainingAborted(at_ms=at(45), lease=lease())).session
    again = TimerFired(at_ms=aborted_session.link.retry_at_ms, timer=Timer.RECONNECT)
    step = after(aborted_session, (again, Connected(at_ms=at(900))))
    assert [type(command) for command in step.commands] == [OpenLink, HandBack]


def test_work_handed_back_is_not_taken_up_when_it_is_said_again() -> None:
    idle = after(reach(*CONNECT, ASSIGN, FETCH), (TrainingAborted(at_ms=at(45), lease=lease()),))
    step = transition(idle.session, ASSIGN)
    assert [type(command) for command in step.commands] == [HandBack]


def test_the_ninth_job_pushes_out_the_one_longest_untouched() -> None:
    session = reach(*CONNECT)
    for number in range(JOBS_MAX):
        held_lease = lease(0, 1, JobId(f"job-{number:012x}"))
        acceptance = UploadAccepted(at_ms=at(80), lease=held_lease)
        session = after(session, (*train(held_lease), acceptance)).session
    newest = ShardAssigned(at_ms=at(90), assignment=assignment(lease(0, 1, JobId("job-new"))))
    step = transition(session, newest)
    assert step.commands[0] == DeleteJobState(JobId("job-000000000000"))


def test_the_first_retry_is_quick_and_later_ones_stop_growing_at_the_cap() -> None:
    assert 100 <= backoff_ms(NODE, 0) < 200
    assert all(CAP_MS // 2 <= backoff_ms(NODE, attempt) < CAP_MS for attempt in range(8, 5_000, 97))


def test_nodes_cut_off_together_come_back_apart() -> None:
    assert len({backoff_ms(f"node {number}", 5) for number in range(100)}) > 90


def waits_while_away(session: NodeSession, dials: int) -> list[int]:
    """From each failed dial to the next, in milliseconds."""
    waits = []
    for _ in range(dials):
        due = session.link.retry_at_ms
        waits.append(due - session.link.since_ms)
        dialled_session = transition(session, TimerFired(at_ms=due, timer=Timer.RECONNECT)).session
        session = transition(dialled_session, LinkLost(at_ms=due, reason="refused")).session
    return waits


def test_a_good_link_that_broke_is_dialled_every_second_or_so_for_a_minute() -> None:
    session = reach(*CONNECT)
    link_loss = LinkLost(at_ms=at(session.link.since_ms + 10_000), reason="cut")
    session = transition(session, link_loss).session
    waits = waits_while_away(session, 60)
    of_the_minute = sum(sum(waits[:dial]) < 60_000 for dial in range(60))
    assert waits[:4] == sorted(waits[:4])
    assert waits[0] < 200
    assert max(waits[:of_the_minute]) < 1_500
    later = waits[of_the_minute:]
    assert later[:3] == sorted(later[:3])
    assert CAP_MS // 2 <= later[-1] < CAP_MS


def test_a_dial_that_nobody_answered_for_long_is_followed_by_the_next_at_once() -> None:
    session = reach(*CONNECT)
    link_loss = LinkLost(at_ms=at(session.link.since_ms + 10_000), reason="cut")
    session = transition(session, link_loss).session
    for _ in range(6):
        due = session.link.retry_at_ms
        dialled_session = transition(session, TimerFired(at_ms=due, timer=Timer.RECONNECT)).session
        silent = LinkLost(at_ms=at(due + 1_500), reason="silent")
        session = transition(dialled_session, silent).session
        assert session.link.retry_at_ms == due + 1_600


def test_a_coordinator_that_was_never_reached_is_dialled_ever_more_seldom() -> None:
    session = reach(CONNECT[0])
    session = transition(session, LinkLost(at_ms=at(5), reason="refused")).session
    waits = waits_while_away(session, 9)
    assert CAP_MS // 2 <= waits[-1] < CAP_MS


def dials_after_ms(session: NodeSession, heartbeat_ms: int) -> int:
    """Time after which a broken link is dialled again."""
    broken_at_ms = at(session.link.since_ms + 10_000)
    link_loss = LinkLost(at_ms=broken_at_ms, reason="reset", heartbeat_ms=at(heartbeat_ms))
    return transition(session, link_loss).session.link.retry_at_ms - broken_at_ms


def test_nodes_of_a_busy_process_come_back_over_some_time() -> None:
    nodes = [replace(reach(*CONNECT), node=f"node {number}") for number in range(2_000)]
    seconds = Counter(dials_after_ms(each, 25_000) // 1_000 for each in nodes)
    assert set(range(37)) <= set(seconds) <= set(range(38))
    assert max(seconds.values()) < 2 * 2_000 / 37
    assert max(dials_after_ms(each, 5_000) for each in nodes) < 200


def dialled_again(sessions: list[NodeSession], lost: LinkLost) -> tuple[list[NodeSession], int]:
    """The sessions that all dialled again, and over how many milliseconds."""
    waiting_sessions = [transition(each, lost).session for each in sessions]
    dials = [
        TimerFired(at_ms=each.link.retry_at_ms, timer=Timer.RECONNECT) for each in waiting_sessions
    ]
    dialled_sessions = [
        transition(*each).session for each in zip(waiting_sessions, dials, strict=True)
    ]
    return dialled_sessions, max(dial.at_ms for dial in dials) - lost.at_ms


def test_nodes_that_nobody_answers_in_time_dial_over_ever_more_time() -> None:
    session = reach(*CONNECT)
    sessions = [replace(session, node=f"node {number}") for number in range(200)]
    link_loss = LinkLost(
        at_ms=at(session.link.since_ms + 10_000), reason="", heartbeat_ms=at(25_000)
    )
    sessions, took_ms = dialled_again(sessions, link_loss)
    spreads_s = [took_ms / 1_000]
    for _ in range(4):
        link_loss = replace(link_loss, at_ms=at(link_loss.at_ms + took_ms + 90_000), is_silent=True)
        sessions, took_ms = dialled_again(sessions, link_loss)
        spreads_s.append(took_ms / 1_000)
    assert spreads_s == pytest.approx([37, 75, 150, 150, 150], abs=4)
    greeting = Connected(at_ms=at(link_loss.at_ms + took_ms))
    back = [transition(each, greeting).session for each in sessions]
    _, took_ms = dialled_again(back, replace(link_loss, at_ms=at(greeting.at_ms + 10_000)))
    assert took_ms < 38_000


def test_a_node_dials_for_ten_minutes_more_as_one_of_thousands() -> None:
    pace = ToldPace()
    assert pace.longest_ms == 0
    for told_at_ms, interval_ms in ((0, 5_000), (1, 30_000), (2, 25_000), (3, 5_000)):
        pace = pace.after_greeting(at(interval_ms), at(told_at_ms))
    assert pace.after_greeting(at(5_000), at(600_001)).longest_ms == 30_000
    assert pace.after_greeting(at(5_000), at(600_002)).longest_ms == 5_000
    assert pace.after_greeting(at(40_000), at(4)) == ToldPace(at(40_000))


def told_to_wait(session: NodeSession, wait_ms: int) -> NodeSession:
    link_loss = LinkLost(at_ms=session.link.since_ms, reason="come later", wait_ms=at(wait_ms))
    return transition(session, link_loss).session


def test_a_node_that_was_told_when_to_dial_comes_then_or_a_little_later() -> None:
    session = reach(*CONNECT)
    for wait_ms in (500, 7_000, 60_000):
        told_link = told_to_wait(session, wait_ms).link
        assert wait_ms <= told_link.retry_at_ms - told_link.since_ms < wait_ms * 9 / 8 + 2
        assert told_link.attempt == 0


def test_a_told_wait_has_a_limit() -> None:
    told_link = told_to_wait(reach(*CONNECT), 10**9).link
    assert told_link.retry_at_ms - told_link.since_ms < TOLD_WAIT_MS_MAX + 1_000


def test_a_refusal_of_a_good_link_is_still_retried_at_the_longest_wait() -> None:
    session = reach(*CONNECT)
    link_loss = LinkLost(at_ms=at(session.link.since_ms + 10_000), reason="cut")
    session = transition(session, link_loss).session
    due = session.link.retry_at_ms
    dialled_session = transition(session, TimerFired(at_ms=due, timer=Timer.RECONNECT)).session
    refused_session = transition(dialled_session, LinkRejected(at_ms=due, reason="revoked")).session
    assert refused_session.link.retry_at_ms - due >= CAP_MS // 2


def test_a_link_that_lasted_is_retried_quickly_and_a_flapping_one_ever_slower() -> None:
    session = reach(*CONNECT)
    waits = []
    for _ in range(6):
        session = transition(session, LinkLost(at_ms=session.link.since_ms, reason="")).session
        waits.append(session.link.retry_at_ms - session.link.since_ms)
        due = session.link.retry_at_ms
        reconnect_timer = TimerFired(at_ms=due, timer=Timer.RECONNECT)
        session = after(session, (reconnect_timer, Connected(at_ms=due))).session
    assert waits == sorted(waits)
    link_loss = LinkLost(at_ms=at(session.link.since_ms + 10_000), reason="")
    session = transition(session, link_loss).session
    assert session.link.retry_at_ms - session.link.since_ms < 200


def test_a_refused_link_is_retried_slowly_and_without_end() -> None:
    session = reach(*CONNECT[:1])
    refused_session = transition(session, LinkRejected(at_ms=at(7), reason="upgrade")).session
    assert refused_session.link.retry_at_ms - 7 >= CAP_MS // 2
    assert refused_session.link.reason == "upgrade"


def test_an_upload_that_makes_progress_is_retried_quickly() -> None:
    session = reach(*CONNECT, ASSIGN, FETCH, TRAIN)
    for _ in range(6):
        upload_break = UploadBroken(at_ms=at(0), lease=lease(), reason="reset", has_progressed=True)
        step = transition(session, upload_break)
        (timer,) = step.commands
        assert isinstance(timer, SetTimer)
        assert timer.at_ms < 200
        retry_timer = TimerFired(at_ms=timer.at_ms, timer=Timer.RETRY)
        session = transition(step.session, retry_timer).session


def test_a_worker_that_rests_trains_nothing_else_meanwhile() -> None:
    resting_session = reach(*CONNECT, ASSIGN, FETCH, DIE)
    early = TimerFired(at_ms=at(41), timer=Timer.WORKER)
    assert isinstance(resting_session.work, Training)
    assert transition(resting_session, early) == (resting_session, ())


def test_a_finished_update_waits_as_long_as_it_was_planned_to() -> None:
    staggered_assignment = replace(assignment(), upload_after_ms=at(400))
    assigned_event = ShardAssigned(at_ms=at(10), assignment=staggered_assignment)
    session = reach(*CONNECT, assigned_event, FETCH)
    step = transition(session, TrainingFinished(at_ms=at(100), lease=lease(), update=update()))
    assert step.commands == (SetTimer(Timer.RETRY, at(500)),)
    early = transition(step.session, TimerFired(at_ms=at(499), timer=Timer.RETRY))
    assert early.commands == ()
    due = transition(step.session, TimerFired(at_ms=at(500), timer=Timer.RETRY))
    assert due.commands == (SendUpdate(staggered_assignment, update()),)


def test_a_planned_wait_does_not_outlast_a_broken_link() -> None:
    staggered_assignment = replace(assignment(), upload_after_ms=at(60_000))
    assigned_event = ShardAssigned(at_ms=at(10), assignment=staggered_assignment)
    session = reach(*CONNECT, assigned_event, FETCH, LOSE)
    finish = TrainingFinished(at_ms=at(100), lease=lease(), update=update())
    step = transition(session, finish)
    assert step.commands == ()
    again = after(step.session, (TimerFired(at_ms=at(60_000), timer=Timer.RECONNECT), CONNECT[1]))
    assert again.commands[-1] == SendUpdate(staggered_assignment, update())


def test_an_update_that_waits_is_dropped_with_its_lease() -> None:
    staggered_assignment = replace(assignment(), upload_after_ms=at(400))
    assigned_event = ShardAssigned(at_ms=at(10), assignment=staggered_assignment)
    finish = TrainingFinished(at_ms=at(100), lease=lease(), update=update())
    session = reach(*CONNECT, assigned_event, FETCH, finish, CANCEL)
    assert session.work == Idle()
    assert transition(session, TimerFired(at_ms=at(500), timer=Timer.RETRY)).commands == ()


def test_a_worker_that_dies_before_it_trains_costs_the_work_nothing() -> None:
    """It dies over the first model that it was to draw, which is then fetched."""
    for death in (DIE, NO_START):
        dead = after(reach(*CONNECT, ASSIGN), (death, death, death, death))
        assert dead.commands == ()
        step = transition(dead.session, FETCH)
        assert isinstance(step.commands[0], StartTraining)
        assert isinstance(step.session.work, Training)
        assert step.session.worker.deaths == 0
