"""The link: it joins, dials, breaks and dials again. A broken link never ends the work."""

from typing import NamedTuple

from msgspec.structs import replace

from gpu_node.core import commands, events
from gpu_node.core.backoff import (
    FIRST_MS,
    QUICK_ATTEMPT_MAX,
    QUICK_CAP_MS,
    QUICK_MS,
    backoff_ms,
    chosen_ms,
)
from gpu_node.core.next_work import resume_fetching
from gpu_node.core.session_state import CoordinatorLink, LinkPhase, NodeSession, SessionStep
from gpu_node.core.work import resume_transfer
from hypergpu.units import Milliseconds

LASTING_MS = 10_000
"""A link that held this long was a good one: for a minute after it broke, retries are quick."""
SHORT_LIVED_ATTEMPT = 2
"""A link that broke sooner is retried within a second: a coordinator that is killed again and again
must find its nodes there, and one that turns everybody away must not be stormed."""
TOLD_WAIT_MS_MAX = 300_000
USUAL_HEARTBEAT_MS = 5_000
"""A longer interval tells of thousands of nodes, which must not dial all at once."""
SPREAD_INTERVALS = 1.5
"""They dial again over so many: of 5,000 some 130 a second, half a core of a gateway. Where nobody
answers in time, over twice as many each time: who has more dials than it can answer in the time
that nodes wait would answer none.
"""
SPREAD_MS_MAX = 150_000
"""A node cannot tell a busy process from a dead line of its own, whose end it must not miss for
long.
"""
PACE_KEPT_MS = 600_000
"""How long a node goes by an interval after it is told a shorter one: a process that has only just
started tells its first nodes to speak often, however many others come.
"""
SPREAD_PART = 8
"""A told wait is spread by up to so small a part of it, at most by 200 ms."""
_DOUBLINGS_MAX = 8
REJECTED_ATTEMPT = 8
"""A rejection does not pass in a moment: retry at the longest wait."""


def is_paced(heartbeat_ms: Milliseconds) -> bool:
    """Whether heartbeats of this interval tell of thousands of nodes."""
    return heartbeat_ms > USUAL_HEARTBEAT_MS


class ToldPace(NamedTuple):
    """Intervals of heartbeats that greetings asked for."""

    newest_ms: Milliseconds = Milliseconds(0)
    """0: there was no greeting yet."""
    longer_ms: Milliseconds = Milliseconds(0)
    """One before it that was longer; 0: none is kept."""
    longer_until_ms: Milliseconds = Milliseconds(0)
    """The next greeting from then on drops it."""

    def after_greeting(self, interval_ms: Milliseconds, at_ms: Milliseconds) -> "ToldPace":
        """The state after another greeting. Without one nothing is forgotten."""
        longer_ms = self.longer_ms if at_ms < self.longer_until_ms else 0
        if interval_ms >= max(self.newest_ms, longer_ms):
            return ToldPace(interval_ms)
        if longer_ms:
            return self._replace(newest_ms=interval_ms)
        return ToldPace(interval_ms, self.newest_ms, Milliseconds(at_ms + PACE_KEPT_MS))

    @property
    def longest_ms(self) -> Milliseconds:
        """The interval to dial by; 0: there was no greeting yet."""
        return max(self.newest_ms, self.longer_ms)


def advance_link(session: NodeSession, event: events.NodeEvent) -> SessionStep:
    """Advance the link by one event; one that does not fit its state changes nothing."""
    match session.link.phase:
        case LinkPhase.DOWN | LinkPhase.JOINING:
            return _advance_join(session, event)
        case LinkPhase.CONNECTING | LinkPhase.CONNECTED:
            return _advance_dial(session, event)
        case LinkPhase.WAITING if _is_due(session, event):
            return _dial(session, event.at_ms)
        case LinkPhase.JOIN_WAITING if _is_due(session, event):
            return _join(session, event.at_ms)
        case _:
            return SessionStep(session)


def _advance_join(session: NodeSession, event: events.NodeEvent) -> SessionStep:
    match session.link.phase, event:
        case LinkPhase.DOWN, events.Started(has_certificate=has_certificate):
            begin = _dial if has_certificate else _join
            return begin(session, event.at_ms)
        case LinkPhase.JOINING, events.Joined():
            return _dial(replace(session, link=CoordinatorLink()), event.at_ms)
        case LinkPhase.JOINING, events.JoinFailed(reason=reason):
            return _wait_to_retry(session, event.at_ms, reason, LinkPhase.JOIN_WAITING)
        case LinkPhase.JOINING, events.JoinRejected(reason=reason):
            final_link = CoordinatorLink(phase=LinkPhase.LEFT, since_ms=event.at_ms, reason=reason)
            return SessionStep(
                replace(session, link=final_link),
                (commands.Leave(commands.Departure.REJECTED, reason),),
            )
        case _:
            return SessionStep(session)


def _advance_dial(session: NodeSession, event: events.NodeEvent) -> SessionStep:
    match event:
        case events.Connected() if not session.is_connected:
            return _resume_connected(session, event.at_ms)
        case events.LinkLost(reason=reason, wait_ms=wait_ms) if wait_ms:
            return _wait_as_told(session, event.at_ms, reason, wait_ms)
        case events.LinkLost():
            return _dial_later(session, event)
        case events.LinkRejected(reason=reason):
            return _wait_to_retry(session, event.at_ms, reason, attempt_min=REJECTED_ATTEMPT)
        case _:
            return SessionStep(session)


def _is_due(session: NodeSession, event: events.NodeEvent) -> bool:
    return isinstance(event, events.TimerFired) and event.at_ms >= session.link.retry_at_ms


def dial_again(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Greet the coordinator anew: a fresh stream takes back the announcement of a drain."""
    return _dial(session, at_ms) if session.is_connected else SessionStep(session)


def _join(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    link = replace(session.link, phase=LinkPhase.JOINING, since_ms=at_ms)
    return SessionStep(replace(session, link=link), (commands.Join(),))


def _dial(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    link = replace(session.link, phase=LinkPhase.CONNECTING, since_ms=at_ms)
    return SessionStep(replace(session, link=link), (commands.OpenLink(session.leases),))


def _wait_to_retry(
    session: NodeSession,
    at_ms: Milliseconds,
    reason: str,
    phase: LinkPhase = LinkPhase.WAITING,
    *,
    attempt_min: int = 0,
    spread_ms: int = 0,
) -> SessionStep:
    quick_until_ms = _quick_until_ms(session, at_ms)
    is_quick = at_ms < quick_until_ms and not attempt_min
    attempt = max(_attempt(session, at_ms), attempt_min)
    cap_ms = session.reconnect_cap_ms
    if is_quick:
        attempt, cap_ms = min(attempt, QUICK_ATTEMPT_MAX), min(cap_ms, QUICK_CAP_MS)
    waits_ms = backoff_ms(session.node, attempt, cap_ms)
    retry_at_ms = at_ms + waits_ms
    if is_quick and session.link.phase is LinkPhase.CONNECTING:
        # A dial into a dead line has waited already.
        retry_at_ms = max(at_ms + FIRST_MS // 2, session.link.since_ms + waits_ms)
    waiting_link = CoordinatorLink(
        phase=phase,
        since_ms=at_ms,
        attempt=attempt + 1,
        retry_at_ms=Milliseconds(retry_at_ms + spread_ms),
        reason=reason,
        quick_until_ms=quick_until_ms,
        silent_dials=session.link.silent_dials,
    )
    return _wait(session, waiting_link)


def _dial_later(session: NodeSession, lost: events.LinkLost) -> SessionStep:
    """Dial again after a wait, as do all other nodes that the same process served."""
    is_another = lost.is_silent and not session.is_connected
    silent_dials = session.link.silent_dials + is_another
    spread_ms = 0
    if is_paced(lost.heartbeat_ms):
        whole_ms = round(SPREAD_INTERVALS * lost.heartbeat_ms) << min(silent_dials, _DOUBLINGS_MAX)
        key = f"{session.node}/spread/{session.link.attempt}"
        spread_ms = chosen_ms(key, min(whole_ms, SPREAD_MS_MAX))
    session = replace(session, link=replace(session.link, silent_dials=silent_dials))
    return _wait_to_retry(session, lost.at_ms, lost.reason, spread_ms=spread_ms)


def _wait_as_told(
    session: NodeSession, at_ms: Milliseconds, reason: str, wait_ms: Milliseconds
) -> SessionStep:
    """Keep an appointment: it is no failed attempt. Many nodes may have been told the same."""
    wait_ms = Milliseconds(min(wait_ms, TOLD_WAIT_MS_MAX))
    spread_ms = backoff_ms(session.node, 0, Milliseconds(2 + wait_ms // SPREAD_PART))
    waiting_link = CoordinatorLink(
        phase=LinkPhase.WAITING,
        since_ms=at_ms,
        attempt=_attempt(session, at_ms),
        retry_at_ms=Milliseconds(at_ms + wait_ms + spread_ms),
        reason=reason,
        quick_until_ms=_quick_until_ms(session, at_ms),
    )
    return _wait(session, waiting_link)


def _wait(session: NodeSession, waiting: CoordinatorLink) -> SessionStep:
    timer = commands.SetTimer(events.Timer.RECONNECT, waiting.retry_at_ms)
    return SessionStep(replace(session, link=waiting), (timer,))


def _quick_until_ms(session: NodeSession, at_ms: Milliseconds) -> Milliseconds:
    """End of the time in which a broken link is dialled again at least every two seconds."""
    if session.is_connected and at_ms - session.link.since_ms >= LASTING_MS:
        return Milliseconds(at_ms + QUICK_MS)
    return session.link.quick_until_ms


def _attempt(session: NodeSession, at_ms: Milliseconds) -> int:
    """Number of the next attempt; a welcome forgives earlier failures."""
    if not session.is_connected:
        return session.link.attempt
    has_lasted = at_ms - session.link.since_ms >= LASTING_MS
    return 0 if has_lasted else min(session.link.attempt, SHORT_LIVED_ATTEMPT)


def _resume_connected(session: NodeSession, at_ms: Milliseconds) -> SessionStep:
    """Say what is owed since the last link, and go on with a transfer."""
    link = replace(
        session.link, phase=LinkPhase.CONNECTED, since_ms=at_ms, reason="", silent_dials=0
    )
    reason = session.drain or session.unhealthy or session.withheld
    announcement = (commands.AnnounceDraining(reason),) if reason else ()
    step = SessionStep(replace(session, link=link, owed=()), (*announcement, *session.owed))
    return step.then(resume_transfer).then(resume_fetching)
