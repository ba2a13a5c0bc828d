"""Nodes and a coordinator that a command owns, killed at awkward moments."""

import time
from pathlib import Path

from hypergpu.cluster.cluster import LocalCluster
from hypergpu.jobfile.reading import parse_job
from hypergpu.terminal.watch import Watched, WatchView

TRAINED_WITHIN_S = 240.0
JOB = 'workload = "null"\n[training]\nrounds = 1\nnodes = 1\n'


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
            give_up_at_s = time.monotonic() + TRAINED_WITHIN_S
            with Watched(coordinator, job_id, WatchView()) as watched:
                while not (watched.has_ended or cluster.dead()):
                    assert time.monotonic() < give_up_at_s
                    watched.tick()
        assert watched.progress.job is not None
        assert watched.progress.job.phase == "finished"
        # Where `LocalCluster.restart` looks whether a node has joined.
        assert (tmp_path / "state" / "attic" / "coordinator.json").exists()
