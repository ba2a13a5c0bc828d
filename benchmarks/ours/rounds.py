"""Seconds per round of the real coordinator and real daemons when nothing is trained."""

import itertools
import tempfile
from pathlib import Path

from benchmarks.ours.cluster import BenchmarkError, Running, running
from hypergpu.client import JobEvent
from hypergpu.jobfile.spec import CodecChoice, Evaluation, Inner, JobSpec, Outer, TrainingSettings

WARM_UP_ROUNDS = 3
"""The first rounds start workers, send a new model whole and touch memory for the first time."""


def spec_of(parameters: int, nodes: int, rounds: int) -> JobSpec:
    """What the peers do: float32 both ways and a plain mean, evaluated at the end only."""
    return JobSpec(
        workload="null",
        options={"parameters": parameters},
        training=TrainingSettings(rounds=rounds, inner_steps=1, nodes=nodes),
        inner=Inner(),
        outer=Outer(learning_rate=1.0, momentum=0.0),
        codec=CodecChoice(up="fp32", down="fp32"),
        evaluation=Evaluation(every=rounds),
    )


def our_seconds(
    parameters: int, nodes: int, rounds: int, *, is_plaintext: bool = True
) -> tuple[float, ...]:
    """Measure rounds by the coordinator's journal, from the end of one to the end of the next."""
    with (
        tempfile.TemporaryDirectory() as name,
        running(Path(name), is_plaintext=is_plaintext) as cluster,
    ):
        cluster.add_nodes(nodes, "null")
        return trained_seconds(cluster, spec_of(parameters, nodes, rounds + WARM_UP_ROUNDS))


def trained_seconds(cluster: Running, spec: JobSpec) -> tuple[float, ...]:
    """Run a job to its end and give the seconds of each round after the warm-up."""
    with cluster.client() as client:
        job_id = client.submit(spec)
        ends_ms = [
            update.at_ms
            for update in client.watch(job_id)
            if isinstance(update, JobEvent) and update.kind == "RoundRecorded"
        ]
        summary = client.job(job_id).job
    if summary.phase != "finished" or len(ends_ms) != spec.training.rounds:
        raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")
    measured = ends_ms[WARM_UP_ROUNDS - 1 :]
    return tuple((after - before) / 1000 for before, after in itertools.pairwise(measured))
