"""What a coordinator tells a monitor, by node, link and job."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from prometheus_client.core import Metric

from coordinator.core.hub.node_figures import NodeFigure, bounded_series
from coordinator.core.network.line import likely_loss
from coordinator.core.network.reading import Estimate, NodeReading
from coordinator.core.training.job.state import ENDED, Job
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.training.job_runtime import JobRuntime, TrainingJobs
from coordinator.shell.metrics.serving import answer_families
from coordinator.shell.metrics.text import by_node, gauge, metrics_text, single, total
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.store.journal.records import NodeRecord
from hypergpu.ids import NodeId

JOBS_MOST = 100
"""Jobs with series of their own: those that go on, then the newest."""
_PARTS = ("speed", "reliability", "quality", "uptime")


async def coordinator_metrics(driver: Driver, fleet: Fleet) -> bytes:
    """The text of all figures as they are now."""
    jobs = driver.runtimes_of(JobRuntime)
    records = await driver.in_writer(driver.journal.nodes)
    known_records = [record for record in records if not record.is_revoked]
    nodes = [record.node for record in known_records]
    figures = [*_health_figures(fleet, nodes), *_work_figures(fleet, known_records)]
    figures += _line_figures(fleet, nodes)
    series = [by_node(each) for each in bounded_series(figures, nodes)]
    families = _fleet_families(fleet, jobs, nodes)
    models = [*driver.runtimes_of(ServeRuntime).values()]
    return metrics_text([*families, *series, *_job_families(jobs), *answer_families(models)])


def _fleet_families(fleet: Fleet, jobs: TrainingJobs, nodes: list[NodeId]) -> list[Metric]:
    levels = Counter(str(fleet.health.parts(node).level) for node in nodes)
    phases = Counter(runtime.job.phase.value for runtime in jobs.values())
    excluded_count = sum(fleet.health.exclusion(node) is not None for node in nodes)
    return [
        single("coordinator_nodes", "Nodes that joined.", len(nodes)),
        single("coordinator_streams", "Open control streams.", len(fleet.nodes.streams)),
        gauge("coordinator_nodes_by_health", "Nodes by level of health.", "level", dict(levels)),
        single("coordinator_nodes_excluded", "Nodes that their health excludes.", excluded_count),
        gauge("coordinator_jobs", "Jobs by phase.", "phase", dict(phases)),
    ]


def _health_figures(fleet: Fleet, nodes: list[NodeId]) -> list[NodeFigure]:
    parts = {node: fleet.health.parts(node) for node in nodes}
    mean = partial(NodeFigure, is_mean=True)
    return [
        mean(
            "node_health",
            "Health between 0 and 1: 0.4 speed + 0.3 reliability + 0.2 quality + 0.1 uptime.",
            {node: each.value for node, each in parts.items()},
        ),
        *(
            mean(
                f"node_health_{name}",
                f"The part {name} of the health, between 0 and 1.",
                {node: getattr(each, name) for node, each in parts.items()},
            )
            for name in _PARTS
        ),
    ]


def _work_figures(fleet: Fleet, records: list[NodeRecord]) -> list[NodeFigure]:
    streams, unstored_counts = fleet.nodes.streams, fleet.nodes.unstored_counts
    nodes = [record.node for record in records]
    counts = {
        record.node: (
            record.updates_accepted + unstored_counts(record.node).accepted,
            record.updates_rejected + unstored_counts(record.node).rejected,
        )
        for record in records
    }
    return [
        NodeFigure(
            "node_connected",
            "1: its control stream is open.",
            {node: float(node in streams) for node in nodes},
        ),
        NodeFigure(
            "node_updates_accepted",
            "Accepted updates.",
            {node: each[0] for node, each in counts.items()},
            is_total=True,
        ),
        NodeFigure(
            "node_updates_rejected",
            "Rejected updates.",
            {node: each[1] for node, each in counts.items()},
            is_total=True,
        ),
    ]


def _line_figures(fleet: Fleet, nodes: list[NodeId]) -> list[NodeFigure]:
    readings = {node: fleet.readings.reading(node) for node in nodes if fleet.readings.knows(node)}

    def means(name: str, scale: float) -> dict[NodeId, float]:
        estimates = {node: _estimate(reading, name) for node, reading in readings.items()}
        return {node: each.mean * scale for node, each in estimates.items() if each.count}

    losses = {node: likely_loss(reading) for node, reading in readings.items()}
    mean = partial(NodeFigure, is_mean=True)
    return [
        mean("link_round_trip_seconds", "Round trip, mean.", means("round_trip_us", 1e-6)),
        mean("link_loss_ratio", "Share of packets lost.", losses),
        NodeFigure("link_up_bits_per_second", "Goodput of updates.", means("up_bits_per_s", 1.0)),
        NodeFigure(
            "link_down_bits_per_second", "Goodput of models.", means("down_bits_per_s", 1.0)
        ),
        mean("node_step_seconds", "Time of an inner step.", means("step_us", 1e-6)),
    ]


def _estimate(reading: NodeReading, name: str) -> Estimate:
    estimate: Estimate = getattr(reading, name)
    return estimate


def _job_families(trainings: TrainingJobs) -> list[Metric]:
    jobs = [runtime.job for runtime in trainings.values()][::-1]
    # A sort keeps the order of creation among equals: the newest of those that ended come first.
    jobs = sorted(jobs, key=lambda job: job.phase in ENDED)[:JOBS_MOST]

    def by_job(tell: Callable[[Job], float | None]) -> dict[str, float]:
        values = {str(job.job_id): tell(job) for job in jobs}
        return {job_id: value for job_id, value in values.items() if value is not None}

    tallies = (
        ("samples", "Samples of folded updates."),
        ("bytes_up", "Bytes of updates that nodes sent."),
        ("bytes_down", "Bytes of models that nodes fetched."),
        ("updates_accepted", "Accepted updates."),
        ("updates_rejected", "Rejected updates."),
    )
    gauges: tuple[tuple[str, str, Callable[[Job], float | None]], ...] = (
        ("job_open", "1: the job has not ended.", lambda job: float(job.phase not in ENDED)),
        (
            "job_round",
            "Rounds that became a model.",
            lambda job: None if job.model is None else float(job.model.round),
        ),
        (
            "job_nodes",
            "Nodes that work for it.",
            lambda job: float(sum(member.can_work for member in job.members.values())),
        ),
        (
            "job_loss",
            "Held-out loss of the newest evaluation.",
            lambda job: None if job.score is None else job.score.loss,
        ),
    )
    return [
        *(gauge(name, meaning, "job", by_job(tell)) for name, meaning, tell in gauges),
        *(
            total(f"job_{name}", meaning, "job", by_job(partial(_tally_figure, name)))
            for name, meaning in tallies
        ),
    ]


def _tally_figure(name: str, job: Job) -> float:
    return float(getattr(job.tally, name))
