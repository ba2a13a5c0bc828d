"""Tables and lines of `hypergpu job ls` and `hypergpu job show`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypergpu.journal.text import metrics_text, round_from_one, score
from hypergpu.user.terminal.output import (
    Column,
    name_or_id,
    optional_numbers,
    short_id,
    size,
)

if TYPE_CHECKING:
    from hypergpu.user.client import JobDetail, JobView
    from hypergpu.user.client.bundle_progress import BundlesView
    from hypergpu.user.terminal.output import Table


def jobs_table(jobs: "Sequence[JobView]") -> "Table":
    """Columns and rows of `job ls`."""
    columns = (
        Column("job"),
        Column("id"),
        Column("phase"),
        *optional_numbers("round", "metric", "nodes", "loss", "up", "down"),
        Column("why", folds=True),
    )
    return columns, [_job_row(job) for job in jobs]


def _rounds_text(job: "JobView") -> str:
    """``3/20`` for stated rounds; for planned ones how much of the samples is done."""
    if job.bundles is not None:
        return f"{100 * job.bundles.settled_items // max(1, job.bundles.items)} %"
    if not job.planned_samples:
        return f"{job.round}/{job.rounds}" if job.rounds else "-"
    return f"{job.round}, {min(100, 100 * job.samples // job.planned_samples)} %"


def _job_row(job: "JobView") -> tuple[str, ...]:
    return (
        name_or_id(job.name, job.id),
        short_id(job.id),
        job.phase,
        _rounds_text(job),
        f"{score(job.metric)} {job.metric_name}".strip(),
        str(job.nodes),
        score(job.loss),
        size(job.bytes_up),
        size(job.bytes_down),
        round_from_one(job.reason) or "-",
    )


def _work_text(job: "JobView") -> str:
    """Rounds and samples that are done, and how many there are of what the job is counted in."""
    from hypergpu.units import several

    if not job.planned_samples:
        return f"{job.round} of {job.rounds}, {several(job.samples, 'sample')}"
    return f"{job.round}, {job.samples:,} of {job.planned_samples:,} samples"


def job_lines(detail: "JobDetail") -> list[str]:
    from hypergpu.units import several
    from hypergpu.user.terminal.forecast import left_text

    if detail.job.bundles is not None:
        return _map_lines(detail, detail.job.bundles)
    job, forecast = detail.job, detail.forecast
    if "workload" not in detail.spec:
        return _served_lines(detail)
    workload, nodes = detail.spec["workload"], several(job.nodes, "node")
    metrics = metrics_text(job.metric_name, job.metric, job.metrics) + _evaluated_text(job)
    return [
        f"{job.name}  {job.id}".lstrip(),
        f"  phase     {job.phase}: {round_from_one(job.reason)}",
        f"  workload  {workload}",
        f"  round     {_work_text(job)}, {nodes}",
        *([f"  time      {left_text(forecast)}, {forecast.reason}"] if forecast else []),
        f"  loss      {score(job.loss)}   {metrics}",
        f"  updates   {job.updates_accepted} accepted, {job.updates_rejected} rejected",
        f"  traffic   {size(job.bytes_up)} up, {size(job.bytes_down)} down",
        f"  model     {job.model or 'none yet'} ({size(detail.model_bytes)})",
        *([f"  takeover  {detail.takeover}"] if detail.takeover else []),
        *(f"  note      {note}" for note in detail.notes),
    ]


def _served_lines(detail: "JobDetail") -> list[str]:
    """Lines of a served model, and of what its ring trains before it answers."""
    from hypergpu.units import several

    job = detail.job
    loss_line = f"  loss      {score(job.loss)}"
    return [
        f"{job.name}  {job.id}".lstrip(),
        f"  phase     {job.phase}: {round_from_one(job.reason)}",
        f"  kind      serve, {several(job.nodes, 'node')}; its replicas: hypergpu serve ls",
        *([f"  round     {job.round} of {job.rounds} stored", loss_line] if job.rounds else []),
        *(f"  note      {note}" for note in detail.notes),
    ]


def _map_lines(detail: "JobDetail", bundles: "BundlesView") -> list[str]:
    """Lines of a farm job."""
    from hypergpu.units import several

    job = detail.job
    open_text = f"{several(bundles.open_bundles, 'bundle')} at {several(job.nodes, 'node')}"
    return [
        f"{job.name}  {job.id}".lstrip(),
        f"  phase     {job.phase}: {round_from_one(job.reason)}",
        f"  kind      map, {bundles.item_kind}",
        f"  items     {bundles.settled_items:,} of {bundles.items:,}, {open_text}",
        f"  failed    {bundles.failed_items:,} without a value",
        f"  work      {bundles.units:,} {bundles.unit} accepted",
        f"  receipts  {_credit_text(bundles)}",
        *(f"  note      {note}" for note in detail.notes),
    ]


def _credit_text(bundles: "BundlesView") -> str:
    """Work that nodes have receipts for, and what it costs."""
    text = f"{bundles.paid_units:,} {bundles.unit}, those that confirmed others included"
    if not int(bundles.unit_price or 0):
        return f"{text}; no money is due"
    price = f"at {bundles.unit_price} for 100 {bundles.unit}"
    return f"{text}; {price}: {bundles.cost} of {bundles.budget}"


def _evaluated_text(job: "JobView") -> str:
    from hypergpu.units import several

    if not job.evaluated_samples:
        return ""
    return f"   on {several(job.evaluated_samples, 'held-out sample')}"


def participants_table(detail: "JobDetail") -> "Table":
    """Columns and rows of the nodes in `job show`."""
    columns = (
        Column("node"),
        Column("id"),
        Column("state"),
        *optional_numbers("steps", "loss", "slot"),
        Column("why", folds=True),
    )
    rows = [
        (
            name_or_id(each.name, each.node),
            short_id(each.node),
            each.state,
            f"{each.steps_done}/{each.steps_total}",
            score(each.loss if each.steps_done else None),
            str(each.slot),
            round_from_one(each.reason) or "-",
        )
        for each in detail.participants
    ]
    return columns, rows
