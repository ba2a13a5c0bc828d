"""The machine of a ring: which tokens go around it next, and what is done when a stage is lost.

Theory of operation. A *pass* takes tokens of some sessions from the first stage to the last one. It
is addressed by position: a stage overwrites what lies at its positions, so that a pass may be sent
again, and a draft that was rejected is rolled back by the next pass alone. A session is in one pass
at a time; its *position* is how many of its tokens have keys in every stage.

A stage that is lost takes the keys of its layers with it. The *epoch* goes up, so that answers that
are still on their way count for nothing, and every pass is forgotten. Once another node holds the
layers, each session is *repaired*: the stage before sends what it had sent to the lost one (the
first stage is sent the tokens), and the new holder computes keys from it; no other stage does
anything. Where these states are gone, too, all tokens of the session go around the ring again.

References:
    Petals (Borzunov et al. 2023, arXiv:2209.01188) keeps inputs of lost servers at clients.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.rings import ring_events
from coordinator.core.rings.drafts import DRAFT_MOST, draft_length, prompt_lookup
from coordinator.core.rings.pass_plan import PassPlan
from coordinator.core.rings.ring_events import RingCommand, RingEvent
from coordinator.core.rings.ring_state import (
    PassSegment,
    Ring,
    RingPass,
    RingSession,
    RingStage,
)


class RingStep(NamedTuple):
    """The effect of one event."""

    ring: Ring
    commands: tuple[RingCommand, ...] = ()


def rejection(ring: Ring, event: RingEvent) -> str:
    """Why the ring does not accept the event now; empty: it does."""
    stage = getattr(event, "stage", 0)
    if not 0 <= stage < len(ring.stages):
        return f"the ring has no stage {stage}"
    reject = _REJECTIONS.get(type(event))
    return reject(ring, event) if reject is not None else ""


def _opening_rejection(ring: Ring, event: ring_events.SessionOpened) -> str:
    if event.session in ring.sessions:
        return f"session {event.session} is open already"
    return "" if event.tokens else "a session begins with one token at least"


def _closing_rejection(ring: Ring, event: ring_events.SessionClosed) -> str:
    return "" if event.session in ring.sessions else f"there is no session {event.session}"


def _return_rejection(ring: Ring, event: ring_events.PassReturned) -> str:
    if event.epoch != ring.epoch:
        return f"the ring is in epoch {ring.epoch}, not {event.epoch}"
    ring_pass = ring.passes.get(event.number)
    if ring_pass is None or ring_pass.stage != event.stage:
        return f"pass {event.number} is not at stage {event.stage}"
    if ring_pass.is_repair or event.stage < len(ring.stages) - 1:
        return "" if not event.results else "a stage that is not the last judges no token"
    judged_counts = {each.session: each.judged for each in ring_pass.segments if each.judged}
    if {each.session for each in event.results} != judged_counts.keys():
        return f"pass {event.number} was answered for other sessions than it has"
    for result in event.results:
        least = 0 if result.has_ended else 1
        if not least <= len(result.tokens) <= judged_counts[result.session]:
            return f"pass {event.number} was answered with {len(result.tokens)} tokens"
    return ""


def _ready_rejection(ring: Ring, event: ring_events.StageBecameReady) -> str:
    return f"stage {event.stage} is there already" if ring.stages[event.stage].is_ready else ""


def _loss_rejection(ring: Ring, event: ring_events.StageLost) -> str:
    return "" if ring.stages[event.stage].is_ready else f"stage {event.stage} is not there"


def _replay_rejection(ring: Ring, event: ring_events.StatesReplayed) -> str:
    if event.epoch != ring.epoch:
        return f"the ring is in epoch {ring.epoch}, not {event.epoch}"
    session = ring.sessions.get(event.session)
    if ring.repaired_stage is None or session is None:
        return f"nothing of session {event.session} is being repaired"
    if session.pass_number or session.repaired != event.start:
        return f"session {event.session} waits for no states from {event.start} on"
    return ""


_REJECTIONS: Mapping[type, Callable[..., str]] = {
    ring_events.SessionOpened: _opening_rejection,
    ring_events.SessionClosed: _closing_rejection,
    ring_events.PassReturned: _return_rejection,
    ring_events.StageBecameReady: _ready_rejection,
    ring_events.StageLost: _loss_rejection,
    ring_events.StatesReplayed: _replay_rejection,
}


def advance(ring: Ring, event: RingEvent) -> RingStep:
    """Advance the ring by one event; one that is rejected changes nothing."""
    if rejection(ring, event):
        return RingStep(ring)
    step: RingStep = _STEPS[type(event)](ring, event)
    return _with_passes(step)


def _open_session(ring: Ring, event: ring_events.SessionOpened) -> RingStep:
    return RingStep(_with_session(ring, event.session, RingSession(event.tokens)))


def _close_session(ring: Ring, event: ring_events.SessionClosed) -> RingStep:
    is_repaired_now = event.session == _session_to_repair(ring)
    ring = _without_session(ring, event.session)
    drop = ring_events.DropSession(event.session)
    step = _repair(ring) if is_repaired_now else RingStep(ring)
    return RingStep(step.ring, (drop, *step.commands))


def _session_to_repair(ring: Ring) -> int | None:
    """The session that a new holder is being given keys of; None: there is none."""
    if ring.repaired_stage is None:
        return None
    numbers = (number for number, each in ring.sessions.items() if each.repaired < each.position)
    return next(numbers, None)


def _with_session(ring: Ring, number: int, session: RingSession) -> Ring:
    return replace(ring, sessions={**ring.sessions, number: session})


def _without_session(ring: Ring, number: int) -> Ring:
    sessions = {each: session for each, session in ring.sessions.items() if each != number}
    return replace(ring, sessions=sessions)


def _without_pass(ring: Ring, number: int) -> Ring:
    passes = {each: ring_pass for each, ring_pass in ring.passes.items() if each != number}
    return replace(ring, passes=passes)


def _return_pass(ring: Ring, event: ring_events.PassReturned) -> RingStep:
    ring_pass = ring.passes[event.number]
    if ring_pass.is_repair:
        return _end_repair_pass(_without_pass(ring, event.number), ring_pass)
    if event.stage < len(ring.stages) - 1:
        next_stage = event.stage + 1
        moved_pass = replace(ring_pass, stage=next_stage)
        ring = replace(ring, passes={**ring.passes, event.number: moved_pass})
        send = ring_events.SendPass(next_stage, event.number, ring.epoch, moved_pass.segments)
        return RingStep(ring, (send,))
    return _end_pass(_without_pass(ring, event.number), ring_pass, event)


def _end_pass(ring: Ring, ring_pass: RingPass, event: ring_events.PassReturned) -> RingStep:
    results = {each.session: each for each in event.results}
    commands: list[RingCommand] = []
    for segment in ring_pass.segments:
        session = ring.sessions.get(segment.session)
        if session is None:
            continue  # It was closed meanwhile.
        result = results.get(segment.session)
        if result is not None and result.has_ended:
            ring = _without_session(ring, segment.session)
            tokens = (*session.tokens, *result.tokens)
            commands.append(ring_events.DropSession(segment.session, tokens))
            continue
        tokens = result.tokens if result is not None else ()
        ring = _with_session(ring, segment.session, _after_pass(session, segment, tokens))
    return RingStep(ring, tuple(commands))


def _after_pass(session: RingSession, segment: PassSegment, tokens: tuple[int, ...]) -> RingSession:
    """A session once its tokens went around: drafts that were wrong are forgotten."""
    known_tokens = (*session.tokens, *tokens)
    # The newest token has no keys yet; those of right drafts have.
    position = len(known_tokens) - 1 if segment.judged else segment.start + len(segment.tokens)
    guesses = prompt_lookup(known_tokens, DRAFT_MOST) if segment.judged else session.guesses
    return replace(
        session,
        tokens=known_tokens,
        position=position,
        pass_number=0,
        drafts=session.drafts.with_guesses(session.guesses, tokens),
        guesses=guesses,
    )


def _end_repair_pass(ring: Ring, ring_pass: RingPass) -> RingStep:
    for segment in ring_pass.segments:
        session = ring.sessions.get(segment.session)
        if session is not None:
            end = segment.start + len(segment.tokens)
            session = replace(session, pass_number=0, repaired=end)
            ring = _with_session(ring, segment.session, session)
    return _repair(ring)


def _ready_stage(ring: Ring, event: ring_events.StageBecameReady) -> RingStep:
    has_keys = all(not session.position for session in ring.sessions.values())
    stage = RingStage(is_ready=True, has_keys=has_keys, pace=event.pace)
    ring = _with_stage(ring, event.stage, stage)
    return _repair(ring)


def _with_stage(ring: Ring, index: int, stage: RingStage) -> Ring:
    stages = (*ring.stages[:index], stage, *ring.stages[index + 1 :])
    return replace(ring, stages=stages)


def _lose_stage(ring: Ring, event: ring_events.StageLost) -> RingStep:
    stage = replace(ring.stages[event.stage], is_ready=False, has_keys=False)
    sessions = {
        number: replace(session, pass_number=0, repaired=0)
        for number, session in ring.sessions.items()
    }
    ring = replace(
        _with_stage(ring, event.stage, stage), sessions=sessions, passes={}, epoch=ring.epoch + 1
    )
    return RingStep(ring)


def _repair(ring: Ring) -> RingStep:
    """Give a new holder the keys of the next session that has some; end once all have."""
    if not ring.is_whole:
        return RingStep(ring)
    keyless = [index for index, stage in enumerate(ring.stages) if not stage.has_keys]
    if not keyless:
        return RingStep(ring)
    if len(keyless) > 1:  # The stage before may have nothing to send: all tokens go around again.
        for number, session in ring.sessions.items():
            ring = _with_session(ring, number, replace(session, position=0, repaired=0))
    next_session = _session_to_repair(ring)
    if next_session is None:
        return RingStep(_with_all_keys(ring))
    number, session = next_session, ring.sessions[next_session]
    if session.pass_number:
        return RingStep(ring)
    count = min(ring.limits.tokens_most, session.position - session.repaired)
    if keyless[0] == 0:
        return _send_repair(ring, number, count)
    replay = ring_events.ReplayStates(keyless[0] - 1, number, ring.epoch, session.repaired, count)
    return RingStep(ring, (replay,))


def _with_all_keys(ring: Ring) -> Ring:
    stages = tuple(replace(stage, has_keys=True) for stage in ring.stages)
    sessions = {number: replace(each, repaired=0) for number, each in ring.sessions.items()}
    return replace(ring, stages=stages, sessions=sessions)


def _take_states(ring: Ring, event: ring_events.StatesReplayed) -> RingStep:
    session = ring.sessions[event.session]
    if not event.count:
        return _repair(_with_session(ring, event.session, replace(session, position=0, repaired=0)))
    count = min(event.count, ring.limits.tokens_most, session.position - session.repaired)
    return _send_repair(ring, event.session, count)


def _send_repair(ring: Ring, number: int, count: int) -> RingStep:
    session, stage = ring.sessions[number], ring.repaired_stage or 0
    tokens = session.tokens[session.repaired : session.repaired + count]
    segment = PassSegment(number, session.repaired, tokens)
    return _begin_pass(ring, RingPass((segment,), stage, is_repair=True))


def _begin_pass(ring: Ring, ring_pass: RingPass) -> RingStep:
    number = ring.next_pass
    ring = replace(ring, passes={**ring.passes, number: ring_pass}, next_pass=number + 1)
    for segment in ring_pass.segments:
        session = ring.sessions[segment.session]
        session = replace(session, pass_number=number, last_pass=number)
        ring = _with_session(ring, segment.session, session)
    send = ring_events.SendPass(
        ring_pass.stage, number, ring.epoch, ring_pass.segments, ring_pass.is_repair
    )
    return RingStep(ring, (send,))


def _with_passes(step: RingStep) -> RingStep:
    """Begin passes while sessions wait and the ring has room for more."""
    ring, commands = step
    if not ring.is_whole or ring.repaired_stage is not None:
        return step
    plan = ring.pass_plan
    while len(ring.passes) < plan.passes:
        segments = _next_segments(ring, plan)
        if not segments:
            break
        begin = _begin_pass(ring, RingPass(segments))
        ring, commands = begin.ring, (*commands, *begin.commands)
    return RingStep(ring, commands)


def _next_segments(ring: Ring, plan: PassPlan) -> tuple[PassSegment, ...]:
    """Tokens of the sessions that have waited longest, as many as a pass takes."""
    segments = list[PassSegment]()
    room = ring.limits.tokens_most
    idle = [(each.last_pass, number) for number, each in ring.sessions.items() if each.is_idle]
    for _, number in sorted(idle)[: plan.sessions]:
        if not room:
            break
        segment = _next_segment(ring, number, room, plan)
        segments.append(segment)
        room -= len(segment.tokens)
    return tuple(segments)


def _next_segment(ring: Ring, number: int, room: int, plan: PassPlan) -> PassSegment:
    session = ring.sessions[number]
    unread = session.tokens[session.position :]
    if len(unread) > room:
        return PassSegment(number, session.position, unread[:room])
    draft = _draft(ring, session, room - len(unread), plan) if len(unread) == 1 else ()
    return PassSegment(number, session.position, (*unread, *draft), 1 + len(draft))


def _draft(ring: Ring, session: RingSession, room: int, plan: PassPlan) -> tuple[int, ...]:
    if not ring.limits.has_drafts or not session.guesses:
        return ()
    live = len(ring.sessions)
    length = draft_length(ring.costs, session.drafts.accuracy, live, plan.passes)
    return session.guesses[: min(length, room)]


_STEPS: Mapping[type, Callable[[Ring, Any], RingStep]] = {
    ring_events.SessionOpened: _open_session,
    ring_events.SessionClosed: _close_session,
    ring_events.PassReturned: _return_pass,
    ring_events.StageBecameReady: _ready_stage,
    ring_events.StageLost: _lose_stage,
    ring_events.StatesReplayed: _take_states,
}
