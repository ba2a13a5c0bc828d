"""Rows of the tables that reads print."""

from typing import TYPE_CHECKING

from hypergpu.terminal.figures import score, size, span
from hypergpu.terminal.output import Column
from hypergpu.units import several

if TYPE_CHECKING:
    from hypergpu.client.values import JobDetail, JobView, TokenView

JOB_COLUMNS = (
    Column("job"),
    Column("name"),
    Column("phase"),
    Column("round", is_number=True),
    Column("nodes", is_number=True),
    Column("loss", is_number=True),
    Column("metric", is_number=True),
    Column("up", is_number=True),
    Column("down", is_number=True),
    Column("why"),
)
REASON_LENGTH = 60
PARTICIPANT_COLUMNS = (
    Column("slot", is_number=True),
    Column("node"),
    Column("name"),
    Column("state"),
    Column("steps", is_number=True),
    Column("loss", is_number=True),
    Column("why"),
)
TOKEN_COLUMNS = (
    Column("token"),
    Column("role"),
    Column("label"),
    Column("expires in", is_number=True),
    Column("uses left", is_number=True),
    Column("state"),
)


def job_row(job: "JobView") -> tuple[str, ...]:
    """`job ls`, one job."""
    return (
        job.id,
        job.name or "-",
        job.phase,
        f"{job.round}/{job.rounds}",
        str(job.nodes),
        score(job.loss),
        f"{score(job.metric)} {job.metric_name}".strip(),
        size(job.bytes_up),
        size(job.bytes_down),
        _cut(job.reason),
    )


def _cut(reason: str) -> str:
    """A reason in a list; `show` has all of it."""
    return reason if len(reason) <= REASON_LENGTH else f"{reason[: REASON_LENGTH - 3]}..."


def job_lines(detail: "JobDetail") -> list[str]:
    """The head of `job show`."""
    job = detail.job
    workload, nodes = detail.spec.get("workload", "?"), several(job.nodes, "node")
    return [
        f"{job.id}  {job.name}".rstrip(),
        f"  phase     {job.phase}: {job.reason}",
        f"  workload  {workload}",
        f"  round     {job.round} of {job.rounds}, {nodes}, {several(job.samples, 'sample')}",
        f"  loss      {score(job.loss)}   {job.metric_name or 'metric'} {score(job.metric)}",
        f"  updates   {job.updates_accepted} accepted, {job.updates_refused} refused",
        f"  traffic   {size(job.bytes_up)} up, {size(job.bytes_down)} down",
        f"  model     {job.model or 'none yet'} ({size(detail.model_bytes)})",
    ]


def participant_rows(detail: "JobDetail") -> list[tuple[str, ...]]:
    """Participants of `job show`."""
    return [
        (
            str(each.slot),
            each.node,
            each.name or "-",
            each.state,
            f"{each.steps_done}/{each.steps_total}",
            score(each.loss if each.steps_done else None),
            each.reason or "-",
        )
        for each in detail.participants
    ]


def token_row(token: "TokenView") -> tuple[str, ...]:
    """`token ls`, one token."""
    if token.is_revoked:
        state = "revoked"
    elif token.expires_in_s == 0:
        state = "expired"
    else:
        state = "used up" if token.uses_left == 0 else "good"
    return (
        token.id,
        token.role,
        token.label or "-",
        "never" if token.expires_in_s is None else span(token.expires_in_s),
        "unlimited" if token.uses_left is None else str(token.uses_left),
        state,
    )
