"""Leaving: a drain finishes or hands back the work and leaves; a stop leaves at once."""

from gpu_node.core import commands, events
from gpu_node.core.state import (
    CoordinatorLink,
    Fetching,
    Idle,
    LinkPhase,
    NodeSession,
    SessionStep,
    replace,
)
from gpu_node.core.work import decline_queue, give_up
from hypergpu.units import Milliseconds


def drain(session: NodeSession, event: events.DrainRequested) -> SessionStep:
    """Take nothing more. A training or an upload may finish within the limit."""
    if session.drain:
        return SessionStep(session)
    reason = event.reason or "draining"
    limit_at_ms = Milliseconds(event.at_ms + session.drain_limit_ms)
    announced = (commands.AnnounceDraining(reason),) if session.is_connected else ()
    timer = commands.SetTimer(events.Timer.DRAIN, limit_at_ms)
    step = SessionStep(replace(session, drain=reason), (*announced, timer))
    step = step.then(lambda reached: decline_queue(reached, reason))
    if isinstance(session.work, Fetching):
        step = step.then(lambda reached: give_up(reached, reason))
    return step


def give_up_overdue(session: NodeSession, _: events.TimerFired) -> SessionStep:
    """Hand back the rest of a drain that took too long."""
    if not session.drain:
        return SessionStep(session)
    return give_up(session, f"{session.drain}; out of time")


def leave_if_drained(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """commands.Leave once a drain has nothing left to wait for."""
    has_left = session.link.phase is LinkPhase.LEFT
    if has_left or not session.drain or not isinstance(session.work, Idle):
        return SessionStep(session)
    return _leave(session, at_ms, commands.Leave(commands.Departure.DRAINED, session.drain))


def stop(session: NodeSession, event: events.StopRequested) -> SessionStep:
    """commands.Leave at once. Unfinished work is lost to this node, not to the job."""
    return _leave(session, event.at_ms, commands.Leave(commands.Departure.STOPPED, event.reason))


def _leave(session: NodeSession, at_ms: Milliseconds, leave: commands.Leave) -> SessionStep:
    link = CoordinatorLink(LinkPhase.LEFT, at_ms, reason=leave.reason)
    return SessionStep(replace(session, link=link, work=Idle(), queue=()), (leave,))
