"""How far forecasts of jobs of real processes are off: nodes of unlike speed on this machine."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError, Running, running
from hypergpu.client import Coordinator
from hypergpu.client.forecasts import JobForecastView
from hypergpu.cluster.processes import kill_group, program, start
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings

_READY_S, _JOB_S, _POLL_S = 60.0, 300.0, 0.1
_FLOORS_MS = (60, 120, 240)
"""A step of each node takes so long at least; the last one comes when others have trained."""


class RunTrial(NamedTuple):
    """A job of processes as it was forecast and as it went."""

    name: str
    unseen: int
    forecast: JobForecastView
    took_ms: float

    @property
    def error(self) -> float:
        """How far the middle of the time was off, over what it took."""
        return abs(self.forecast.left_ms.middle - self.took_ms) / self.took_ms

    @property
    def is_within(self) -> bool:
        """Whether it took no less and no more than eight of ten were said to."""
        return self.forecast.left_ms.low <= self.took_ms <= self.forecast.left_ms.high


class _Wanted(NamedTuple):
    rounds: int
    inner_steps: int
    unseen: int = 0


_TRIALS = (
    _Wanted(20, 10),
    _Wanted(40, 10),
    _Wanted(12, 20, unseen=1),
    _Wanted(30, 20),
    _Wanted(20, 10),
)


def run_trials() -> list[RunTrial]:
    """Five jobs, one after the other, after a first one by which nodes are known.

    Raises:
        BenchmarkError: A job or a node did not get to its end.
    """
    with _cluster() as cluster, cluster.client() as client:
        nodes = [_join(cluster, f"node-{n}", floor) for n, floor in enumerate(_FLOORS_MS[:2])]
        _wait_for_nodes(client, len(nodes))
        _run(client, _spec(_Wanted(8, 10), nodes=2))
        return [_trial(cluster, client, wanted) for wanted in _TRIALS]


def _trial(cluster: Running, client: Coordinator, wanted: _Wanted) -> RunTrial:
    if wanted.unseen:
        _join(cluster, "node-late", _FLOORS_MS[-1])
        _wait_for_nodes(client, len(_FLOORS_MS))
    spec = _spec(wanted, nodes=2)
    found = client.estimate(spec)
    took_s = _run(client, spec)
    name = f"processes: {wanted.rounds} rounds of {wanted.inner_steps} steps, {found.nodes} nodes"
    return RunTrial(name, wanted.unseen, found, 1000 * took_s)


def _spec(wanted: _Wanted, *, nodes: int) -> JobSpec:
    training = TrainingSettings(
        rounds=wanted.rounds, inner_steps=wanted.inner_steps, batch_size=32, nodes=nodes, seed=1
    )
    stated = JobSpec("digits-softmax", training=training, evaluation=Evaluation(every=10))
    return with_strategy(stated, "aware")


def _run(client: Coordinator, spec: JobSpec) -> float:
    """Run a job to its end; seconds from its submission."""
    began_s = time.monotonic()
    job_id = client.submit(spec)
    while time.monotonic() - began_s < _JOB_S:
        job = client.job(job_id).job
        if job.phase == "finished":
            return time.monotonic() - began_s
        if job.phase in ("failed", "stopped", "paused"):
            raise BenchmarkError(f"{job_id} is {job.phase}: {job.reason}")
        time.sleep(_POLL_S)
    raise BenchmarkError(f"{job_id} has not ended after {_JOB_S:.0f} s")


def _join(cluster: Running, name: str, floor_ms: int) -> str:
    state = cluster.folder / name
    command = program(
        "gpu_node", "join", "--token-file", "-", "--state-dir", str(state), "--worker", "numpy"
    )
    environment = ONE_THREAD | {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(floor_ms)}
    log = cluster.folder / f"{name}.log"
    child = start(command, secret=cluster.node_token(), log=log, environment=environment)
    cluster.owner.callback(kill_group, child)
    return name


def _wait_for_nodes(client: Coordinator, count: int) -> None:
    until_s = time.monotonic() + _READY_S
    while sum(node.state != "away" for node in client.nodes()) < count:
        if time.monotonic() > until_s:
            raise BenchmarkError(f"{count} nodes did not join within {_READY_S:.0f} s")
        time.sleep(_POLL_S)


@contextmanager
def _cluster() -> Iterator[Running]:
    with (
        tempfile.TemporaryDirectory(prefix="hypergpu-forecasts-") as folder,
        running(Path(folder), is_plaintext=True) as cluster,
    ):
        yield cluster
