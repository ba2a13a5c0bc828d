"""Exports, loaded back."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hypergpu.tensors.layout import unpack
from hypergpu.workloads.entry import OPTIONS_FIELD, WORKLOAD_FIELD
from hypergpu.workloads.networks.exported import ExportError, load_export
from hypergpu.workloads.networks.task import module_initial, module_layout
from hypergpu.workloads.workload import build, find

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
    found = model.state_dict()
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name].numpy(), tensors[name]) for name in tensors)


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
    [("program", r"model\.load_state_dict"), ("hf-causal-lm", r"python load\.py FOLDER")],
)
def test_a_model_that_needs_more_than_its_export_says_what(
    tmp_path: Path, workload: str, fix: str
) -> None:
    write_export(tmp_path, **{WORKLOAD_FIELD: workload, OPTIONS_FIELD: "{}"})
    with pytest.raises(ExportError, match=fix):
        load_export(tmp_path)
