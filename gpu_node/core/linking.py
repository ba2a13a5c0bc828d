"""The link: joining, dialling, losing, dialling again. It never ends the work, which may wait."""

from gpu_node.core.backoff import (
    FIRST_MS,
    QUICK_ATTEMPT_MAX,
    QUICK_CAP_MS,
    QUICK_MS,
    backoff_ms,
)
from gpu_node.core.commands import (
    AnnounceDraining,
    Command,
    Departure,
    FetchInputs,
    Join,
    Leave,
    OpenLink,
    SetTimer,
)
from gpu_node.core.events import (
    Connected,
    Joined,
    JoinFailed,
    JoinRefused,
    LinkLost,
    LinkRefused,
    Started,
    Timer,
    TimerFired,
)
from gpu_node.core.state import Connection, Fetching, Link, Session, Step, Uploading, replace
from gpu_node.core.working import upload
from hypergpu.units import Milliseconds

LASTING_MS = 10_000
"""A link that held this long was a good one: for a minute after it broke, retries are quick."""
SHORT_LIVED_ATTEMPT = 2
"""A link that broke sooner is retried within a second: a coordinator that is killed again and again
must find its nodes there, and one that turns everybody away must not be stormed."""
REFUSED_ATTEMPT = 8
"""A refusal does not pass in a moment: retry at the longest wait."""

LinkEvent = (
    Started | Joined | JoinFailed | JoinRefused | Connected | LinkLost | LinkRefused | TimerFired
)


def advance_link(session: Session, event: LinkEvent) -> Step:
    """Advance the link by one event; one that does not fit its state changes nothing."""
    match session.link.connection:
        case Connection.DOWN | Connection.JOINING:
            return _while_unjoined(session, event)
        case Connection.CONNECTING | Connection.CONNECTED:
            return _while_dialling(session, event)
        case Connection.WAITING if _is_due(session, event):
            return _dialling(session, event.at_ms)
        case Connection.JOIN_WAITING if _is_due(session, event):
            return _joining(session, event.at_ms)
        case _:
            return Step(session)


def _while_unjoined(session: Session, event: LinkEvent) -> Step:
    match session.link.connection, event:
        case Connection.DOWN, Started(has_certificate=has_certificate):
            begin = _dialling if has_certificate else _joining
            return begin(session, event.at_ms)
        case Connection.JOINING, Joined():
            return _dialling(replace(session, link=Link()), event.at_ms)
        case Connection.JOINING, JoinFailed(reason=reason):
            return _waiting(session, event.at_ms, reason, Connection.JOIN_WAITING)
        case Connection.JOINING, JoinRefused(reason=reason):
            left = Link(connection=Connection.LEFT, since_ms=event.at_ms, reason=reason)
            return Step(replace(session, link=left), (Leave(Departure.REFUSED, reason),))
        case _:
            return Step(session)


def _while_dialling(session: Session, event: LinkEvent) -> Step:
    match event:
        case Connected() if not session.is_connected:
            return _note_connection(session, event.at_ms)
        case LinkLost(reason=reason):
            return _waiting(session, event.at_ms, reason)
        case LinkRefused(reason=reason):
            return _waiting(session, event.at_ms, reason, attempt_min=REFUSED_ATTEMPT)
        case _:
            return Step(session)


def _is_due(session: Session, event: LinkEvent) -> bool:
    return isinstance(event, TimerFired) and event.at_ms >= session.link.retry_at_ms


def dial_again(session: Session, at_ms: Milliseconds) -> Step:
    """Greet the coordinator anew: a fresh stream takes back what was said of draining."""
    return _dialling(session, at_ms) if session.is_connected else Step(session)


def _joining(session: Session, at_ms: Milliseconds) -> Step:
    link = replace(session.link, connection=Connection.JOINING, since_ms=at_ms)
    return Step(replace(session, link=link), (Join(),))


def _dialling(session: Session, at_ms: Milliseconds) -> Step:
    link = replace(session.link, connection=Connection.CONNECTING, since_ms=at_ms)
    held = (session.current, *session.queue)
    working = tuple(assignment.lease for assignment in held if assignment is not None)
    return Step(replace(session, link=link), (OpenLink(working),))


def _waiting(
    session: Session,
    at_ms: Milliseconds,
    reason: str,
    connection: Connection = Connection.WAITING,
    *,
    attempt_min: int = 0,
) -> Step:
    quick_until_ms = _quick_until_ms(session, at_ms)
    is_quick = at_ms < quick_until_ms and not attempt_min
    attempt = max(_attempt(session, at_ms), attempt_min)
    cap_ms = session.reconnect_cap_ms
    if is_quick:
        attempt, cap_ms = min(attempt, QUICK_ATTEMPT_MAX), min(cap_ms, QUICK_CAP_MS)
    waits_ms = backoff_ms(session.node, attempt, cap_ms)
    retry_at_ms = Milliseconds(at_ms + waits_ms)
    if is_quick and session.link.connection is Connection.CONNECTING:
        # A dial into a dead line has waited already.
        retry_at_ms = Milliseconds(max(at_ms + FIRST_MS // 2, session.link.since_ms + waits_ms))
    waiting = Link(connection, at_ms, attempt + 1, retry_at_ms, reason, quick_until_ms)
    return Step(replace(session, link=waiting), (SetTimer(Timer.RECONNECT, retry_at_ms),))


def _quick_until_ms(session: Session, at_ms: Milliseconds) -> Milliseconds:
    """Until when a broken link is dialled again at least every two seconds."""
    if session.is_connected and at_ms - session.link.since_ms >= LASTING_MS:
        return Milliseconds(at_ms + QUICK_MS)
    return session.link.quick_until_ms


def _attempt(session: Session, at_ms: Milliseconds) -> int:
    """The next attempt's number: a link that the coordinator welcomed forgives what came before."""
    if not session.is_connected:
        return session.link.attempt
    has_lasted = at_ms - session.link.since_ms >= LASTING_MS
    return 0 if has_lasted else min(session.link.attempt, SHORT_LIVED_ATTEMPT)


def _note_connection(session: Session, at_ms: Milliseconds) -> Step:
    link = replace(session.link, connection=Connection.CONNECTED, since_ms=at_ms, reason="")
    commands: list[Command] = []
    if reason := session.drain or session.unhealthy:
        commands.append(AnnounceDraining(reason))
    commands.extend(session.owed)
    work = session.work
    match work:
        case Fetching(assignment=assignment):
            work = replace(work, retry_at_ms=Milliseconds(0))
            commands.append(FetchInputs(assignment))
        case Uploading():
            work = replace(work, retry_at_ms=Milliseconds(0))
            commands.append(upload(work))
        case _:
            pass
    return Step(replace(session, link=link, work=work, owed=()), tuple(commands))
