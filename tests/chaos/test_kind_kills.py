"""Nodes are killed at random instants, or told to leave in the middle of their work, whatever the
kind of the work: others do it, and nothing is lost or counted twice.
"""

import os
import random
from collections.abc import Iterator

import pytest

from hypergpu.jobfile.spec import JobSpec, RoundRule, TrainingSettings, Trust
from tests.chaos.disturbed_jobs import (
    KINDS,
    DisturbedEcho,
    DisturbedFarm,
    DisturbedJob,
    DisturbedTraining,
)
from tests.kinds.coordinator import MODULE
from tests.kinds.echo.worker import MODULE as WORKER_MODULE
from tests.payments_double import FREE_PAY
from tests.processes import ROOT, Cluster

KILLS = int(os.environ.get("CHAOS_NODE_KILLS", "2"))
PARTS = KILLS + 1
NODES = 3
LOST_AFTER_MS = 1_500
ROUND_OF_ALL = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=1, inner_steps=1, nodes=NODES),
    round=RoundRule(quorum=1.0),
    trust=Trust(duplicates="none"),
)
SETTINGS = {
    "HYPERGPU_NODE_RECONNECT_CAP_MS": "200",
    "HYPERGPU_NODE_WORKER_MODULE": WORKER_MODULE,
    # Whoever is told to leave has no time to finish: it hands its work back.
    "HYPERGPU_NODE_DRAIN_LIMIT_MS": "1",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("kind-kills")
    cluster = Cluster(folder, "--lost-after-ms", str(LOST_AFTER_MS))
    cluster.coordinator.environment["PYTHONPATH"] = f"{FREE_PAY}:{ROOT}"
    cluster.coordinator.module = MODULE
    with cluster:
        cluster.add_nodes(NODES, settings=SETTINGS, kinds=KINDS)
        yield cluster


@pytest.fixture(params=["training", "echo", "map"])
def job(request: pytest.FixtureRequest, cluster: Cluster) -> DisturbedJob:
    # Who is killed before it has joined cannot run again, and who just started dies of SIGTERM.
    cluster.wait_until_finished(cluster.submit(ROUND_OF_ALL))
    if request.param == "echo":
        return DisturbedEcho(cluster)
    if request.param == "map":
        return DisturbedFarm(cluster)
    return DisturbedTraining(cluster, digest="")


def test_nodes_killed_at_random_lose_and_double_nothing(
    cluster: Cluster, job: DisturbedJob
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # noqa: T201  shown when the test fails
    dice = random.Random(seed)
    job.submit()
    for kill in range(KILLS):
        job.reach(kill / PARTS)
        node = dice.choice(cluster.nodes)
        node.kill()
        node.run()
    job.check(is_undisturbed_by_nodes=False)


def test_work_that_nodes_hand_back_as_they_leave_is_done_by_others(
    cluster: Cluster, job: DisturbedJob
) -> None:
    job.submit()
    for turn, node in enumerate(cluster.nodes[:2]):
        job.reach((turn + 1) / 3)
        assert node.terminate() == 0
        node.run()
    job.check(is_undisturbed_by_nodes=False)
