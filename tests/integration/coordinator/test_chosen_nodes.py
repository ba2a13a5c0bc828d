"""A job that requires a label of its nodes, with real processes."""

from pathlib import Path

from msgspec.structs import replace

from gpu_node.shell.owner.limits_file import OWNER_FILE
from hypergpu.jobfile.spec import JobSpec, NodeSelection, TrainingSettings
from tests.processes import Cluster, accepted_updates

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=2, inner_steps=2),
    nodes=NodeSelection(labels=("site = attic", "cores >= 1", "memory > 100MB")),
)
UNMET = "it tells no label site, and site = attic is required"


def test_only_a_node_with_the_label_trains_and_another_is_named_with_the_reason(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(1, settings={"HYPERGPU_NODE_NAME": "cellar"})
        cluster.wait_until_finished(cluster.submit(replace(SPEC, nodes=NodeSelection())))
        job_id = cluster.submit(SPEC)
        with cluster.coordinator.client() as client:
            (unfit,), (cellar,) = client.job(job_id).unfit, client.nodes()
        assert (unfit.id, unfit.name, unfit.reason) == (cellar.id, "cellar", UNMET)
        assert (cellar.state, cellar.reason) == ("idle", f"not for {job_id}: {UNMET}")

        folder = tmp_path / "node-1"
        folder.mkdir(mode=0o700)
        (folder / OWNER_FILE).write_text('[labels]\nsite = "attic"\n', "utf-8")
        cluster.add_nodes(1)
        cluster.wait_until_finished(job_id)
        trained_nodes = {node for _, node, _ in accepted_updates([*cluster.events(job_id)])}
        with cluster.coordinator.client() as client:
            labels = {node.id: node.labels for node in client.nodes()}
    assert [labels[node] for node in trained_nodes] == [{"site": "attic"}]
