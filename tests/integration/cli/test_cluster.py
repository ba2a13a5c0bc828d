"""Nodes and a coordinator that a command owns, killed at awkward moments."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.ours.warm import changed_environment
from hypergpu.jobfile.reading import parse_job
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import LocalCluster
from hypergpu.user.cluster.s3_server import BUCKET, S3Server
from hypergpu.user.terminal.watch import Watched, WatchView
from tests.warm_workers import warm_variables

TRAINED_WITHIN_S = 240.0
JOB = 'workload = "null"\n[training]\nrounds = 1\nnodes = 1\n'
TEXT_JOB = """workload = "text-gpt"
[data]
path = "text"
[training]
rounds = 2
nodes = 2
inner_steps = 2
batch_size = 8
[options]
width = 16
layers = 1
block_length = 32
"""


@pytest.fixture(autouse=True)
def _warm_starts() -> Iterator[None]:
    """Workers and evaluators are forks: what kills do is the subject, and not how they start."""
    with changed_environment(warm_variables()):
        yield


def follow(cluster: LocalCluster, coordinator: Coordinator, job_id: str) -> None:
    """Watch a job until it has finished."""
    give_up_at_s = time.monotonic() + TRAINED_WITHIN_S
    with Watched(coordinator, job_id, WatchView()) as job_watch:
        while not (job_watch.has_ended or cluster.dead()):
            assert time.monotonic() < give_up_at_s
            job_watch.tick()
    assert job_watch.progress.job is not None
    assert job_watch.progress.job.phase == "finished"


def wait_for_reason(coordinator: Coordinator, job_id: str, reason: str) -> None:
    """Watch a job until it and its nodes say why they wait."""
    give_up_at_s = time.monotonic() + TRAINED_WITHIN_S
    with Watched(coordinator, job_id, WatchView()) as job_watch:
        while not any(reason in node.reason for node in coordinator.nodes()):
            assert not job_watch.has_ended
            assert time.monotonic() < give_up_at_s
            job_watch.tick()
    assert reason in coordinator.job(job_id).job.reason


def test_a_node_killed_before_it_joined_joins_when_started_again(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, "null") as cluster:
        cluster.start_coordinator()
        cluster.start_nodes({"attic": {}})
        # Python has not even begun to import the daemon.
        first = cluster.kill("attic")
        assert cluster.kill("attic") == first  # its group may be somebody else's by now
        assert cluster.dead() == ["attic"]
        assert not (tmp_path / "state" / "attic" / "coordinator.json").exists()
        assert cluster.restart("attic") != first
        with cluster.operator() as coordinator:
            job_id = coordinator.submit(parse_job(JOB, source="test"))
            follow(cluster, coordinator, job_id)
        # Where `LocalCluster.restart` looks whether a node has joined.
        assert (tmp_path / "state" / "attic" / "coordinator.json").exists()


def test_a_job_waits_for_its_object_store_through_a_kill_of_the_coordinator(
    tmp_path: Path,
) -> None:
    server, text = S3Server(tmp_path / "buckets"), tmp_path / "text"
    text.mkdir()
    (text / "one.txt").write_text("To be, or not to be, that is the question. " * 5000)
    (text / "two.txt").write_text("Whether it is nobler in the mind to suffer. " * 5000)
    with server, LocalCluster(tmp_path / "run", "torch") as cluster:
        cluster.use_object_store(f"s3://{BUCKET}/jobs", server.environment)
        cluster.start_coordinator()
        with cluster.operator() as coordinator:
            job_id = coordinator.submit(parse_job(TEXT_JOB, source="test"), beside=tmp_path)
            server.stop()
            cluster.start_nodes({"attic": {}, "cellar": {}})
            wait_for_reason(coordinator, job_id, "STORE_UNREACHABLE (4005)")
        cluster.kill_coordinator()
        cluster.start_coordinator()
        with cluster.operator() as coordinator:
            wait_for_reason(coordinator, job_id, "STORE_UNREACHABLE (4005)")
            server.start()
            follow(cluster, coordinator, job_id)
            exported_model = coordinator.export(job_id, tmp_path / "model")
            secret = server.environment["AWS_SECRET_ACCESS_KEY"]
            for child in psutil.Process().children(recursive=True):
                if "coordinator.shell.evaluator" in child.cmdline():
                    assert secret not in child.environ().values()
            assert coordinator.job(job_id).job.phase == "finished"
            assert exported_model.model.stat().st_size > 0
            command = [sys.executable, str(exported_model.loader), str(text)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert output.startswith("text-gpt: perplexity ")
