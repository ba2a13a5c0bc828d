"""How far forecasts of jobs of real processes are off: nodes of unlike speed on this machine."""

import time
from typing import NamedTuple

from benchmarks.ours.adaptive.process_nodes import fleet_hub, join_node, run_job, wait_for_nodes
from benchmarks.ours.cluster import Running
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator
from hypergpu.user.client.forecasts import JobForecastView

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
    with fleet_hub() as cluster, cluster.client() as client:
        for number, floor_ms in enumerate(_FLOORS_MS[:2]):
            join_node(cluster, f"node-{number}", floor_ms)
        wait_for_nodes(client, 2)
        run_job(client, _spec(_Wanted(8, 10), nodes=2))
        return [_trial(cluster, client, order) for order in _TRIALS]


def _trial(cluster: Running, client: Coordinator, wanted: _Wanted) -> RunTrial:
    if wanted.unseen:
        join_node(cluster, "node-late", _FLOORS_MS[-1])
        wait_for_nodes(client, len(_FLOORS_MS))
    spec = _spec(wanted, nodes=2)
    estimate = client.estimate(spec)
    began_s = time.monotonic()
    run_job(client, spec)
    took_s = time.monotonic() - began_s
    name = (
        f"processes: {wanted.rounds} rounds of {wanted.inner_steps} steps, {estimate.nodes} nodes"
    )
    return RunTrial(name, wanted.unseen, estimate, 1000 * took_s)


def _spec(wanted: _Wanted, *, nodes: int) -> JobSpec:
    training = TrainingSettings(
        rounds=wanted.rounds, inner_steps=wanted.inner_steps, batch_size=32, nodes=nodes, seed=1
    )
    spec = JobSpec("digits-softmax", training=training, evaluation=Evaluation(every=10))
    return with_strategy(spec, "aware")
