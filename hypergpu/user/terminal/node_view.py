"""A node of this machine as its owner sees it: rows of a label and a text, for any width."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from hypergpu.journal.text import round_from_one, score, short
from hypergpu.node_report import (
    ALIVE,
    DRAINING,
    RUNNING,
    LinkReport,
    NodeReport,
    SetbackReport,
    WorkReport,
)
from hypergpu.units import several
from hypergpu.user.terminal.output import bar, mbit_s, milliseconds, short_id, size, span

if TYPE_CHECKING:
    from rich.console import Group

SETBACKS_SHOWN = 3
_LABEL_WIDTH = 13
_TEXT_WIDTH_MIN = 45
"""Where less is left beside the labels, texts go on below them."""
_NARROW_INDENT = "  "
_WIDTH_MIN = 24
_PHASES = {
    "download": "downloads the model and data",
    "train": "trains",
    "encode": "encodes its update",
    "upload": "uploads its update",
    "wait": "waits",
}
GOOD, BAD, QUIET = "green", "yellow", "dim"


class Row(NamedTuple):
    """A line of the view, folded where it is too long."""

    label: str
    text: str
    style: str = ""
    """As rich names it."""


class Onlooker(NamedTuple):
    """Who looks at a report, and when."""

    now_ms: int
    """Milliseconds since 1970."""
    is_owner: bool = False
    """It is shown on the daemon's own terminal, whose Ctrl-C reaches the daemon."""


def report_rows(report: NodeReport, onlooker: Onlooker) -> Iterator[Row]:
    """The whole view."""
    name = f"{report.name} ({short(report.node)})" if report.name else report.node
    yield Row("node", ", ".join(filter(None, (name, report.device))), "bold")
    yield _state_row(report, onlooker)
    if report.state in ALIVE:
        yield _link_row(report.link, onlooker)
        yield Row("line", _line_text(report.link))
        yield from _work_rows(report.work, onlooker)
        for sentence in report.idle:
            yield Row("idle", sentence, BAD)
    yield from _outcome_rows(report, onlooker)
    yield Row("earned", _earned_text(report))
    yield Row("limits", _limits_text(report), QUIET)
    if report.sandbox.startswith("unsandboxed"):
        yield Row("sandbox", report.sandbox, BAD)
    yield Row("log", report.log or "the daemon's standard error", QUIET)
    if report.page:
        yield Row("page", report.page, QUIET)
    if report.state in ALIVE:
        yield Row("leave", _leaving_text(report, onlooker), QUIET)


def _ago(at_ms: int, onlooker: Onlooker) -> str:
    """Time since an instant, in whole seconds; clocks may jump."""
    seconds = max(0, (onlooker.now_ms - at_ms) // 1000)
    return f"{seconds} s" if seconds < 10 else span(seconds)


def _state_row(report: NodeReport, onlooker: Onlooker) -> Row:
    reason = f": {report.reason}" if report.reason else ""
    if report.state not in ALIVE:
        return Row("state", f"{report.state}, {_ago(report.at_ms, onlooker)} ago{reason}", BAD)
    since = f"{report.state}, started {_ago(report.started_at_ms, onlooker)} ago"
    return Row("state", f"{since}{reason}", GOOD if report.state == RUNNING else BAD)


def _link_row(link: LinkReport, onlooker: Onlooker) -> Row:
    address = link.coordinator or "not joined yet"
    if link.state == "down":
        return Row("coordinator", f"{address}; the worker is being started")
    text = f"{address}, {link.state} for {_ago(link.since_ms, onlooker)}"
    if link.reason:
        text += f": {link.reason}"
    if link.retry_at_ms is not None:
        left_s = max(0, (link.retry_at_ms - onlooker.now_ms) / 1000)
        text += f"; again in {left_s:.0f} s"
    return Row("coordinator", text, GOOD if link.state == "connected" else BAD)


def _line_text(link: LinkReport) -> str:
    parts = []
    if link.round_trip_us is not None:
        text = f"round trip {milliseconds(link.round_trip_us)}"
        longest_us = link.longest_round_trip_us or 0
        if longest_us > 1.25 * link.round_trip_us:
            text += f", at worst {milliseconds(longest_us)}"
        parts.append(text)
    for way, rate in (("up", link.up_bits_per_s), ("down", link.down_bits_per_s)):
        if rate is not None:
            parts.append(f"{way} {mbit_s(rate)} Mbit/s")
    return ", ".join(parts) or "not measured yet"


def _work_rows(work: WorkReport | None, onlooker: Onlooker) -> Iterator[Row]:
    if work is None:
        yield Row("now", "waits for work")
        return
    of_job = f"{short_id(work.job)} ({work.workload})"
    if work.steps_total:
        of_job = f"round {work.round + 1} of {of_job}"
    phase = _PHASES.get(work.phase, work.phase)
    if not work.steps_total and work.phase == "train":
        phase = "works"
    reason = f": {work.reason}" if work.reason else ""
    yield Row("now", f"{of_job}: {phase} for {_ago(work.since_ms, onlooker)}{reason}", "cyan")
    if work.steps_total:
        yield Row("", _progress_text(work), "cyan")
    if work.plan:
        yield Row("plan", work.plan)
    if work.waiting_jobs:
        yield Row("next", f"{several(work.waiting_jobs, 'other job')} after this")


def _progress_text(work: WorkReport) -> str:
    if work.phase == "download":
        return f"{size(work.moved_bytes)} came so far"
    if work.update_bytes is not None:
        done_bytes = min(work.moved_bytes, work.update_bytes)
        return (
            f"{bar(done_bytes, work.update_bytes)} {size(done_bytes)} of {size(work.update_bytes)}"
        )
    steps = f"{work.steps_done}/{work.steps_total} inner steps of {work.batch_size}"
    loss = "" if work.loss is None else f", loss {score(work.loss)}"
    return f"{bar(work.steps_done, work.steps_total)} {steps}{loss}"


def _outcome_rows(report: NodeReport, onlooker: Onlooker) -> Iterator[Row]:
    totals = report.totals
    counts = [
        f"{totals.accepted} accepted ({totals.samples:,} samples)",
        f"{totals.rejected} rejected",
        *(
            f"{count} {what}"
            for count, what in (
                (totals.late, "late"),
                (totals.cancelled, "cancelled"),
                (totals.handed_back, "handed back"),
            )
            if count
        ),
    ]
    yield Row("updates", ", ".join(counts))
    for setback in report.setbacks[: -SETBACKS_SHOWN - 1 : -1]:
        yield Row("", _setback_text(setback, onlooker), BAD)
    for judgement in report.judgements[: -SETBACKS_SHOWN - 1 : -1]:
        yield Row("judged", round_from_one(judgement.reason))


def _setback_text(setback: SetbackReport, onlooker: Onlooker) -> str:
    where = f"round {setback.round + 1} {setback.kind} {_ago(setback.at_ms, onlooker)} ago"
    return f"{where}: {setback.reason}"


def _earned_text(report: NodeReport) -> str:
    earnings = report.earned
    if not earnings.receipts:
        return "no receipts yet"
    text = several(earnings.receipts, "receipt")
    if earnings.credited_samples:
        text += f", {earnings.credited_samples:,} samples at full quality; hypergpu ledger claim"
    if earnings.unpaid_samples:
        text += f", {earnings.unpaid_samples:,} samples in jobs that pay nothing"
    for work in earnings.by_unit:
        if work.credited:
            text += f", {work.credited:,} {work.unit}; hypergpu ledger claim"
        if work.unpaid:
            text += f", {work.unpaid:,} {work.unit} in jobs that pay nothing"
    return text


def _limits_text(report: NodeReport) -> str:
    limits = report.limits
    parts = [f"does {' and '.join(limits.kinds)}"] if limits.kinds else []
    if limits.worker_threads:
        parts.append(several(limits.worker_threads, "thread"))
    if limits.worker_memory_bytes:
        parts.append(f"{size(limits.worker_memory_bytes)} of memory")
    if limits.worker_step_floor_ms:
        parts.append(f"{limits.worker_step_floor_ms} ms a step at least")
    parts.append(f"{size(limits.cache_bytes)} of downloads kept")
    if report.sandbox and not report.sandbox.startswith("unsandboxed"):
        parts.append(f"sandbox {report.sandbox}")
    return ", ".join(parts)


def _leaving_text(report: NodeReport, onlooker: Onlooker) -> str:
    limit = span(report.limits.drain_limit_ms / 1000)
    how = "Ctrl-C" if onlooker.is_owner else f"kill {report.process_id}"
    if report.state == DRAINING:
        return f"it leaves by itself within {limit}; {how} stops it at once"
    return f"{how} lets it finish or hand back its work, {limit} at most; twice stops at once"


def plain_lines(rows: Iterator[Row]) -> list[str]:
    """A line for each row, however long, for pipes."""
    return [f"{row.label.ljust(_LABEL_WIDTH)}{row.text}" for row in rows]


def screen(rows: Iterator[Row], width: int) -> "Group":
    """The view for a terminal of that width; a narrow one leaves less room beside the labels."""
    from rich.console import Group
    from rich.text import Text

    room = max(_WIDTH_MIN, width - 1)
    lines = []
    for row in rows:
        for label, part in _folded_row(row, room):
            line = Text(label, QUIET, no_wrap=True, overflow="ellipsis")
            lines.append(line.append(part, row.style or "none"))
    return Group(*lines)


def _folded_row(row: Row, width: int) -> Iterator[tuple[str, str]]:
    """What stands in the column of labels, and beside it, line by line."""
    is_narrow = width < _LABEL_WIDTH + _TEXT_WIDTH_MIN
    indent = _NARROW_INDENT if is_narrow else " " * _LABEL_WIDTH
    label = f"{row.label}  " if is_narrow and row.label else row.label.ljust(len(indent))
    if " " not in row.text and len(label) + len(row.text) > width:
        # A path or an address is for copying: it is not broken if it fits on a line of its own.
        yield label, ""
        label = indent = _NARROW_INDENT
    parts = textwrap.wrap(
        row.text,
        width,
        initial_indent=label,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    for number, part in enumerate(parts or [label]):
        begin = len(indent if number else label)
        yield part[:begin], part[begin:]
