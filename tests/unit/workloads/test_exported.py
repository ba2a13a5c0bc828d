"""Exports, loaded back."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.tensors.layout import unpack
from hypergpu.workloads.entry import OPTIONS_FIELD, WORKLOAD_FIELD
from hypergpu.workloads.networks.exported import ExportError, load_export
from hypergpu.workloads.networks.task import module_initial, module_layout
from hypergpu.workloads.registry import build, find
from tests.program_folders import write_checked

NAME, OPTIONS = "cifar10-resnet18", {"augment": False}


def write_export(folder: Path, **changes: str) -> Mapping[str, NDArray[np.generic]]:
    """A first model of ResNet-18, with statistics and integers, as an export writes it."""
    workload = build(find(NAME), OPTIONS)
    tensors = dict(unpack(module_layout(workload.model()), module_initial(workload.model, 3)))
    metadata = {WORKLOAD_FIELD: NAME, OPTIONS_FIELD: '{"augment": false}', **changes}
    save_file(tensors, folder / "model.safetensors", metadata)
    return tensors


def test_every_tensor_of_a_module_is_loaded(tmp_path: Path) -> None:
    tensors = write_export(tmp_path)
    model = load_export(tmp_path).model
    assert not model.training
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    assert all(np.array_equal(state[name].numpy(), tensors[name]) for name in tensors)


def test_another_model_than_the_workloads_is_refused_with_its_tensor(tmp_path: Path) -> None:
    write_export(tmp_path, **{WORKLOAD_FIELD: "digits-cnn", OPTIONS_FIELD: "{}"})
    with pytest.raises(ExportError, match="install the version that trained it"):
        load_export(tmp_path)


def test_a_folder_without_an_export_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"model\.safetensors cannot be read"):
        load_export(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(ExportError, match=r"model\.safetensors cannot be read"):
        load_export(tmp_path)
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="names no workload"):
        load_export(tmp_path)


@pytest.mark.parametrize(
    ("workload", "fix"),
    [("program", "Fix: hypergpu job export JOB"), ("hf-causal-lm", r"python load\.py FOLDER")],
)
def test_a_model_that_needs_more_than_its_export_says_what(
    tmp_path: Path, workload: str, fix: str
) -> None:
    write_export(tmp_path, **{WORKLOAD_FIELD: workload, OPTIONS_FIELD: "{}"})
    with pytest.raises(ExportError, match=fix):
        load_export(tmp_path)


class FrozenFirst(nn.Module):
    """A frozen layer, which no export of the model has, before one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 12).requires_grad_(False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x).relu())
        return logits


def measured_loss(
    model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    hits = (logits.argmax(1) == batch["y"]).float().mean()
    return F.cross_entropy(logits, batch["y"]), {"accuracy": hits}


def test_a_model_of_ones_own_evaluates_from_its_program_alone(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    arrays: dict[str, NDArray[np.generic]] = {
        "x": draws.normal(size=(40, 8)).astype(np.float32),
        "y": draws.integers(0, 3, 40),
    }
    torch.manual_seed(0)
    model = FrozenFirst()
    write_checked(tmp_path / "job", model, measured_loss, arrays)
    export = tmp_path / "export"
    export.mkdir()
    with torch.no_grad():
        model.head.bias.add_(0.5)
        batch = {name: torch.from_numpy(each) for name, each in arrays.items()}
        loss, metrics = measured_loss(model.eval(), batch)
    trained_tensors = {
        f"head.{name}": each.numpy() for name, each in model.head.state_dict().items()
    }
    save_file(
        trained_tensors,
        export / "model.safetensors",
        {WORKLOAD_FIELD: "program", OPTIONS_FIELD: "{}"},
    )
    shutil.copytree(tmp_path / "job" / "program", export / "program")
    loader = files("hypergpu.user.client").joinpath("load.py.txt").read_bytes()
    (export / "load.py").write_bytes(loader)
    table = pa.table({"x": arrays["x"].tolist(), "y": arrays["y"]})
    parquet.write_table(table, tmp_path / "new.parquet")
    command = [sys.executable, str(export / "load.py"), str(tmp_path / "new.parquet")]
    process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=export)
    expected_line = f"accuracy {float(metrics['accuracy']):.4f}, loss {float(loss):.4f} on 40"
    assert expected_line in process.stdout
