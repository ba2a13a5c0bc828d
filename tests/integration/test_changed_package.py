"""A package with a workload that changes on disk while coordinator and node run."""

from pathlib import Path

from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator, JobEvent
from tests.processes import CoordinatorProcess, NodeProcess
from tests.tiny_package import NAME, install


def train(client: Coordinator, **options: int) -> float | None:
    """Train a job of one round to its end; gives its training loss, which is the version."""
    training = TrainingSettings(rounds=1, inner_steps=1, nodes=1)
    job = client.submit(JobSpec(NAME, training=training, options={**options}))
    losses = [
        update.body["loss"]
        for update in client.watch(job)
        if isinstance(update, JobEvent) and update.kind == "RoundRecorded"
    ]
    assert client.job(job).job.phase == "finished"
    (loss,) = losses
    assert isinstance(loss, float)
    return loss


def test_a_raised_version_trains_the_next_job_without_a_restart(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    environment = {"PYTHONPATH": install(packages, 1)}
    coordinator = CoordinatorProcess(tmp_path)
    coordinator.environment = environment
    node = NodeProcess(tmp_path, "node", settings=environment)
    try:
        coordinator.start()
        node.join(coordinator.node_token())
        with coordinator.client() as client:
            assert train(client, since_1=0) == 1.0
            install(packages, 2)
            assert train(client, since_2=0) == 2.0
            (view,) = client.nodes()
            assert view.workloads[NAME] == 2
        assert node.child.poll() is None
        assert "tiny-workload 1.0 is 2.0 now" in node.log.read_text("utf-8")
    finally:
        node.end()
        coordinator.end()
