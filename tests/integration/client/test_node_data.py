"""Data that stay on nodes: real processes, each with a folder of its own."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

import hypergpu
from hypergpu.jobfile.spec import Data, JobSpec
from hypergpu.user.client import Coordinator, HyperGPUError
from hypergpu.workloads.digits import digits
from tests.processes import Cluster, Happening, NodeProcess
from tests.unit.training.test_datasets import write_archive

# Steps are fixed: they give the same digest twice, and each half of the classes the same part.
SETTINGS = {"strategy": "diloco", "codec.up": "int8"}
HAS_IT = {"left": range(5), "right": range(5, 10)}


def add_node(cluster: Cluster, name: str, limits: str) -> NodeProcess:
    """Let a node join whose owner wrote these limits."""
    node = NodeProcess(cluster.folder, name, "torch", {"HYPERGPU_NODE_NAME": name})
    node.state_dir.mkdir(mode=0o700)
    (node.state_dir / "node.toml").write_text(limits)
    node.join(cluster.coordinator.node_token())
    cluster.nodes.append(node)
    return node


def own_folder(folder: Path, name: str) -> Path:
    """A node's own digits, of half of the classes, in two files with a field that none asks for."""
    train = digits().train
    chosen_indices = np.flatnonzero(np.isin(train.labels, HAS_IT[name]))
    place = folder / "owners" / name
    place.mkdir(parents=True, mode=0o755)
    for number, part in enumerate(np.array_split(chosen_indices, 2)):
        images, labels = train.batch(part)
        fields = {"image": images, "digit": labels, "patient": np.arange(len(part))}
        write_archive(place / f"{number}.npz", fields)
        (place / f"{number}.npz").chmod(0o644)
    return place


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with digits of their own, of other classes each, and one without."""
    with Cluster(tmp_path_factory.mktemp("own"), is_plaintext=False) as own_cluster:
        for name in HAS_IT:
            add_node(
                own_cluster, name, f'[data]\ndigits = "{own_folder(own_cluster.folder, name)}"\n'
            )
        add_node(own_cluster, "empty", "")
        yield own_cluster


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["image"])
    hits = (logits.argmax(1) == batch["digit"]).float().mean()
    return F.cross_entropy(logits, batch["digit"]), {"accuracy": hits}


def held_out() -> dict[str, np.ndarray[Any, Any]]:
    test = digits().test
    return {"image": test.batch(np.arange(len(test.labels)))[0], "digit": test.labels}


def begin(client: Coordinator, name: str) -> str:
    torch.manual_seed(0)
    run = hypergpu.train(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        loss=loss,
        data="node:digits",
        held_out=held_out(),
        coordinator=client,
        name=name,
        nodes=2,
        rounds=12,
        inner_steps=10,
        learning_rate=0.01,
        settings=SETTINGS,
    )
    return run.id


def is_fold_of(number: int, event: Happening) -> bool:
    return event.kind == "AggregateReady" and event.fields["round"] == number


def test_nodes_train_on_what_they_have_and_tell_how_much_that_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    with cluster.coordinator.client() as client:
        job = cluster.wait_until_finished(begin(client, "whole"))
        exported_model = client.export(job.id, tmp_path / "model")
        (empty_node,) = [each for each in client.nodes() if each.name == "empty"]
    assert (job.phase, job.metric_name) == ("finished", "accuracy")
    assert job.metric is not None
    # Whoever knows half of the digits is right in half of the cases at most.
    assert job.metric > 0.7
    events = list(cluster.events(job.id))
    sample_counts = {
        event.fields["update"]["data_samples"] for event in events if event.kind == "UpdateReceived"
    }
    labels = digits().train.labels
    assert sample_counts == {int(np.isin(labels, has).sum()) for has in HAS_IT.values()}
    assert not [each for each in events if empty_node.id in str(each.fields)]
    assert "`digits`, which stayed on the nodes that have it" in exported_model.card.read_text()
    with safe_open(exported_model.model, "np") as file:
        assert (file.metadata() or {})["hypergpu.node_data"] == "digits"


@pytest.mark.full
def test_a_killed_coordinator_of_nodes_own_data_ends_with_the_same_model(cluster: Cluster) -> None:
    with cluster.coordinator.client() as client:
        whole = cluster.wait_until_finished(begin(client, "undisturbed"))
        killed_job = begin(client, "killed")
    cluster.wait_for(killed_job, lambda event: is_fold_of(4, event))
    cluster.coordinator.kill()
    cluster.coordinator.start()
    assert cluster.wait_until_finished(killed_job).model == whole.model


def test_a_node_without_the_data_set_says_so_with_its_number(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "held_out.txt").write_text("Ward five, bed two. " * 50)
    asked_data = Data(source="node", name="wards", path=".")
    with cluster.coordinator.client() as client:
        job = client.submit(JobSpec(workload="text-gpt", data=asked_data), beside=tmp_path)
        reasons_in_job = {each.name: each.reason for each in client.job(job).participants}
        reasons_in_list = {each.name: each.reason for each in client.nodes()}
        client.stop(job)
    assert reasons_in_job == reasons_in_list
    assert reasons_in_job.keys() == {"left", "right", "empty"}
    for reason in reasons_in_job.values():
        assert reason.startswith(f"OWNER_DATA (7108): {job} trains on wards where it is, and")


def test_data_on_nodes_need_held_out_samples_beside_them() -> None:
    with pytest.raises(HyperGPUError, match="node:wards stays on nodes") as failure:
        hypergpu.train(nn.Linear(2, 2), loss=loss, data="node:wards")
    assert failure.value.fix == "give held_out="
