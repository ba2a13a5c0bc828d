import contextlib
import os
import random
import signal
import statistics
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.reading import spec_json
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, RoundRule, TrainingSettings, Trust
from hypergpu.user.client.asynchronous import AsyncCoordinator
from hypergpu.user.client.blocking import run
from hypergpu.user.client.resume import ignore
from hypergpu.user.client.upload import send_folder
from hypergpu.v1 import job_pb2
from tests.payments_double import FREE_PAY
from tests.processes import ROOT, Cluster, Happening, accepted_updates, failpoint_names

KILLS = int(os.environ.get("CHAOS_KILLS", "5"))
KILLS_A_JOB = 5
ROUNDS = 30
ROUNDS_A_KILL = ROUNDS // (KILLS_A_JOB + 1)
NODES = 2
AT_ONCE = {"HYPERGPU_NODE_RECONNECT_CAP_MS": "200"}
"""A node dials again so soon that a kill costs little more than the coordinator's start."""
SPEC = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=20, nodes=NODES),
    evaluation=Evaluation(every=2),
    pay=Pay(unit_price=1_000, rounds_per_epoch=7),
    round=RoundRule(quorum=1.0),
    trust=Trust(duplicates="none"),
)
BEFORE_TRAINING = ("create.stored", "initialise.made", "initialise.stored")


class ReferenceRun(NamedTuple):
    """What a job comes to that nobody disturbs."""

    digest: str
    round_s: float


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("chaos"))
    # A job that pays needs a package of payments.
    cluster.coordinator.environment["PYTHONPATH"] = f"{FREE_PAY}:{ROOT}"
    with cluster:
        cluster.add_nodes(NODES, settings=AT_ONCE)
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


class ChaosRun:
    """One job that lives through many deaths of its coordinator."""

    def __init__(self, cluster: Cluster, files: Path | None = None) -> None:
        self._cluster = cluster
        self._files = files
        self._request_id = uuid.uuid4().hex
        self._job_id = ""

    def submit(self) -> None:
        """Submit, or find the job that an earlier try made."""
        with self._cluster.coordinator.client() as client:
            self._job_id = run(self._create(client.asynchronous))

    async def _create(self, client: AsyncCoordinator) -> str:
        """Create the job with files, which its workload would not take by name."""
        manifest = await send_folder(client._calls, self._files, ignore) if self._files else None
        request = job_pb2.CreateJobRequest(
            spec_json=spec_json(SPEC), manifest=manifest, request_id=self._request_id
        )
        return str((await client._call(client._jobs.CreateJob, request)).job_id)

    def reach(self, number: int) -> None:
        """Wait until a round is recorded."""
        self._cluster.wait_for(
            self._job_id,
            lambda happening: (
                happening.kind == "RoundRecorded" and happening.fields["round"] >= number
            ),
        )

    def check(self, digest: str) -> None:
        """Let the job end and compare it with one that nobody disturbed."""
        job = self._cluster.wait_until_finished(self._job_id)
        self._cluster.wait_for(self._job_id, lambda happening: happening.kind == "JobEnded")
        events = list(self._cluster.events(self._job_id))
        accepted_pairs = [(number, node) for number, node, _ in accepted_updates(events)]

        assert job.phase == "finished"
        assert len(accepted_pairs) == len(set(accepted_pairs)) == ROUNDS * NODES
        assert job.updates_accepted == ROUNDS * NODES
        assert [event.sequence for event in events] == list(range(len(events)))
        assert job.model == digest
        check_measurements(events)


def check_measurements(events: list[Happening]) -> None:
    """Every round is measured once and in order with all its updates, and then the job ends."""
    measured_rounds = [each.fields for each in events if each.kind == "RoundMeasured"]
    assert [fields["round"] for fields in measured_rounds] == list(range(ROUNDS))
    for fields in measured_rounds:
        nodes = [update["contribution"]["node"] for update in fields["updates"]]
        assert len(nodes) == len(set(nodes)) == NODES
    assert [each.kind for each in events].count("JobEnded") == 1
    assert events[-1].kind == "JobEnded"


def death_at(cluster: Cluster, failpoint: str) -> int:
    """Start with a failpoint armed and wait until it kills; gives the exit status."""
    child = cluster.coordinator.launch(failpoints=failpoint)
    return child.wait(timeout=240)


@pytest.mark.full
def test_a_kill_at_every_failpoint_of_training_changes_nothing(
    cluster: Cluster, reference: ReferenceRun
) -> None:
    job = ChaosRun(cluster)
    job.submit()
    cluster.coordinator.kill()
    for name in failpoint_names():
        if name not in BEFORE_TRAINING:
            assert death_at(cluster, name) == -signal.SIGKILL, name
            cluster.coordinator.end()
    cluster.coordinator.start()
    job.check(reference.digest)


def test_a_kill_at_every_failpoint_before_training_changes_nothing(
    cluster: Cluster, reference: ReferenceRun, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("a user's file")
    job = ChaosRun(cluster, tmp_path)
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
    job.check(reference.digest)


@pytest.mark.timeout(60 * max(10, KILLS // 10))
def test_kills_at_random_instants_change_nothing(cluster: Cluster, reference: ReferenceRun) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # noqa: T201  shown when the test fails
    instants = random.Random(seed)
    for _ in range(0, KILLS, KILLS_A_JOB):
        job = ChaosRun(cluster)
        job.submit()
        for kill in range(KILLS_A_JOB):
            job.reach(kill * ROUNDS_A_KILL)
            kill_at_random(cluster, instants, (ROUNDS_A_KILL - 1) * reference.round_s)
        job.check(reference.digest)


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
