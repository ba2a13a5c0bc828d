"""Seconds from the submission of a second job, of another workload, to its first inner step.

Coordinator and nodes are warm: a job has just ended on them. Spares, workers and evaluators that
have imported what they need and seen no job, are on and off in turns, in the same run.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.table import ResultTable
from benchmarks.ours.warm import changed_environment
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator

NODES = 2
FIRST = JobSpec(
    workload="digits-mlp",
    training=TrainingSettings(rounds=2, inner_steps=20, nodes=NODES),
    evaluation=Evaluation(every=1),
)
SECOND = JobSpec(
    workload="digits-cnn",
    training=TrainingSettings(rounds=1, inner_steps=2_000, nodes=NODES),
)
_LIMIT_S = 180.0
_LOOK_S = 0.02
_SPARE_NODE = "a spare worker is ready"
_SPARE_EVALUATOR = "a spare evaluator is ready"


def run(is_quick: bool) -> ResultTable:
    """Start a coordinator and two nodes again and again, with spares and without."""
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(1 if is_quick else 5):
        for has_spares in (True, False):
            times_s[has_spares].append(seconds_to_first_step(has_spares=has_spares))
    rows = {"with spares": times_s[True], "without": times_s[False]}
    medians = {has_spares: statistics.median(each) for has_spares, each in times_s.items()}
    return ResultTable(
        title="Seconds from the second job's submission to its first inner step",
        columns=("", "median", "least", "most"),
        rows=[
            [label, *(f"{of(each):.2f}" for of in (statistics.median, min, max))]
            for label, each in rows.items()
        ],
        metrics={
            "first_step_s": medians[True],
            "first_step_most_s": max(times_s[True]),
            "first_step_without_spares_s": medians[False],
        },
        notes=(
            f"{SECOND.workload} after {FIRST.workload}, {NODES} nodes with torch, no GPU.",
            f"{len(times_s[True])} starts each, in turns.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def seconds_to_first_step(*, has_spares: bool) -> float:
    """Train a job, then measure how long the next one takes to begin."""
    count = str(int(has_spares))
    variables = {
        "HYPERGPU_NODE_WORKER_SPARES": count,
        "HYPERGPU_COORDINATOR_EVALUATOR_SPARES": count,
    }
    with (
        tempfile.TemporaryDirectory() as name,
        changed_environment(variables),
        running(Path(name), is_plaintext=True) as cluster,
    ):
        cluster.add_nodes(NODES, "torch")
        with cluster.client() as client:
            _train_first(client)
            if has_spares:
                _await(lambda: _are_spares_ready(cluster), "spares")
            began_s = time.monotonic()
            second = client.submit(SECOND)
            _await(lambda: _has_begun(client, second), "the second job's first step")
            return time.monotonic() - began_s


def _train_first(client: Coordinator) -> None:
    job = client.submit(FIRST)
    _await(lambda: client.job(job).job.phase not in _GOES_ON, "the first job")
    if (phase := client.job(job).job.phase) != "finished":
        raise BenchmarkError(f"the first job is {phase}: {client.job(job).job.reason}")


_GOES_ON = {"preparing", "waiting", "planning", "training", "aggregating", "finishing"}


def _has_begun(client: Coordinator, job: str) -> bool:
    detail = client.job(job)
    if detail.job.phase not in _GOES_ON:
        raise BenchmarkError(f"the second job is {detail.job.phase}: {detail.job.reason}")
    return any(each.steps_done for each in detail.participants)


def _are_spares_ready(cluster: Running) -> bool:
    nodes = [_says(cluster.folder / f"node-{each}.log", _SPARE_NODE) for each in range(NODES)]
    return all(nodes) and _says(cluster.folder / "coordinator.log", _SPARE_EVALUATOR)


def _says(log: Path, event: str) -> bool:
    lines = (line for line in log.read_text("utf-8").splitlines() if line.startswith("{"))
    return any(json.loads(line).get("event") == event for line in lines)


def _await(is_there: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while not is_there():
        if time.monotonic() > until_s:
            raise BenchmarkError(f"{what} did not come within {_LIMIT_S:.0f} s")
        time.sleep(_LOOK_S)
