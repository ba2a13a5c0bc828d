"""The machine of a ring by single events."""

from coordinator.core.rings.ring import advance, rejection
from coordinator.core.rings.ring_events import (
    DropSession,
    PassReturned,
    ReplayStates,
    RingCommand,
    RingEvent,
    SendPass,
    SessionClosed,
    SessionOpened,
    SessionResult,
    StageBecameReady,
    StageLost,
    StatesReplayed,
)
from coordinator.core.rings.ring_state import PassSegment, Ring, RingLimits, RingStage, StagePace

PACE = StagePace(1_000, 100, 0)


def ring_of(stages: int = 3, **limits: object) -> Ring:
    ring = Ring(tuple(RingStage() for _ in range(stages)), RingLimits(**limits))  # type: ignore[arg-type]
    return after(ring, *(StageBecameReady(stage, PACE) for stage in range(stages)))[0]


def after(ring: Ring, *events: RingEvent) -> tuple[Ring, list[RingCommand]]:
    commands: list[RingCommand] = []
    for event in events:
        assert not rejection(ring, event)
        ring, more = advance(ring, event)
        commands.extend(more)
    return ring, commands


def returns(number: int, epoch: int = 1, *, stages: int = 3, **result: object) -> list[RingEvent]:
    last = SessionResult(1, **result)  # type: ignore[arg-type]
    passes = [PassReturned(stage, number, epoch) for stage in range(stages - 1)]
    return [*passes, PassReturned(stages - 1, number, epoch, (last,))]


def test_a_prompt_goes_around_whole_and_each_token_behind_it() -> None:
    ring, commands = after(ring_of(), SessionOpened(1, (5, 6, 7)))
    assert commands == [SendPass(0, 1, 1, (PassSegment(1, 0, (5, 6, 7), 1),))]
    ring, commands = after(ring, *returns(1, tokens=(8,)))
    segment = PassSegment(1, 3, (8,), 1)
    assert commands[-1] == SendPass(0, 2, 1, (segment,))
    assert [each.stage for each in commands if isinstance(each, SendPass)] == [1, 2, 0]
    ring, commands = after(ring, *returns(2, tokens=(9,), has_ended=True))
    assert commands[-1] == DropSession(1, (5, 6, 7, 8, 9))
    assert not ring.sessions


def test_a_long_prompt_goes_around_in_pieces_of_which_the_last_is_judged() -> None:
    ring, commands = after(ring_of(tokens_most=2), SessionOpened(1, (5, 6, 7, 8, 9)))
    events = [*(PassReturned(stage, 1, 1) for stage in range(3))]
    ring, commands = after(ring, *events)
    assert commands[-1] == SendPass(0, 2, 1, (PassSegment(1, 2, (7, 8)),))
    ring, commands = after(ring, *(PassReturned(stage, 2, 1) for stage in range(3)))
    assert commands[-1] == SendPass(0, 3, 1, (PassSegment(1, 4, (9,), 1),))


def test_what_comes_twice_is_drafted_and_wrong_drafts_are_overwritten() -> None:
    ring, _ = after(ring_of(), SessionOpened(1, (5, 6, 7, 5, 6, 7, 5)))
    ring, commands = after(ring, *returns(1, tokens=(6,)))
    (segment,) = [each for each in commands if isinstance(each, SendPass)][-1].segments
    assert segment.tokens[:3] == (6, 7, 5)
    assert segment.judged == len(segment.tokens)
    ring, commands = after(ring, *returns(2, tokens=(7, 99)))
    (segment,) = [each for each in commands if isinstance(each, SendPass)][-1].segments
    assert (segment.start, segment.tokens[0]) == (9, 99)


def test_a_lost_stage_is_given_what_the_one_before_had_sent_and_the_pass_goes_around_again() -> (
    None
):
    ring, _ = after(ring_of(), SessionOpened(1, (5, 6, 7)), *returns(1, tokens=(8,)))
    ring, commands = after(ring, StageLost(1))
    assert not commands
    assert rejection(ring, PassReturned(0, 2, 1)) == "the ring is in epoch 2, not 1"
    ring, commands = after(ring, StageBecameReady(1, PACE))
    assert commands == [ReplayStates(0, 1, 2, 0, 3)]
    ring, commands = after(ring, StatesReplayed(1, 2, 0, 3))
    assert commands == [SendPass(1, 3, 2, (PassSegment(1, 0, (5, 6, 7)),), is_repair=True)]
    ring, commands = after(ring, PassReturned(1, 3, 2))
    assert commands == [SendPass(0, 4, 2, (PassSegment(1, 3, (8,), 1),))]


def test_a_lost_first_stage_is_given_the_tokens() -> None:
    ring, _ = after(ring_of(), SessionOpened(1, (5, 6, 7)), *returns(1, tokens=(8,)))
    _, commands = after(ring, StageLost(0), StageBecameReady(0, PACE))
    assert commands == [SendPass(0, 3, 2, (PassSegment(1, 0, (5, 6, 7)),), is_repair=True)]


def test_states_that_are_gone_send_all_tokens_around_again() -> None:
    ring, _ = after(ring_of(), SessionOpened(1, (5, 6, 7)), *returns(1, tokens=(8,)))
    ring, _ = after(ring, StageLost(2), StageBecameReady(2, PACE))
    _, commands = after(ring, StatesReplayed(1, 2, 0, 0))
    assert commands == [SendPass(0, 3, 2, (PassSegment(1, 0, (5, 6, 7, 8), 1),))]


def test_two_lost_stages_send_all_tokens_around_again() -> None:
    ring, _ = after(ring_of(), SessionOpened(1, (5, 6, 7)), *returns(1, tokens=(8,)))
    ring, _ = after(ring, StageLost(2), StageLost(1), StageBecameReady(1, PACE))
    _, commands = after(ring, StageBecameReady(2, PACE))
    assert commands == [SendPass(0, 3, 3, (PassSegment(1, 0, (5, 6, 7, 8), 1),))]


def test_a_session_that_is_closed_while_it_is_repaired_holds_up_nobody() -> None:
    ring, _ = after(ring_of(), SessionOpened(1, (5, 6, 7)), *returns(1, tokens=(8,)))
    ring, _ = after(ring, StageLost(1), SessionOpened(2, (3,)), StageBecameReady(1, PACE))
    _, commands = after(ring, SessionClosed(1))
    assert commands == [DropSession(1), SendPass(0, 3, 2, (PassSegment(2, 0, (3,), 1),))]


def test_answers_that_do_not_fit_their_pass_are_refused_with_the_reason() -> None:
    ring, _ = after(ring_of(), SessionOpened(1, (5, 6)))
    result = (SessionResult(1, (7,)),)
    assert "judges no token" in rejection(ring, PassReturned(0, 1, 1, result))
    assert "not at stage 2" in rejection(ring, PassReturned(2, 1, 1, result))
    assert "no stage 3" in rejection(ring, PassReturned(3, 1, 1))
    ring, _ = after(ring, PassReturned(0, 1, 1), PassReturned(1, 1, 1))
    assert "other sessions" in rejection(ring, PassReturned(2, 1, 1))
    assert "2 tokens" in rejection(ring, PassReturned(2, 1, 1, (SessionResult(1, (7, 8)),)))
    assert "0 tokens" in rejection(ring, PassReturned(2, 1, 1, (SessionResult(1, ()),)))
    assert not rejection(ring, PassReturned(2, 1, 1, (SessionResult(1, (), has_ended=True),)))
