"""A watched job on a terminal, and the same in plain lines."""

from typing import TYPE_CHECKING

from hypergpu.client.history import RoundPoint, metric_after
from hypergpu.terminal.figures import name_or_id, score, size, span
from hypergpu.terminal.output import Column, Table, table_lines
from hypergpu.terminal.progress import JobProgress

if TYPE_CHECKING:
    from rich.console import Group

ROUNDS_SHOWN = 8
NOTES_SHOWN = 4
_BAR_WIDTH = 18
_ROUND_COLUMNS = (
    Column("round", is_number=True),
    Column("updates", is_number=True),
    Column("loss", is_number=True),
    Column("metric", is_number=True),
    Column("samples/s", is_number=True, is_optional=True),
    Column("up", is_number=True, is_optional=True),
    Column("down", is_number=True, is_optional=True),
    Column("took", is_number=True),
)
_NODE_COLUMNS = (
    Column("node"),
    Column("state"),
    Column("inner steps"),
    Column("loss", is_number=True, is_optional=True),
    Column("slot", is_number=True, is_optional=True),
    Column("plan", folds=True),
)


def bar(done: int, total: int, width: int = _BAR_WIDTH) -> str:
    """A bar of fixed width."""
    filled = min(width, done * width // total) if total > 0 else 0
    return "\u2501" * filled + "\u2500" * (width - filled)


def planned_rounds(progress: JobProgress) -> int:
    """How many rounds there will be; 0: the plans decide."""
    return progress.job.rounds if progress.job and progress.plan is None else 0


def round_text(point: RoundPoint, rounds: int) -> str:
    """A closed round in one plain line; of 0 rounds the total is left out."""
    total = f"/{rounds}" if rounds else ""
    return (
        f"round {point.number}{total}  loss {score(point.loss)}"
        f"  {point.updates} of {point.participants} updates"
        f"  {size(point.bytes_up)} up  {size(point.bytes_down)} down"
        f"  {span(point.duration_ms / 1000)}"
    )


def headline(progress: JobProgress) -> str:
    """Where the job is, in one line."""
    job = progress.job
    if job is None:
        return "waiting for the coordinator"
    name = f" {job.name}" if job.name else ""
    return f"{job.id}{name}  {job.phase}: {job.reason}"


def screen(progress: JobProgress, width: int, *, title: str = "") -> "Group":
    """The whole live view for a terminal of that width."""
    from rich.console import Group
    from rich.text import Text

    lines = [(title, "bold")] if title else []
    lines.append((headline(progress), ""))
    if progress.job is not None:
        lines.append((_figures(progress), "cyan"))
    for columns, rows in (_nodes_table(progress), (_ROUND_COLUMNS, _round_rows(progress))):
        if rows:
            lines.append(("", ""))
            lines += [(line, "") for line in table_lines(columns, rows, width)]
    lines.append(("", ""))
    lines += [(f"  {text}", "yellow") for text in progress.notes[-NOTES_SHOWN:]]
    return Group(*(Text(line, style, overflow="ellipsis", no_wrap=True) for line, style in lines))


def _figures(progress: JobProgress) -> str:
    job = progress.job
    if job is None:
        return ""
    metric = f"{job.metric_name or 'metric'} {score(job.metric)}"
    rounds = planned_rounds(progress)
    done = f"{bar(job.round, rounds, 30)} round {job.round}/{rounds}"
    return (
        f"{done if rounds else f'round {job.round}, {job.samples} samples'}"
        f"   held out: loss {score(job.loss)}, {metric}"
        f"   {size(job.bytes_up)} up, {size(job.bytes_down)} down"
    )


def _nodes_table(progress: JobProgress) -> Table:
    """The nodes; with the plan of each and why, where rounds are planned."""
    rows = [
        (
            name_or_id(each.name, each.node),
            each.state,
            f"{bar(each.steps_done, each.steps_total)} {each.steps_done}/{each.steps_total}",
            score(each.loss if each.steps_done else None),
            str(each.slot),
            each.reason,
        )
        for each in progress.participants
    ]
    if any(each.reason for each in progress.participants):
        return _NODE_COLUMNS, rows
    return _NODE_COLUMNS[:-1], [row[:-1] for row in rows]


def _round_rows(progress: JobProgress) -> list[tuple[str, ...]]:
    return [
        (
            str(point.number),
            f"{point.updates}/{point.participants}",
            score(point.loss),
            score(metric_after(progress.history, point.number)),
            f"{1000 * point.samples / max(1, point.duration_ms):.0f}",
            size(point.bytes_up),
            size(point.bytes_down),
            span(point.duration_ms / 1000),
        )
        for point in progress.history.rounds[-ROUNDS_SHOWN:]
    ]
