"""The built-in mixture of experts: what a part of it computes, counts and is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.optimizer import OptimizerRule
from hypergpu.tensors.layout import Flat, LayoutError, unpack
from hypergpu.tensors.partial import part_layout, write_part
from hypergpu.units import Bytes
from hypergpu.workloads.networks.mixture import ByteMixture, MixtureGpt, MixtureLayer
from hypergpu.workloads.networks.task import (
    Device,
    load_module,
    module_initial,
    named_tensors,
    workload_layout,
)
from hypergpu.workloads.registry import build, find

HELD = (1, 2, 5)
OPTIONS = {"width": 16, "hidden": 32, "layers": 2, "heads": 2, "block_length": 8, "experts": 6}


@pytest.fixture
def mixture() -> ByteMixture:
    workload: ByteMixture = build(find("text-mixture"), {**OPTIONS, "corpus_bytes": 1 << 17})
    return workload


def part_of(mixture: ByteMixture, folder: Path) -> tuple[MixtureGpt, MixtureGpt]:
    """A whole model, and the part of it with some experts."""
    flat = module_initial(mixture.model, 3)
    whole, layout = mixture.model(), workload_layout(mixture, mixture.model())
    load_module(whole, layout, flat)
    octets = np.frombuffer(b"".join(vector.tobytes() for vector in flat), np.uint8)
    holders_workload = mixture.holding(HELD)
    part = holders_workload.model()
    part_of_layout = part_layout(layout, HELD)
    assert workload_layout(holders_workload, part) == part_of_layout
    write_part(octets, layout, part_of_layout, folder / "part")
    values = Flat.view(part_of_layout, np.fromfile(folder / "part", np.uint8))
    load_module(part, part_of_layout, values)
    assert isinstance(whole, MixtureGpt)
    assert isinstance(part, MixtureGpt)
    return whole, part


def routed_among(layer: MixtureLayer, held: Sequence[int], x: Tensor) -> Tensor:
    """The plain formula: the whole layer with all other experts' scores at minus infinity."""
    keys = torch.stack([each.get_parameter("key") for each in layer.experts.values()])
    masked_scores = torch.full((len(x), len(keys)), -torch.inf)
    masked_scores[:, list(held)] = (x @ keys.T)[:, list(held)]
    weights, choices = F.softmax(masked_scores, dim=1).topk(layer.per_token, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    outputs = torch.stack([expert(x) for expert in layer.experts.values()])  # [experts, n, width]
    rows = torch.arange(len(x))
    return sum(
        (weights[:, place, None] * outputs[choices[:, place], rows] for place in range(2)),
        torch.zeros_like(x),
    )


def test_a_part_computes_what_the_whole_does_whose_router_knows_only_its_experts(
    mixture: ByteMixture, tmp_path: Path
) -> None:
    whole, part = part_of(mixture, tmp_path)
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    for whole_layer, part_layer in zip(whole.layers, part.layers, strict=True):
        layer, other = whole_layer.get_submodule("mixture"), part_layer.get_submodule("mixture")
        assert isinstance(layer, MixtureLayer)
        with torch.no_grad():
            outputs, plain_outputs = other(x, part.tokens), routed_among(layer, HELD, x)
        torch.testing.assert_close(outputs, plain_outputs)


def test_a_part_holds_no_tensor_of_another_expert(mixture: ByteMixture, tmp_path: Path) -> None:
    whole, part = part_of(mixture, tmp_path)
    names = {name for name in named_tensors(whole) if mixture.expert_of(name) in {None, *HELD}}
    assert set(named_tensors(part)) == names


def test_training_counts_each_token_once_for_each_of_its_experts(mixture: ByteMixture) -> None:
    holders_workload = mixture.holding(HELD)
    samples = holders_workload.load("").train
    trainer = TorchTrainer(
        holders_workload, Device("cpu", "CPU", Bytes(0), has_bf16=False), samples
    )
    flat = module_initial(holders_workload.model, 1)
    trainer.begin(InitialState(flat, 0, None, OptimizerRule()))
    for start in (0, 4):
        trainer.step(np.arange(start, start + 4), 1e-3)
    after = Flat.empty(trainer.layout)
    trainer.store(after)
    counts = {
        name: int(values[0])
        for name, values in unpack(trainer.layout, after).items()
        if name.startswith("tokens.")
    }
    layers, tokens, per_token = 2, 8 * 8, 2
    assert set(counts) == {f"tokens.{number}.count" for number in HELD}
    assert sum(counts.values()) == layers * tokens * per_token


def test_a_mixture_whose_tensors_name_an_expert_that_it_lacks_is_refused(
    mixture: ByteMixture,
) -> None:
    class OneTooMany(ByteMixture):
        def expert_of(self, tensor: str) -> int | None:
            expert = super().expert_of(tensor)
            return None if expert is None else expert + 1

    other = OneTooMany(mixture.shape, mixture.held, mixture.text)
    with pytest.raises(LayoutError, match="of expert 6: there are 6 experts"):
        workload_layout(other, other.model())
