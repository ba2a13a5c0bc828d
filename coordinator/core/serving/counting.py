"""Counts of answers, from the window's end to the receipt.

What a replica gave is counted by whoever passes it on, and journalled at the end of a window: a
number of units, or a time, or the end of the lease. Its node signs the count, and only then it
counts. A window is numbered when it is journalled, so that no number comes twice, and the number is
the round of its receipt. What was not journalled yet is lost with the process that counted it.
"""

from msgspec.structs import replace

from coordinator.core.serving.commands import RequestSignature
from coordinator.core.serving.events import (
    CountsClosed,
    SettlementDue,
    WindowAccepted,
    WindowCounted,
    WindowRefused,
    WindowSigned,
)
from coordinator.core.serving.leasing import (
    ServeStep,
    cancel,
    finish_job,
    lease_replicas,
    with_serve_member,
    without_lease,
)
from coordinator.core.serving.state import CountedWindow, ServeJob, ServePhase
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.statements import WHOLE_BPS
from hypergpu.token_counts import TokenCount
from hypergpu.units import Milliseconds
from hypergpu.work_units import WorkUnit

WINDOW_UNITS = 10_000
"""Units after which a window ends."""
WINDOW_MS = Milliseconds(60_000)
"""Time after which it ends."""
UNSIGNED_MOST = 8
"""Counts that a node may leave unsigned before it gives its replica back."""
COUNTED, CHECKED = "serve/1 counted", "serve/1 checked"
"""Names of the measurement in receipts: no other node scored any of the answers, or one did."""


def count_rejection(job: ServeJob, event: WindowCounted) -> str:
    """Why a count cannot be right; empty: it can."""
    if not job.has_receipts:
        return f"answers of {job.job_id} have no receipts"
    if event.node not in job.members or not 0 < event.lease < job.next_lease:
        return f"{event.node} never had lease {event.lease}"
    count = event.count
    if min(count.prompt_tokens, count.new_tokens) < 0 or count.units <= 0:
        return "a count has no negative tokens, and at least one unit"
    return _layers_fault(job, count)


def _layers_fault(job: ServeJob, count: TokenCount) -> str:
    cut, unit = job.request.cut, job.terms.unit
    if unit is not WorkUnit.LAYER_TOKENS:
        return f"{job.job_id} is counted in {unit.value}" if count.layers else ""
    most = 0 if cut is None else cut.layers
    return "" if 0 < count.layers <= most else f"a stage of {job.job_id} has 1 to {most} layers"


def signature_rejection(job: ServeJob, event: WindowSigned) -> str:
    """Why a signature changes nothing; empty: it does."""
    window = job.windows.get(event.window)
    if window is None or window.node != event.node:
        return f"{event.node} has no count {event.window} to sign"
    if event.claim is None:
        return f"count {event.window} is not signed"
    return ""


def take_count(job: ServeJob, event: WindowCounted) -> ServeStep:
    """Number a count and ask its node to sign it; one at fault is paid to nobody."""
    if event.fault:
        record = WindowRefused(
            at_ms=job.at_ms,
            node=event.node,
            units=event.count.units,
            reason=event.fault,
            unit=job.terms.unit.value,
        )
        return ServeStep(job, (WriteRecord(record),))
    number = job.next_window
    window = CountedWindow(
        node=event.node,
        lease=event.lease,
        count=event.count,
        answers=event.answers,
        is_checked=event.checked_answers > 0,
    )
    job = replace(job, windows={**job.windows, number: window}, next_window=number + 1)
    step = ServeStep(job, (RequestSignature(number),))
    unsigned_numbers = [each for each, its in job.windows.items() if its.node == event.node]
    if len(unsigned_numbers) <= UNSIGNED_MOST:
        return step
    reason = f"it has not signed {len(unsigned_numbers)} counts of its tokens"
    step = step.then(_refuse(step.job, min(unsigned_numbers), reason))
    return step.then(_exclude(step.job, event.node, reason))


def _exclude(job: ServeJob, node: NodeId, reason: str) -> ServeStep:
    """Give a node no replica while it is there."""
    job = with_serve_member(job, node, refusal=reason)
    if node not in job.leases:
        return ServeStep(job)
    step = ServeStep(without_lease(job, node), (cancel(job, node, reason),))
    return step.then(lease_replicas(step.job))


def take_signature(job: ServeJob, event: WindowSigned) -> ServeStep:
    """Let a signed count count."""
    window = job.windows[event.window]
    if event.claim is None:
        return ServeStep(job)
    work = MeasuredWork(
        contribution=event.claim.contribution,
        signature=event.claim.signature,
        quality_bps=WHOLE_BPS,
        evaluator=CHECKED if window.is_checked else COUNTED,
    )
    units = window.count.units
    record = WindowAccepted(
        at_ms=job.at_ms,
        node=event.node,
        window=event.window,
        units=units,
        works=(work,),
        unit=job.terms.unit.value,
    )
    job = replace(_without_window(job, event.window), paid_units=job.paid_units + units)
    return _finish_if_settled(ServeStep(job, (WriteRecord(record),)))


def _without_window(job: ServeJob, number: int) -> ServeJob:
    windows = {each: window for each, window in job.windows.items() if each != number}
    return replace(job, windows=windows)


def _refuse(job: ServeJob, number: int, reason: str) -> ServeStep:
    """Pay a count to nobody."""
    window = job.windows[number]
    record = WindowRefused(
        at_ms=job.at_ms,
        node=window.node,
        units=window.count.units,
        reason=reason,
        unit=job.terms.unit.value,
    )
    return ServeStep(_without_window(job, number), (WriteRecord(record),))


def close_counts(job: ServeJob, _: CountsClosed) -> ServeStep:
    """Note that no further count comes."""
    return _finish_if_settled(ServeStep(replace(job, are_counts_closed=True)))


def _finish_if_settled(step: ServeStep) -> ServeStep:
    job = step.job
    if job.phase is not ServePhase.SETTLING or job.windows or not job.are_counts_closed:
        return step
    return step.then(finish_job(job))


def end_settlement(job: ServeJob, _: SettlementDue) -> ServeStep:
    """End a model that was stopped; counts that nobody signed are not paid."""
    step = ServeStep(job)
    for number in job.windows:
        step = step.then(_refuse(step.job, number, "its node did not sign the count in time"))
    return step.then(finish_job(step.job))
