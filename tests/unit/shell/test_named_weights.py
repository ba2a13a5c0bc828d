"""Weights of files as a job's first model: types, names of wrappers, and what cannot be read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coordinator.shell.evaluator.weights import read_named_tensors
from hypergpu.errors import HyperGPUError
from hypergpu.workloads.networks.task import module_layout


class CountedLayer(nn.Module):
    """A layer with a count beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.tensor(7))


def save_weights(folder: Path, dtype: torch.dtype, prefix: str = "") -> tuple[Path, CountedLayer]:
    torch.manual_seed(0)
    model = CountedLayer()
    path = folder / "weights.safetensors"
    values = {
        f"{prefix}{name}": each.to(dtype) if each.is_floating_point() else each
        for name, each in model.state_dict().items()
    }
    save_file(values, path)
    return path, model


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_type_of_floats_is_read(tmp_path: Path, dtype: torch.dtype, prefix: str) -> None:
    path, model = save_weights(tmp_path, dtype, prefix)
    flat = read_named_tensors(path, module_layout(model))
    weight, bias = (each.detach().to(dtype).float() for each in model.layer.parameters())
    expected_rows = {tuple(weight.flatten().tolist()), tuple(bias.tolist())}
    values = tuple(flat.parameters.tolist())
    assert any(values[:12] == each or values[:3] == each for each in expected_rows)
    assert sorted(values) == sorted([*weight.flatten().tolist(), *bias.tolist()])


def test_a_type_that_is_no_number_of_it_is_told_with_what_converts_it(tmp_path: Path) -> None:
    path, model = save_weights(tmp_path, torch.float32)
    save_file({**model.state_dict(), "layer.bias": torch.zeros(3, dtype=torch.int8)}, path)
    with pytest.raises(
        HyperGPUError, match=r"layer\.bias is I8, and the job's is float32"
    ) as failure:
        read_named_tensors(path, module_layout(model))
    assert failure.value.fix == "save the file with tensor.float() of that tensor"


def test_infinite_values_of_bfloat16_are_refused(tmp_path: Path) -> None:
    path, model = save_weights(tmp_path, torch.float32)
    values = {name: each.clone() for name, each in model.state_dict().items()}
    values["layer.bias"] = torch.full((3,), float("inf"), dtype=torch.bfloat16)
    save_file(values, path)
    with pytest.raises(HyperGPUError, match="values that are not finite numbers"):
        read_named_tensors(path, module_layout(model))
