"""A user's code that never ends beside another user's job, with real processes."""

from contextlib import ExitStack
from pathlib import Path

from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings
from hypergpu.user.client import ConnectionTarget, Coordinator
from hypergpu.wire.credentials import Role, parse_token
from tests import unruly_workload
from tests.processes import Cluster

HONEST = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=3, inner_steps=2),
    evaluation=Evaluation(every=1),
)
ENDLESS = JobSpec(
    workload=unruly_workload.NAME,
    options={"deed": "hold_lock", "path": "/"},
    training=TrainingSettings(rounds=3, inner_steps=2),
)


def test_a_users_endless_code_delays_no_other_users_job_and_its_stop_frees_its_process(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    packages = unruly_workload.install(tmp_path / "packages")
    cluster.coordinator.environment["PYTHONPATH"] = packages
    with cluster, ExitStack() as users:
        with cluster.client() as operator:
            tokens = [
                operator.create_token(Role.USER, ttl_s=3600, uses=0, label=each).token
                for each in ("eve", "ada")
            ]
        eve, ada = (
            users.enter_context(
                Coordinator(ConnectionTarget(cluster.coordinator.address, parse_token(token), 60.0))
            )
            for token in tokens
        )
        cluster.add_nodes(1)
        evil = eve.submit(ENDLESS)
        cluster.wait_for(evil, lambda event: event.kind == "ModelInitialised")
        honest = ada.submit(HONEST)
        assert cluster.wait_until_finished(honest).phase == "finished"
        assert "EvaluationReady" in {event.kind for event in cluster.events(honest)}
        eve.stop(evil)
        assert cluster.wait_until_finished(evil).phase == "stopped"
        # Its place is free for its owner's next job, whose first model waits for one.
        assert cluster.wait_until_finished(eve.submit(HONEST)).phase == "finished"
