"""What a gateway passes on of one node's control stream.

Signs of life are answered here. Of progress and measurements only the newest matters to a
coordinator, so what comes too soon after the last that went on is held, replaced or merged, until
its time has come. Everything else goes on at once, after the progress that was held before it: a
coordinator hears a node in the order in which it spoke.
"""

from enum import Enum
from typing import NamedTuple

import msgspec

from hypergpu.units import Milliseconds

PROGRESS_MS = 1_000
"""Least time between two messages of progress within one phase of one lease."""
REPORT_MS = 30_000
"""Least time between two reports of measurements without a transfer."""
replace = msgspec.structs.replace


class Handling(Enum):
    """What becomes of a message that is not answered here."""

    HOLD = "hold"  # with what is held already of its kind
    PASS = "pass"  # with what is held already of its kind
    PASS_AFTER_PROGRESS = "pass after progress"  # after the progress that is held


class WorkMark(NamedTuple):
    """The lease and phase that a progress is of: another one is news."""

    job_id: str
    lease: int
    phase: int


class NodeFolding(msgspec.Struct, frozen=True):
    """State of one stream. Times are None before the first message of a kind went on."""

    mark: WorkMark | None = None
    progress_ms: Milliseconds | None = None
    """When progress last went on."""
    holds_progress: bool = False
    report_ms: Milliseconds | None = None
    """When a report last went on."""
    holds_report: bool = False


class FoldingStep(NamedTuple):
    """The state after a message, and what becomes of the message."""

    state: NodeFolding
    handling: Handling


def fold_progress(state: NodeFolding, mark: WorkMark, at_ms: Milliseconds) -> FoldingStep:
    """Take progress in: of another lease or phase it goes on at once."""
    if mark == state.mark and not _is_due(state.progress_ms, PROGRESS_MS, at_ms):
        return FoldingStep(replace(state, holds_progress=True), Handling.HOLD)
    passed_state = replace(state, mark=mark, progress_ms=at_ms, holds_progress=False)
    return FoldingStep(passed_state, Handling.PASS)


def fold_report(state: NodeFolding, transfers: int, at_ms: Milliseconds) -> FoldingStep:
    """Take a report of measurements in: with a transfer it goes on at once, since plans wait."""
    if not transfers and not _is_due(state.report_ms, REPORT_MS, at_ms):
        return FoldingStep(replace(state, holds_report=True), Handling.HOLD)
    passed_state = replace(state, report_ms=at_ms, holds_report=False)
    return FoldingStep(passed_state, Handling.PASS)


def fold_other(state: NodeFolding) -> FoldingStep:
    """Take in what goes on at once, whatever it is."""
    return FoldingStep(replace(state, holds_progress=False), Handling.PASS_AFTER_PROGRESS)


class DueMessages(NamedTuple):
    """The state once what is due has gone on, and what that is."""

    state: NodeFolding
    has_progress: bool
    has_report: bool


def take_due(state: NodeFolding, at_ms: Milliseconds) -> DueMessages:
    """Let go on what was held long enough."""
    has_progress = state.holds_progress and _is_due(state.progress_ms, PROGRESS_MS, at_ms)
    has_report = state.holds_report and _is_due(state.report_ms, REPORT_MS, at_ms)
    if has_progress:
        state = replace(state, progress_ms=at_ms, holds_progress=False)
    if has_report:
        state = replace(state, report_ms=at_ms, holds_report=False)
    return DueMessages(state, has_progress, has_report)


def has_due(state: NodeFolding, at_ms: Milliseconds) -> bool:
    """Whether `take_due` lets anything go on."""
    return (state.holds_progress and _is_due(state.progress_ms, PROGRESS_MS, at_ms)) or (
        state.holds_report and _is_due(state.report_ms, REPORT_MS, at_ms)
    )


def _is_due(last_ms: Milliseconds | None, least_ms: int, at_ms: Milliseconds) -> bool:
    return last_ms is None or at_ms - last_ms >= least_ms
