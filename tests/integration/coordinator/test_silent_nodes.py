"""A real node whose worker hangs: it heartbeats, holds its shard, and delivers nothing."""

from pathlib import Path

import psutil
import pytest

from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings
from tests.processes import Cluster, Happening
from tests.warm_workers import UNFORKED

ENDLESS = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=100_000, inner_steps=5, nodes=3),
    evaluation=Evaluation(every=1000),
)


def is_record_of(updates: int, event: Happening) -> bool:
    """Whether an event is the record of a round with so many updates."""
    return event.kind == "RoundRecorded" and event.fields["updates"] == updates


@pytest.mark.full
def test_a_job_without_a_deadline_goes_on_without_a_node_whose_worker_hangs(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes(3, settings=UNFORKED)
        job_id = cluster.submit(ENDLESS)
        cluster.wait_for(job_id, lambda event: is_record_of(3, event))
        (worker,) = psutil.Process(nodes[0].child.pid).children()
        worker.suspend()
        closed_record = cluster.wait_for(job_id, lambda event: is_record_of(2, event))
        assert closed_record.fields["reason"].endswith("1 node passed over")
        assert closed_record.fields["duration_ms"] < 60_000
        with cluster.coordinator.client() as client:
            plan_reasons = [node.plan_reason for node in client.nodes()]
        assert plan_reasons.count("no update in time, 1 round in a row") == 1
        assert all(node.child.poll() is None for node in nodes)
        # Its daemon ends the worker, which does not drop what it was told to, and starts another.
        cluster.wait_for(job_id, lambda event: is_record_of(3, event), closed_record.sequence)
        assert cluster.job(job_id).job.phase == "training"
