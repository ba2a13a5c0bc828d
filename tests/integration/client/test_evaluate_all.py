"""Metrics over all held-out samples, by a real job, and its model exported and run without code."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

import hypergpu
from hypergpu.client import Coordinator
from tests.processes import Cluster
from tests.whole_set import digits_metrics, digits_parts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator with one node."""
    with Cluster(tmp_path_factory.mktemp("whole"), is_plaintext=False) as cluster:
        cluster.add_nodes(1, "torch")
        yield cluster


@pytest.fixture(scope="module")
def coordinator(cluster: Cluster) -> Iterator[Coordinator]:
    """A connection to it."""
    with cluster.coordinator.client() as client:
        yield client


class Scaled(nn.Module):
    """A linear layer behind a table that is no part of the module's state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((64,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x * self.scale)
        return logits


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    logits = model(batch["image"])
    value = F.cross_entropy(logits, batch["digit"])
    if model.training:
        return value
    hits = (logits.argmax(1) == batch["digit"]).float().mean()
    outputs = {"scores": logits.softmax(1), "digit": batch["digit"]}
    return value, {"accuracy": hits}, outputs


def test_a_job_tells_scikit_learns_f1_and_its_export_runs_without_the_class(
    cluster: Cluster, coordinator: Coordinator, tmp_path: Path
) -> None:
    train, test = digits_parts()
    torch.manual_seed(0)
    run = hypergpu.train(
        Scaled(),
        loss=loss,
        evaluate_all=digits_metrics,
        data=train,
        held_out=test,
        coordinator=coordinator,
        name="exact",
        nodes=1,
        rounds=2,
        inner_steps=30,
        learning_rate=0.01,
        target=0.999,
        settings={"codec.up": "int8", "trust.duplicates": "none", "evaluation.samples": 100},
    )
    job = run.result().job
    assert (job.phase, job.metric_name) == ("finished", "f1")
    assert job.metrics.keys() == {"auc", "accuracy"}
    weights = run.state_dict()
    with torch.no_grad():
        scores = F.linear(
            torch.from_numpy(test["image"]) * 2, weights["linear.weight"], weights["linear.bias"]
        ).softmax(1)
    guessed, labels = scores.argmax(1).numpy(), test["digit"]
    told = {"f1": job.metric, **job.metrics}
    area = roc_auc_score(labels, scores.numpy(), multi_class="ovr", average="macro")
    wanted = {
        "f1": f1_score(labels, guessed, average="macro"),
        "auc": area,
        "accuracy": (guessed == labels).mean(),
    }
    assert told == pytest.approx(wanted, rel=1e-4)
    folder = tmp_path / "model"
    token = (cluster.coordinator.data_dir / "operator.token").read_text("utf-8").strip()
    subprocess.run(
        [sys.executable, "-m", "hypergpu.cli", "job", "export", run.id, "--out", str(folder)],
        check=True,
        env={**os.environ, "HYPERGPU_TOKEN": token, "HOME": str(tmp_path)},
    )
    files = {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()}
    beside = {"program/program.json", "program/tensors.safetensors"}
    assert files == {"README.md", "load.py", "model.safetensors", *beside}
    np.savez(tmp_path / "test.npz", **test)
    command = [sys.executable, str(folder / "load.py"), str(tmp_path / "test.npz")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"f1 {wanted['f1']:.4f}, auc {wanted['auc']:.4f}, accuracy" in ended.stdout
