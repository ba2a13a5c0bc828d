"""A watched job on a terminal, and the same in plain lines."""

from typing import TYPE_CHECKING

from hypergpu.client.history import RoundPoint, metric_after
from hypergpu.terminal.figures import name_or_id, score, size, span
from hypergpu.terminal.output import Column, rich_table
from hypergpu.terminal.progress import JobProgress

if TYPE_CHECKING:
    from rich.console import RenderableType

ROUNDS_SHOWN = 8
NOTES_SHOWN = 4
_BAR_WIDTH = 18
_ROUND_COLUMNS = (
    Column("round", is_number=True),
    Column("updates", is_number=True),
    Column("loss", is_number=True),
    Column("metric", is_number=True),
    Column("samples/s", is_number=True),
    Column("up", is_number=True),
    Column("down", is_number=True),
    Column("took", is_number=True),
)
_NODE_COLUMNS = (
    Column("node"),
    Column("state"),
    Column("inner steps"),
    Column("loss", is_number=True),
    Column("slot", is_number=True),
)
_PLANNED_COLUMNS = (*_NODE_COLUMNS, Column("plan"))


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


def screen(progress: JobProgress, *, title: str = "") -> "RenderableType":
    """The whole live view."""
    from rich.console import Group
    from rich.text import Text

    job = progress.job
    parts: list[RenderableType] = [Text(title, style="bold")] if title else []
    parts.append(Text(headline(progress), overflow="ellipsis", no_wrap=True))
    if job is not None:
        parts.append(Text(_figures(progress), style="cyan"))
    parts.append(_nodes(progress))
    if progress.history.rounds:
        parts.append(rich_table(_ROUND_COLUMNS, _round_rows(progress)))
    parts += [Text(f"  {text}", style="yellow") for text in progress.notes[-NOTES_SHOWN:]]
    return Group(*parts)


def _nodes(progress: JobProgress) -> "RenderableType":
    """The nodes, with the plan of each and why, where rounds are planned."""
    rows = _node_rows(progress)
    reasons = [each.reason for each in progress.participants]
    if not any(reasons):
        return rich_table(_NODE_COLUMNS, rows)
    planned = [(*row, reason) for row, reason in zip(rows, reasons, strict=True)]
    return rich_table(_PLANNED_COLUMNS, planned)


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


def _node_rows(progress: JobProgress) -> list[tuple[str, ...]]:
    return [
        (
            name_or_id(each.name, each.node),
            each.state,
            f"{bar(each.steps_done, each.steps_total)} {each.steps_done}/{each.steps_total}",
            score(each.loss if each.steps_done else None),
            str(each.slot),
        )
        for each in progress.participants
    ]


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
