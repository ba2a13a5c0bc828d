"""What people write in models trains as it is written, or is refused with the user's line."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.ours.workloads.constructs import ROWS, Construct, class_loss, constructs
from hypergpu.programs.container import ProgramError
from hypergpu.tensors.layout import TensorKind
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.task import module_layout
from tests.program_folders import write_checked

CONSTRUCTS = {each.name: each for each in constructs()}
QUICK = (
    "straight-through estimator",
    "gradient reversal",
    "own function of a class that inherits",
    "own function by setup_context",
    "own function of two results",
    "own clipped gradient",
    "two hooks of a tensor",
    "hook before other uses",
    "hook of a parameter",
    "backward hook of a module",
    "counter of bfloat16",
    "assigned buffer",
    "statistics in float64",
    "frozen copy that follows by momentum",
    "weights tied by memory",
    "complex parameters",
    "EmbeddingBag, mean, with offsets",
    "Embedding with max_norm",
    "spectral_norm",
    "weight_norm as before",
    "orthogonal",
    "reentrant checkpoint",
    "gradient penalty of inputs",
    "einsum with an ellipsis",
    "large floats",
    "rows by a mask",
    "own generator",
    "gumbel_softmax",
    "CTC",
    "Gaussian likelihood",
)
REFUSED = {
    "hook of a node of the graph": (
        r"than Linear a does \(.*construct_\w+.py:\d+: h = self.a\(x\)\): the gradient of"
        r" a\.\w+ differs by 0\.67 of its length, and at most 0\.0001 is rounding in float32\. Fix:"
    ),
    "backward with Python's numbers": r"construct_\w+.py:\d+: return gradients\[0\] if float",
    "number that the forward pass counts": (
        r"sets StepNumber\.step \(.*construct_\w+.py:\d+: .*Fix: register_buffer"
    ),
    "tensor attribute that is changed": (
        r"changes seen in place \(.*self\.seen \+= .*Fix: self\.register_buffer\(\"seen\""
    ),
    "weight that is a part of another": r"part\.weight \(.*\) shares memory with whole\.weight",
    "parameter made in forward": r"scale \(.*construct_\w+.py.*Fix: make it in __init__",
    "numpy's generator": r"random numbers from numpy \(.*constructs.py.*Fix: draw with torch\.rand",
    "loop over samples": r"fixes the size of the batch \(.*constructs.py:\d+: .*torch\.stack",
    "vmap": r"vmap are no operators of a program \(.*construct\w+.py",
    "tensor to numpy": r"leaves torch for numpy \(.*constructs.py:\d+: .*h\.detach\(\)\.numpy\(\)",
}


def check(construct: Construct, folder: Path) -> None:
    """Write the construct's program, which compares it with its module."""
    torch.manual_seed(1)
    write_checked(folder, construct.make(), construct.loss, construct.arrays)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation
@pytest.mark.parametrize("name", QUICK)
def test_a_construct_trains_as_its_module_does(name: str, tmp_path: Path) -> None:
    check(CONSTRUCTS[name], tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # constructs use what torch calls old or slow
@pytest.mark.parametrize(
    "name", [name for name, each in CONSTRUCTS.items() if not each.is_refused and name not in QUICK]
)
def test_every_other_construct_trains_as_its_module_does(name: str, tmp_path: Path) -> None:
    check(CONSTRUCTS[name], tmp_path)


@pytest.mark.parametrize(("name", "said"), REFUSED.items())
def test_what_cannot_be_a_program_is_refused_with_the_users_line(
    name: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ProgramError, match=said) as failure:
        check(CONSTRUCTS[name], tmp_path)
    assert str(failure.value).count("Fix: ") == 1


class Restless(nn.Module):
    """Changes all that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.losses.append(x.mean())
        logits: Tensor = self.layer(F.dropout(x - self.mean, 0.1))
        return logits


def test_the_comparison_leaves_the_users_model_as_it_was(tmp_path: Path) -> None:
    model = Restless().eval()
    model.layer.weight.grad = torch.ones(3, 8)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    buffer, random_states = model.mean, (torch.get_rng_state(), random.getstate())
    write_checked(tmp_path, model, class_loss, ROWS)
    assert model.mean is buffer
    assert model.losses == []
    assert not model.training
    assert torch.equal(model.layer.weight.grad, torch.ones(3, 8))
    assert model.layer.bias.grad is None
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]


class TwoConstants(nn.Module):
    """Another constant in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([2.0, 1.0, 3.0]) if self.training else torch.tensor([0.1, 5.0, 7.0])
        logits: Tensor = self.layer(x) * scale
        return logits


def test_constants_of_training_and_evaluation_do_not_mix(tmp_path: Path) -> None:
    write_checked(tmp_path, TwoConstants(), class_loss, ROWS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("counter of float16", TensorKind.STATISTIC),
        ("counter of int16", TensorKind.INTEGER),
        ("counter of bool", TensorKind.INTEGER),
        ("buffer that is not kept", TensorKind.STATISTIC),
    ],
)
def test_buffers_that_training_changes_travel(name: str, kind: TensorKind, tmp_path: Path) -> None:
    check(CONSTRUCTS[name], tmp_path)
    layout = module_layout(ProgramWorkload(tmp_path).model())
    assert [each.kind for each in layout.tensors if each.kind is not TensorKind.PARAMETER] == [kind]


def test_parameters_of_one_memory_are_one_tensor_of_the_job(tmp_path: Path) -> None:
    check(CONSTRUCTS["weights tied by memory"], tmp_path)
    (only,) = module_layout(ProgramWorkload(tmp_path).model()).tensors
    assert only.name == "table.weight"


def test_a_micro_batch_too_small_for_batch_normalisation_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    write_checked(tmp_path, model, class_loss, ROWS)
    workload = ProgramWorkload(tmp_path)
    twin = workload.model().train()
    assert getattr(twin, "smallest_pass", 0) == 2
    with pytest.raises(ProgramError, match=r"1 sample is too small: .*BatchNorm.*micro_batch = 2$"):
        workload.loss(twin, *(torch.from_numpy(np.array(each[:1])) for each in ROWS.values()))


def test_programs_without_new_parts_stay_readable_for_older_nodes(tmp_path: Path) -> None:
    plain = write_checked(tmp_path / "plain", nn.Linear(8, 3), class_loss, ROWS)
    assert plain.program.version == 2
    construct = CONSTRUCTS["gradient reversal"]
    new = write_checked(tmp_path / "new", construct.make(), construct.loss, construct.arrays)
    assert new.program.version == 3
