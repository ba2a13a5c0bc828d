"""Kind ``program``: a module of one's own over arrays, against the module itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gpu_node.shell.worker.trainer import ShardError
from hypergpu.workloads.networks.forward_program import forward_program
from tests.bundles import BundleFolder

VALUES = np.random.default_rng(4).standard_normal((21, 6)).astype(np.float32)


class TwoFields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        state: torch.Tensor = self.drop(torch.relu(self.hidden(x)))
        return state * scale[:, None]


def test_outputs_are_those_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    program = forward_program(module, {"x": VALUES})
    bundles = BundleFolder(tmp_path, "program")
    bundles.add_file("program", program.program)
    bundles.add_file("tensors", program.tensors)
    bundles.add_arrays({"x": VALUES[:9]})
    bundles.add_arrays({"x": VALUES[9:]})
    with torch.inference_mode():
        module_output = module(torch.from_numpy(VALUES)).numpy()
    np.testing.assert_allclose(bundles.vectors(), module_output, atol=1e-6)
    np.testing.assert_allclose(bundles.vectors(start=7, items=5), module_output[7:12], atol=1e-6)


def test_a_module_of_several_inputs_runs_as_in_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TwoFields()
    scale = np.arange(21, dtype=np.float32)
    program = forward_program(module, {"x": VALUES, "scale": scale})
    assert module.training
    bundles = BundleFolder(tmp_path, "program")
    bundles.add_file("program", program.program)
    bundles.add_file("tensors", program.tensors)
    bundles.add_arrays({"x": VALUES, "scale": scale})
    with torch.inference_mode():
        module_output = module.eval()(torch.from_numpy(VALUES), torch.from_numpy(scale)).numpy()
    np.testing.assert_allclose(bundles.vectors(), module_output, atol=1e-6)


def test_rows_without_a_finite_output_are_told_by_themselves(tmp_path: Path) -> None:
    values = VALUES.copy()
    values[3, 2] = np.nan
    module = nn.Linear(6, 2)
    program = forward_program(module, {"x": VALUES})
    bundles = BundleFolder(tmp_path, "program")
    bundles.add_file("program", program.program)
    bundles.add_file("tensors", program.tensors)
    bundles.add_arrays({"x": values})
    result, content = bundles.perform()
    assert (result.items, result.failures, result.units) == (20, 1, 20)
    assert b"not finite" in content


def test_chunks_of_other_fields_are_refused(tmp_path: Path) -> None:
    program = forward_program(nn.Linear(6, 2), {"x": VALUES})
    bundles = BundleFolder(tmp_path, "program")
    bundles.add_file("program", program.program)
    bundles.add_file("tensors", program.tensors)
    bundles.add_arrays({"x": VALUES[:, :4]})
    with pytest.raises(ShardError, match="its field x is"):
        bundles.perform()
