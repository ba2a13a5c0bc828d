"""Steps of a node that drains, is withheld by its owner, or leaves."""

from msgspec.structs import replace

from gpu_node.core import commands, events
from gpu_node.core.link import dial_again
from gpu_node.core.session_state import (
    Contributing,
    CoordinatorLink,
    Fetching,
    Idle,
    LinkPhase,
    NodeSession,
    SessionStep,
    Uploading,
)
from gpu_node.core.work import decline_queue, give_up
from hypergpu.assignment import FailureCause
from hypergpu.units import Milliseconds


def drain(session: NodeSession, event: events.DrainRequested) -> SessionStep:
    """Take nothing more. A training or an upload may finish within the limit."""
    if session.drain:
        return SessionStep(session)
    reason = event.reason or "draining"
    limit_at_ms = Milliseconds(event.at_ms + session.drain_limit_ms)
    announcement = (commands.AnnounceDraining(reason),) if session.is_connected else ()
    timer = commands.SetTimer(events.Timer.DRAIN, limit_at_ms)
    step = SessionStep(replace(session, drain=reason), (*announcement, timer))
    step = step.then(lambda reached: decline_queue(reached, reason))
    if isinstance(session.work, Fetching):
        step = step.then(lambda reached: give_up(reached, reason))
    return step


def change_availability(session: NodeSession, event: events.AvailabilityChanged) -> SessionStep:
    """Work no more for a while, or again. A finished update is still sent.

    The worker ends, so that the machine's memory is its owner's.
    """
    before, session = session.withheld, replace(session, withheld=event.reason)
    if event.reason == before or session.drain:
        return SessionStep(session)
    if not event.reason:
        return SessionStep(session) if session.unhealthy else dial_again(session, event.at_ms)
    announcement = (commands.AnnounceDraining(event.reason),) if session.is_connected else ()
    step = SessionStep(session, announcement)
    step = step.then(lambda reached: decline_queue(reached, event.reason, FailureCause.OWNER))
    if not isinstance(session.work, Uploading | Contributing):
        step = step.then(lambda reached: give_up(reached, event.reason, FailureCause.OWNER))
    end = commands.EndWorker(event.reason, FailureCause.OWNER)
    return SessionStep(step.session, (*step.commands, end))


def give_up_overdue(session: NodeSession, _: events.TimerFired) -> SessionStep:
    """Hand back the rest of a drain that took too long."""
    if not session.drain:
        return SessionStep(session)
    return give_up(session, f"{session.drain}; out of time")


def leave_if_drained(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Leave once a drain has nothing left to wait for."""
    has_left = session.link.phase is LinkPhase.LEFT
    if has_left or not session.drain or not isinstance(session.work, Idle):
        return SessionStep(session)
    return _leave(session, at_ms, commands.Leave(commands.Departure.DRAINED, session.drain))


def stop(session: NodeSession, event: events.StopRequested) -> SessionStep:
    """Leave at once. Unfinished work is lost to this node, not to the job."""
    return _leave(session, event.at_ms, commands.Leave(commands.Departure.STOPPED, event.reason))


def _leave(session: NodeSession, at_ms: Milliseconds, leave: commands.Leave) -> SessionStep:
    link = CoordinatorLink(LinkPhase.LEFT, at_ms, reason=leave.reason)
    session = replace(session, link=link, work=Idle(), next_work=Idle(), queue=())
    return SessionStep(session, (leave,))
