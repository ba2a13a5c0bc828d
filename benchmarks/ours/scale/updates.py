"""The coordinator's CPU for each accepted update, in one job and in several at once.

It says when one coordinator is too little for all jobs of a database. Real daemons over mutual TLS;
the journal in PostgreSQL and the blobs in a bucket, as where another coordinator stands by.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.ours.cluster import BenchmarkError, Running
from benchmarks.ours.scale.coordinators import (
    PairedCoordinator,
    empty_schema,
    start_coordinator,
    takeover_settings,
)
from benchmarks.ours.session_processes import cpu_seconds
from benchmarks.ours.table import PartFigures
from hypergpu.jobfile.spec import JobSpec, NodeSelection, RoundRule, TrainingSettings
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import operator, wait_until_ready
from hypergpu.user.cluster.s3_server import S3Server

_JOBS = 3


class UpdateLoad(NamedTuple):
    """How much is measured."""

    nodes: int
    """A multiple of three."""
    rounds: int
    idle_s: float


class _Spent(NamedTuple):
    """What a number of updates took."""

    cpu_s: float
    updates: int
    seconds: float

    def cpu_ms(self, idle: "_Spent") -> float:
        """CPU of an update in milliseconds, less what its nodes take without work."""
        idle_s = self.seconds * idle.cpu_s / idle.seconds
        return 1000 * (self.cpu_s - idle_s) / self.updates


def update_figures(load: UpdateLoad) -> PartFigures:
    """Measure one job with all nodes, and then three that share them."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-updates-") as name:
        idle, one, several = _measure(Path(name), load)
    one_ms, several_ms = one.cpu_ms(idle), several.cpu_ms(idle)
    return PartFigures(
        rows=[
            ["one job: the coordinator's CPU an update, ms", f"{one_ms:.1f}"],
            [f"{_JOBS} jobs at once, the same nodes, ms", f"{several_ms:.1f}"],
            [f"{_JOBS} jobs against one", f"{several_ms / one_ms:.2f}"],
            ["updates a second that fill a core", f"{1000 / several_ms:.0f}"],
        ],
        metrics={
            "coordinator_cpu_ms_per_update": several_ms,
            "coordinator_cpu_jobs_ratio": several_ms / one_ms,
        },
        notes=[
            f"{load.nodes} daemons, mutual TLS, PostgreSQL, rclone's S3. Of one process: neither",
            "the database nor the evaluator of the held-out set is in it, nor what idle nodes take",
            f"({idle.cpu_s / idle.seconds:.3f} cores).",
            f"{one.updates} updates took {one.seconds:.0f} s.",
            f"{several.updates} updates of {_JOBS} jobs took {several.seconds:.0f} s.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ],
    )


def _measure(folder: Path, load: UpdateLoad) -> tuple[_Spent, _Spent, _Spent]:
    with ExitStack() as owner:
        url = owner.enter_context(empty_schema())
        server = owner.enter_context(S3Server(folder / "buckets"))
        environment = {**server.environment, **takeover_settings(folder, url)}
        driver = start_coordinator(folder / "driving", environment, owner)
        ready = wait_until_ready(driver.child)
        Running(driver.folder, ready, driver.child, owner).add_nodes(load.nodes, "numpy")
        with operator(ready) as client:
            _spend(driver, client, [_spec(load.nodes, 5)])
            idle = _rest(driver, load.idle_s)
            one = _spend(driver, client, [_spec(load.nodes, load.rounds)])
            shared_spec = _spec(load.nodes // _JOBS, load.rounds)
            return idle, one, _spend(driver, client, [shared_spec] * _JOBS)


def _spend(driving: PairedCoordinator, client: Coordinator, specs: Sequence[JobSpec]) -> _Spent:
    """Run jobs at the same time, from their creation to the end of the last."""
    process = psutil.Process(driving.child.pid)
    began_s, before_s = time.monotonic(), cpu_seconds(process)
    updates = 0
    for job_id in [client.submit(spec) for spec in specs]:
        for _ in client.watch(job_id):
            pass
        job = client.job(job_id).job
        if job.phase != "finished":
            raise BenchmarkError(f"{job_id} is {job.phase}: {job.reason}")
        updates += job.round * specs[0].training.nodes
    return _Spent(cpu_seconds(process) - before_s, updates, time.monotonic() - began_s)


def _rest(driving: PairedCoordinator, seconds: float) -> _Spent:
    """Look on while no job is open."""
    process = psutil.Process(driving.child.pid)
    before_s = cpu_seconds(process)
    time.sleep(seconds)
    return _Spent(cpu_seconds(process) - before_s, 0, seconds)


def _spec(nodes: int, rounds: int) -> JobSpec:
    return JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=rounds, inner_steps=20, nodes=nodes),
        nodes=NodeSelection(max=nodes),
        round=RoundRule(quorum=1.0),
    )
