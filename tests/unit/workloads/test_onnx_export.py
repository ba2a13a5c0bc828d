"""Own programs as ONNX files: the same numbers, or a refusal with the operator."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.workloads.entry import OPTIONS_FIELD, WORKLOAD_FIELD
from hypergpu.workloads.onnx.__main__ import main
from hypergpu.workloads.onnx.writing import OnnxRefusalError, write_onnx
from tests.program_folders import write_checked


class SmallNet(nn.Module):
    """A convolution, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.first(x.unsqueeze(1))).relu()
        logits: Tensor = self.head(features.flatten(1))
        return logits


def measured_loss(
    model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    hits = (logits.argmax(1) == batch["y"]).float().mean()
    return F.cross_entropy(logits, batch["y"]), {"accuracy": hits}


class OddNet(SmallNet):
    """Computes by an operator that ONNX has not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.special.i1e(x))


def write_export(folder: Path, model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """An export of the model, with its samples in ``data``."""
    draws = np.random.default_rng(0)
    arrays: dict[str, NDArray[np.generic]] = {
        "x": draws.normal(size=(20, 8)).astype(np.float32),
        "y": draws.integers(0, 3, 20),
    }
    write_checked(folder / "job", model, measured_loss, arrays)
    (folder / "job" / "program").rename(folder / "program")
    tensors = {name: each.numpy() for name, each in model.state_dict().items()}
    metadata = {WORKLOAD_FIELD: "program", OPTIONS_FIELD: "{}"}
    save_file(tensors, folder / "model.safetensors", metadata)
    (folder / "data").mkdir()
    table = pa.table({"x": arrays["x"].tolist(), "y": arrays["y"]})
    parquet.write_table(table, folder / "data" / "samples.parquet")
    return arrays


def test_a_file_gives_the_numbers_of_torch_for_batches_of_any_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SmallNet()
    arrays = write_export(tmp_path, model)
    written_file = write_onnx(tmp_path, tmp_path / "model.onnx", str(tmp_path / "data"))
    assert written_file.outputs == ("loss", "accuracy")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [each.name for each in session.get_inputs()] == ["x", "y"]
    for size in (2, 13, 20):
        batch: dict[str, Any] = {name: each[:size] for name, each in arrays.items()}
        loss, accuracy = session.run(["loss", "accuracy"], batch)
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(each) for name, each in batch.items()}
            theirs, metrics = measured_loss(model.eval(), tensors)
        assert loss == pytest.approx(float(theirs), rel=1e-4)
        assert accuracy == pytest.approx(float(metrics["accuracy"]))


def test_an_operator_that_onnx_has_not_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    write_export(tmp_path, OddNet())
    with pytest.raises(OnnxRefusalError, match=r"the operator prims\.bessel_i1e is not"):
        write_onnx(tmp_path, tmp_path / "model.onnx", str(tmp_path / "data"))
    assert [path.name for path in tmp_path.iterdir() if "onnx" in path.name] == []
    assert main([str(tmp_path), str(tmp_path / "model.onnx"), str(tmp_path / "data")]) == 1
    assert "bessel_i1e" in capsys.readouterr().err
