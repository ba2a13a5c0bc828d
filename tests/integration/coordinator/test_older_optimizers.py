"""A job whose optimizer a node of an earlier version has not."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from hypergpu.jobfile.spec import Inner, JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster, CoordinatorProcess, accepted_updates

SPEC = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=2, inner_steps=2),
    inner=Inner(optimizer="muon"),
)
REASON = (
    "its version has no optimizer muon. Fix there: pip install --upgrade hypergpu;"
    " or state another inner.optimizer in the job"
)


def waiting_job(client: Coordinator) -> tuple[str, list[tuple[str, str]]]:
    """Submit the job; gives it with the nodes that do not fit and why."""
    job_id = client.submit(SPEC)
    return job_id, [(each.id, each.reason) for each in client.job(job_id).unfit]


async def test_an_older_node_is_named_with_the_reason_and_takes_jobs_of_adamw(
    tmp_path: Path,
) -> None:
    coordinator = CoordinatorProcess(tmp_path, *NOBODY_LOST)
    try:
        coordinator.start()
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        control = node.control([("digits-softmax", 1)])
        await anext(control)  # the welcome
        with coordinator.client() as client:
            job_id, unfit = await asyncio.to_thread(waiting_job, client)
            assert unfit == [(node.node_id, REASON)]
            (view,) = client.nodes()
            assert (view.state, view.reason) == ("idle", f"not for {job_id}: {REASON}")
            plain = replace(SPEC, inner=Inner())
            assert client.job(client.submit(plain)).unfit == []
        await node.close()
    finally:
        coordinator.end()


def test_nodes_of_this_version_train_such_a_job_to_its_end(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(2)
        job_id = cluster.submit(SPEC)
        cluster.wait_until_finished(job_id)
        assert len(accepted_updates([*cluster.events(job_id)])) >= 2
