"""Leaving: a drain finishes or hands back what is held and goes; a stop just goes."""

from gpu_node.core.commands import AnnounceDraining, Departure, Leave, SetTimer
from gpu_node.core.events import DrainRequested, StopRequested, Timer
from gpu_node.core.state import (
    Connection,
    Fetching,
    Idle,
    Link,
    Session,
    Step,
    replace,
)
from gpu_node.core.working import given_up, queue_declined
from hypergpu.units import Milliseconds


def drain(session: Session, event: DrainRequested) -> Step:
    """Take nothing more. What is being trained or sent may finish within the limit."""
    if session.drain:
        return Step(session)
    reason = event.reason or "draining"
    limit_at_ms = Milliseconds(event.at_ms + session.drain_limit_ms)
    announced = (AnnounceDraining(reason),) if session.is_connected else ()
    step = Step(replace(session, drain=reason), (*announced, SetTimer(Timer.DRAIN, limit_at_ms)))
    step = step.then(lambda free: queue_declined(free, reason))
    if isinstance(session.work, Fetching):
        step = step.then(lambda free: given_up(free, reason))
    return step


def overdue(session: Session) -> Step:
    """The drain took too long: hand back what is left."""
    if not session.drain:
        return Step(session)
    return given_up(session, f"{session.drain}; out of time")


def leave_if_drained(session: Session, at_ms: Milliseconds) -> Step:
    """Leave once a drain has nothing left to wait for."""
    has_left = session.link.connection is Connection.LEFT
    if has_left or not session.drain or not isinstance(session.work, Idle):
        return Step(session)
    return _leave(session, at_ms, Leave(Departure.DRAINED, session.drain))


def stop(session: Session, event: StopRequested) -> Step:
    """Leave at once. What is not finished is lost to this node, not to the job."""
    return _leave(session, event.at_ms, Leave(Departure.STOPPED, event.reason))


def _leave(session: Session, at_ms: Milliseconds, leave: Leave) -> Step:
    link = Link(Connection.LEFT, at_ms, reason=leave.reason)
    return Step(replace(session, link=link, work=Idle(), queue=()), (leave,))
