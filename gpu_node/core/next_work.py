"""The work that comes after the work at hand, of the same job: its inputs are fetched meanwhile.

Once the worker is done with the work at hand it goes on with the next, while the result of the
first is sent. Results go out one after another, in the order of their leases. The next work becomes
the work at hand as soon as the first is over, however it ended.
"""

from msgspec.structs import replace

from gpu_node.core import commands, events
from gpu_node.core.backoff import backoff_ms
from gpu_node.core.session_state import (
    Contributing,
    Executing,
    Fetching,
    Idle,
    NodeSession,
    SessionStep,
    Transferring,
)
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.units import Milliseconds


def next_lease(session: NodeSession) -> Lease | None:
    """The lease of the next work; None: there is none."""
    return None if isinstance(session.next_work, Idle) else session.next_work.assignment.lease


def begin_fetching(session: NodeSession, assignment: PackedAssignment) -> SessionStep:
    """Fetch what the next work needs, in place of what was to be next before."""
    step = drop_next(session)
    session = replace(step.session, next_work=Fetching(assignment))
    return SessionStep(session, step.commands).then(resume_fetching)


def resume_fetching(session: NodeSession) -> SessionStep:
    """Go on with the download for the next work, if there is one and a link."""
    work = session.next_work
    if not isinstance(work, Fetching) or not session.is_connected:
        return SessionStep(session)
    fetching_work = replace(work, retry_at_ms=Milliseconds(0))
    session = replace(session, next_work=fetching_work)
    return SessionStep(session, (commands.FetchInputs(work.assignment),))


def drop_next(session: NodeSession) -> SessionStep:
    """Stop the next work without a word to the coordinator."""
    work, free = session.next_work, replace(session, next_work=Idle())
    match work:
        case Fetching():
            return SessionStep(free, (commands.StopTransfer(work.assignment.lease),))
        case Executing() if session.worker.busy == work.assignment.lease:
            free = replace(free, worker=session.worker.for_other_work())
            return SessionStep(free, (commands.AbortTraining(work.assignment.lease),))
        case _:
            return SessionStep(free)


def go_on_with_next(session: NodeSession) -> SessionStep:
    """Make the next work the work at hand, which is over. The worker is told in `start_next`."""
    work = session.next_work
    session = replace(session, work=work, next_work=Idle())
    if not isinstance(work, Transferring):
        return SessionStep(session)
    if work.retry_at_ms:
        timer = commands.SetTimer(events.Timer.RETRY, work.retry_at_ms)
        return SessionStep(session, (timer,))
    if not session.is_connected:
        return SessionStep(session)
    if isinstance(work, Contributing):
        return SessionStep(session, (commands.SendResult(work.assignment, work.result, work.blob),))
    return SessionStep(session, (commands.FetchInputs(work.assignment),))


def note_fetched(session: NodeSession) -> SessionStep:
    """Note that what the next work needs is there."""
    work = session.next_work
    if not isinstance(work, Fetching) or not isinstance(work.assignment, PackedAssignment):
        return SessionStep(session)
    return SessionStep(replace(session, next_work=Executing(work.assignment)))


def retry_fetching_later(session: NodeSession, event: events.FetchBroken) -> SessionStep:
    """Try the download for the next work again after a while; without a link, once there is one."""
    work = session.next_work
    if not isinstance(work, Fetching) or not session.is_connected:
        return SessionStep(session)
    attempt = 0 if event.has_progressed else work.attempt
    key = f"{session.node}/{event.lease.job_id}/next"
    retry_at_ms = Milliseconds(event.at_ms + backoff_ms(key, attempt))
    waiting_work = replace(work, attempt=attempt + 1, retry_at_ms=retry_at_ms)
    timer = commands.SetTimer(events.Timer.RETRY_NEXT, retry_at_ms)
    return SessionStep(replace(session, next_work=waiting_work), (timer,))


def retry_fetching(session: NodeSession, event: events.TimerFired) -> SessionStep:
    """Go on with a broken download for the next work."""
    work = session.next_work
    if not isinstance(work, Fetching) or not 0 < work.retry_at_ms <= event.at_ms:
        return SessionStep(session)
    return resume_fetching(session)
