"""Metrics over all held-out samples, by a real job, and its model exported and run without code."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn import functional as F

import hypergpu
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client import ConnectionTarget, Coordinator
from hypergpu.wire.credentials import Role, parse_token
from tests.processes import Cluster
from tests.warm_commands import command_output
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


@pytest.fixture(scope="module")
def run(coordinator: Coordinator) -> hypergpu.Run:
    """A run that has ended."""
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
    run.result()
    return run


def metrics_by_scikit_learn(run: hypergpu.Run) -> dict[str, float]:
    """Those of the trained weights on the held-out digits."""
    # Imported here: it takes a second of each process that collects the tests.
    from sklearn.metrics import f1_score, roc_auc_score

    weights, test = run.state_dict(), digits_parts()[1]
    images = torch.from_numpy(test["image"]) * 2
    scores = F.linear(images, weights["linear.weight"], weights["linear.bias"]).softmax(1).numpy()
    guesses, labels = scores.argmax(1), test["digit"]
    area = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    f1 = f1_score(labels, guesses, average="macro")
    return {"f1": f1, "auc": area, "accuracy": (guesses == labels).mean()}


def test_a_job_tells_f1_and_auc_as_scikit_learn_has_them(run: hypergpu.Run) -> None:
    job = run.detail().job
    assert (job.phase, job.metric_name) == ("finished", "f1")
    assert {"f1": job.metric, **job.metrics} == pytest.approx(
        metrics_by_scikit_learn(run), rel=1e-4
    )


def test_an_export_by_the_command_line_runs_without_the_class(
    cluster: Cluster, run: hypergpu.Run, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    token = (cluster.coordinator.data_dir / "operator.token").read_text("utf-8").strip()
    home = {"HYPERGPU_TOKEN": token, "HOME": str(tmp_path)}
    command_output("job", "export", run.id, "--out", str(folder), environment=home)
    files = {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()}
    beside = {"program/program.json", "program/tensors.safetensors"}
    assert files == {"README.md", "load.py", "model.safetensors", *beside}
    test = digits_parts()[1]
    table = pa.table({"image": test["image"].tolist(), "digit": test["digit"]})
    parquet.write_table(table, tmp_path / "test.parquet")
    command = [sys.executable, str(folder / "load.py"), str(tmp_path / "test.parquet")]
    process = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    expected_metrics = metrics_by_scikit_learn(run)
    assert (
        f"f1 {expected_metrics['f1']:.4f}, auc {expected_metrics['auc']:.4f}, accuracy"
        in process.stdout
    )
    assert f"accuracy {expected_metrics['accuracy']:.4f}, " in process.stdout


def test_nobody_elses_token_gets_a_jobs_program(
    cluster: Cluster, coordinator: Coordinator, run: hypergpu.Run, tmp_path: Path
) -> None:
    stranger = parse_token(coordinator.create_token(Role.USER, ttl_s=600, label="other").token)
    target = ConnectionTarget(cluster.coordinator.address, stranger, 10.0)
    with Coordinator(target) as another, pytest.raises(HyperGPUError) as failure:
        another.export(run.id, tmp_path)
    assert failure.value.reason is Reason.ROLE_FORBIDDEN
    assert not [*tmp_path.rglob("*.json")]
