import contextlib
import os
import random
import signal
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hypergpu.errors import HyperGPUError
from tests.chaos.disturbed_jobs import (
    ITEM_MS,
    ITEMS,
    KINDS,
    NODES,
    ROUNDS,
    SPEC,
    DisturbedEcho,
    DisturbedFarm,
    DisturbedJob,
    DisturbedTraining,
)
from tests.kinds.coordinator import MODULE
from tests.kinds.echo.worker import MODULE as WORKER_MODULE
from tests.payments_double import FREE_PAY
from tests.processes import ROOT, Cluster, failpoint_names

KILLS = int(os.environ.get("CHAOS_KILLS", "5"))
KILLS_A_JOB = 5
PARTS = KILLS_A_JOB + 1
NODE_SETTINGS = {
    # A node dials again so soon that a kill costs little more than the coordinator's start.
    "HYPERGPU_NODE_RECONNECT_CAP_MS": "200",
    "HYPERGPU_NODE_WORKER_MODULE": WORKER_MODULE,
}
BEFORE_TRAINING = ("create.stored", "initialise.made", "initialise.stored")
OF_PACKED_WORK = ("contribution.accepted",)
OF_RESULTS = ("result.stored",)
FARM_S = 4.0
"""What a farm job takes at least on two nodes."""
OF_ANY_WORK = (
    *("decide.begin", "decide.done", "persist.written", "snapshot.begin", "snapshot.written"),
    *("act.begin", "act.command", "act.done", "serve.answer", "recover.replayed", "recover.done"),
)


class ReferenceRun(NamedTuple):
    """What a job comes to that nobody disturbs."""

    digest: str
    round_s: float


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("chaos"))
    # A job that pays needs a package of payments.
    cluster.coordinator.environment["PYTHONPATH"] = f"{FREE_PAY}:{ROOT}"
    cluster.coordinator.module = MODULE
    with cluster:
        cluster.add_nodes(NODES, settings=NODE_SETTINGS, kinds=KINDS)
        yield cluster


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> ReferenceRun:
    job_id = cluster.submit(SPEC)
    digest = cluster.wait_until_finished(job_id).model or ""
    durations_ms = [
        each.fields["duration_ms"]
        for each in cluster.events(job_id)
        if each.kind == "RoundRecorded"
    ]
    return ReferenceRun(digest, statistics.median(durations_ms) / 1000)


def death_at(cluster: Cluster, failpoint: str) -> int:
    """Start with a failpoint armed and wait until it kills; gives the exit status."""
    child = cluster.coordinator.launch(failpoints=failpoint)
    return child.wait(timeout=240)


class NewJob(NamedTuple):
    """Jobs of one kind to disturb."""

    kind: str
    cluster: Cluster
    reference: ReferenceRun

    def make(self, files: Path | None = None) -> DisturbedJob:
        """Another job."""
        if self.kind == "echo":
            return DisturbedEcho(self.cluster)
        if self.kind == "map":
            return DisturbedFarm(self.cluster)
        return DisturbedTraining(self.cluster, self.reference.digest, files)

    @property
    def kills(self) -> int:
        """Kills of one job; few where only some are asked for, as each costs a start."""
        is_short = self.kind != "training" and KILLS <= KILLS_A_JOB
        return 2 if is_short else KILLS_A_JOB

    @property
    def part_s(self) -> float:
        """Time that the work between two kills takes undisturbed, less a little."""
        if self.kind == "echo":
            return (ITEMS / PARTS - NODES) * ITEM_MS / 1000 / NODES
        if self.kind == "map":
            return FARM_S / PARTS
        return (ROUNDS // PARTS - 1) * self.reference.round_s

    @property
    def failpoints(self) -> list[str]:
        """Those that the job passes again and again once it is created."""
        if self.kind == "echo":
            return [*OF_ANY_WORK, *OF_PACKED_WORK]
        if self.kind == "map":
            return [*OF_ANY_WORK, *OF_PACKED_WORK, *OF_RESULTS]
        others = (*BEFORE_TRAINING, *OF_PACKED_WORK, *OF_RESULTS)
        return [name for name in failpoint_names() if name not in others]


@pytest.fixture(params=["training", "echo", "map"])
def jobs(request: pytest.FixtureRequest, cluster: Cluster, reference: ReferenceRun) -> NewJob:
    return NewJob(request.param, cluster, reference)


@pytest.mark.full
def test_a_kill_at_every_failpoint_of_the_work_changes_nothing(
    cluster: Cluster, jobs: NewJob
) -> None:
    job = jobs.make()
    job.submit()
    cluster.coordinator.kill()
    for name in jobs.failpoints:
        assert death_at(cluster, name) == -signal.SIGKILL, name
        cluster.coordinator.end()
    cluster.coordinator.start()
    job.check()


def test_a_kill_at_every_failpoint_before_training_changes_nothing(
    cluster: Cluster, reference: ReferenceRun, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("a user's file")
    job = DisturbedTraining(cluster, reference.digest, tmp_path)
    for name in BEFORE_TRAINING:
        cluster.coordinator.end()
        cluster.coordinator.start(failpoints=name)
        # Its death may come during a call or after its answer; a call may come too soon.
        while cluster.coordinator.child.poll() is None:
            with contextlib.suppress(HyperGPUError):
                job.submit()
        assert cluster.coordinator.child.wait(timeout=240) == -signal.SIGKILL, name
    cluster.coordinator.end()
    cluster.coordinator.start()
    job.submit()
    job.check()


@pytest.mark.timeout(60 * max(10, KILLS // 5))
def test_kills_at_random_instants_change_nothing(cluster: Cluster, jobs: NewJob) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # noqa: T201  shown when the test fails
    instants = random.Random(seed)
    for _ in range(0, KILLS, KILLS_A_JOB):
        job = jobs.make()
        job.submit()
        for kill in range(jobs.kills):
            job.reach(kill / PARTS)
            kill_at_random(cluster, instants, jobs.part_s)
        job.check()


def kill_at_random(cluster: Cluster, instants: random.Random, within_s: float) -> None:
    """Kill the running coordinator, and every other time also the next one while it starts."""
    die_within(cluster.coordinator.child, instants.uniform(0, within_s))
    cluster.coordinator.end()
    if instants.random() < 0.5:
        die_within(cluster.coordinator.launch(), instants.uniform(0, 1.0))
        cluster.coordinator.end()
    cluster.coordinator.start()


def die_within(child: "subprocess.Popen[str]", delay_s: float) -> None:
    """Let a process live for a while that nothing in it chose."""
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=delay_s)
    child.kill()
