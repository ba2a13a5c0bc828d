"""Jobs that share nodes, with real processes."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypergpu.jobfile.spec import JobSpec, NodeSelection, TrainingSettings
from tests.processes import Cluster

LONG = JobSpec(
    workload="digits-softmax",
    name="long",
    training=TrainingSettings(rounds=4_000, inner_steps=2, nodes=1),
)
LATE = replace(LONG, name="late", training=TrainingSettings(rounds=3, inner_steps=2, nodes=2))


def test_a_job_gets_its_nodes_from_one_that_trains_for_long(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--job-turn-ms", "1000") as cluster:
        cluster.add_nodes(2)
        long = cluster.submit(LONG)
        cluster.wait_for(long, lambda event: event.kind == "AggregateReady")
        late = cluster.submit(LATE)
        assert cluster.wait_until_finished(late).phase == "finished"
        assert cluster.job(long).job.phase in {"training", "aggregating", "waiting"}


@pytest.mark.full
def test_a_job_that_waits_says_for_whom_and_for_how_long(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--job-turn-ms", "60000") as cluster:
        cluster.add_nodes(2)
        long = cluster.submit(LONG)
        cluster.wait_for(long, lambda event: event.kind == "AggregateReady")
        late = cluster.submit(LATE)
        cluster.wait_for(late, lambda event: event.kind == "ModelInitialised")
        why = cluster.job(late).job.reason
        unfit = cluster.submit(replace(LATE, nodes=NodeSelection(labels=("gpu >= 8GB",))))
        cluster.wait_for(unfit, lambda event: event.kind == "ModelInitialised")
        why_not = cluster.job(unfit).job.reason
    assert re.fullmatch(rf"2 nodes fit and train for {long}; place 1, about 1 min", why), why
    assert why_not.startswith("0 of 2 nodes fit; another one does not: its gpu is none"), why_not
