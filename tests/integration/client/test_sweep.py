"""`hypergpu sweep` and `hypergpu.sweep` against a real coordinator and real nodes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hypergpu
from hypergpu.command_line import program
from hypergpu.user.client import Coordinator
from hypergpu.user.farm.output_rows import read_rows
from hypergpu.wire.credentials import Role
from tests.processes import ENVIRONMENT, Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "sweep_digits.py"
JOB = """
workload = "digits-mlp"
options = { width = 16 }
training = { rounds = 6, inner_steps = 3, batch_size = 32 }
evaluation = { every = 2 }
"""
RATES = [0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 100.0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator with two nodes that have torch."""
    with Cluster(tmp_path_factory.mktemp("sweep"), is_plaintext=False) as cluster:
        cluster.add_nodes(2, "torch", kinds=("training", "sweep"))
        yield cluster


@pytest.fixture(scope="module")
def coordinator(cluster: Cluster) -> Iterator[Coordinator]:
    """A connection to it."""
    with cluster.client() as client:
        yield client


def write_job(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text(JOB, "utf-8")
    return path


def test_a_sweep_is_a_table_of_points_with_metric_and_curve(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    grid: dict[str, list[Any]] = {
        "inner.learning_rate": RATES,
        "inner.optimizer": ["sgd"],
        "inner.weight_decay": [9.0],
    }
    run = hypergpu.sweep(write_job(tmp_path), grid, coordinator=coordinator, checks=0.0)
    frame = run.result()
    assert frame["inner.learning_rate"].tolist() == RATES
    assert frame["metric"].isna().tolist() == [False] * (len(RATES) - 1) + [True]
    assert "Fix: lower inner.learning_rate" in frame["error"].iloc[-1]
    assert [each["step"] for each in frame["curve"][0]] == [0, 6, 12, 18]
    assert frame["metrics"][0]["loss"] == frame["metric"][0]
    best = frame["metric"].idxmin()
    assert run.best()["inner.learning_rate"] == RATES[best]
    bundles = run.job.detail().job.bundles if run.job else None
    assert bundles is not None
    assert (bundles.units, bundles.unit) == (6 * 18 * 32, "samples")


@pytest.mark.full
def test_a_module_of_ones_own_is_swept(coordinator: Coordinator) -> None:
    torch.manual_seed(1)
    values = torch.randn(200, 4)
    samples = {"x": values.numpy(), "y": (values.sum(1, keepdim=True)).numpy()}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    run = hypergpu.sweep(
        nn.Linear(4, 1),
        [{"inner.learning_rate": 0.3}, {"inner.learning_rate": 1e-6}],
        loss=loss,
        training={"data": samples, "steps": 60, "batch_size": 16},
        coordinator=coordinator,
    )
    good, bad = (row["metric"] for row in run.rows())
    assert good < bad / 10


class SweepCommand:
    """`hypergpu sweep` of a file with early stopping, as a process of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        write_job(folder)
        self.file, self.out = folder / "sweep.toml", folder / "sweep.jsonl"
        rates = ", ".join(map(str, RATES))
        content = 'kind = "sweep"\njob = "job.toml"\nout = "sweep.jsonl"\nstop_early = 3\n'
        self.file.write_text(f"{content}[grid]\nlr = [{rates}]\n", "utf-8")
        token = folder / "token"
        with cluster.client() as client:
            token.write_text(client.create_token(Role.USER, ttl_s=600).token, "utf-8")
        self._words = ["sweep", str(self.file), "--token-file", str(token)]

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            program("hypergpu.user.cli", *self._words, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        output, errors = process.communicate()
        return process.returncode, output, errors


def test_bad_points_stop_early_and_a_killed_client_goes_on(
    cluster: Cluster, coordinator: Coordinator, tmp_path: Path
) -> None:
    command = SweepCommand(cluster, tmp_path)
    process = command.start()
    assert process.stderr is not None
    assert "trains 7 points in 2 rungs, each a job of its own" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    status, _, errors = command.run()
    assert status == 16
    assert "holds an unfinished sweep. Fix: go on with it: --resume" in errors
    status, output, errors = command.run("--resume")
    assert status == 0, errors
    rows = list(read_rows(command.out))
    assert [row["id"] for row in rows] == list(range(len(RATES)))
    by_steps = {steps: [row["id"] for row in rows if row["steps"] == steps] for steps in (6, 18)}
    first_rung = sorted(rows, key=lambda row: row["curve"][1]["value"])
    assert by_steps[18] == sorted(row["id"] for row in first_rung[:2])
    assert len(by_steps[6]) == 5
    assert output.splitlines()[0].split() == ["INNER.LEARNING_RATE", "LOSS", "STEPS"]
    assert not list(tmp_path.glob("*.rungs"))
    rung_names = [job.name for job in coordinator.jobs() if "rung" in job.name]
    assert sorted(rung_names) == ["sweep (rung 1 of 2)", "sweep (rung 2 of 2)"]
    status, _, errors = command.run()
    assert status == 16
    assert "sweep.jsonl is there already" in errors


def test_the_example_runs_as_written(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.client() as client:
        token = client.create_token(Role.USER, ttl_s=600).token
    output = subprocess.run(
        [sys.executable, str(EXAMPLE), str(write_job(tmp_path))],
        env={**os.environ, **ENVIRONMENT, "HYPERGPU_TOKEN": token},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "best: 0." in output
    assert json.loads(output.split("best: ")[1]) in {0.001, 0.01, 0.1}
