"""The optimizers of workers, against torch's own classes and each other."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from gpu_node.shell.worker.flat_optimizer import FlatOptimizer
from gpu_node.shell.worker.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.torch_optimizer import TorchOptimizer
from gpu_node.shell.worker.trainer import InitialState, ShardError
from hypergpu.optimizer import OptimizerRule, pass_sizes, schedule_share
from hypergpu.tensors.layout import Flat
from hypergpu.workloads.networks.task import Device, module_layout
from hypergpu.workloads.registry import build, find

RULES = {
    "adamw": OptimizerRule(weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6),
    "adamw-matrices": OptimizerRule(weight_decay=0.5, decay_scope="matrices"),
    "sgd": OptimizerRule(name="sgd"),
    "sgd-momentum": OptimizerRule(name="sgd", momentum=0.9, weight_decay=0.01),
    "clip": OptimizerRule(name="sgd", momentum=0.5, clip_norm=0.1),
}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
RATE = 0.05


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def set_gradients(model: nn.Module, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=dice)


def reference_optimizer(model: nn.Module, rule: OptimizerRule) -> torch.optim.Optimizer:
    """Torch's own class for a rule."""
    tensors, groups = list(model.parameters()), []
    if rule.decay_scope == "matrices":
        groups = [{"params": [each for each in tensors if each.ndim < 2], "weight_decay": 0.0}]
        tensors = [each for each in tensors if each.ndim >= 2]
    groups.append({"params": tensors, "weight_decay": rule.weight_decay})
    if rule.name == "sgd":
        return torch.optim.SGD(groups, lr=RATE, momentum=rule.momentum)
    return torch.optim.AdamW(groups, lr=RATE, betas=(rule.beta1, rule.beta2), eps=rule.epsilon)


@by_rule
def test_a_step_is_that_of_torchs_class_also_after_its_state_was_stored(
    rule: OptimizerRule,
) -> None:
    ours, theirs = module(), module()
    optimizer, reference = (
        TorchOptimizer(ours, torch.device("cpu")),
        reference_optimizer(theirs, rule),
    )
    optimizer.begin(rule, None)
    for seed in range(6):
        if seed == 3:
            kept_state = {name: array.copy() for name, array in optimizer.state().items()}
            optimizer = TorchOptimizer(ours, torch.device("cpu"))
            optimizer.begin(rule, kept_state)
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        if rule.clip_norm:
            nn.utils.clip_grad_norm_(theirs.parameters(), rule.clip_norm)
        optimizer.step(RATE)
        reference.step()
    for mine, expected_tensor in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected_tensor, rtol=1e-6, atol=1e-7)


@by_rule
def test_numpys_step_is_torchs(rule: OptimizerRule) -> None:
    model = module()
    layout = module_layout(model)
    flat, gradient = Flat.empty(layout), np.empty(layout.parameters_count, np.float32)
    tensors = [parameter for _, parameter in sorted(model.named_parameters())]
    flat.parameters[:] = np.concatenate([each.detach().numpy().ravel() for each in tensors])
    optimizer, numpys = TorchOptimizer(model, torch.device("cpu")), FlatOptimizer(layout)
    optimizer.begin(rule, None)
    numpys.begin(rule, None)
    for seed in range(4):
        set_gradients(model, seed)
        gradient[:] = np.concatenate(
            [each.grad.numpy().ravel() for each in tensors if each.grad is not None]
        )
        optimizer.step(RATE)
        numpys.step(flat.parameters, gradient, RATE)
    after = np.concatenate([each.detach().numpy().ravel() for each in tensors])
    np.testing.assert_allclose(flat.parameters, after, rtol=2e-5, atol=2e-6)


def torch_trainer() -> TorchTrainer:
    workload = build(find("digits-cnn"), {})
    return TorchTrainer(workload, Device("cpu", "", 0, False), workload.load("").train)  # type: ignore[arg-type]


def numpy_trainer() -> NumpyTrainer:
    workload = build(find("digits-softmax"), {})
    return NumpyTrainer(workload, workload.load("").train)


@pytest.mark.parametrize("make", [torch_trainer, numpy_trainer])
@pytest.mark.parametrize("micro_batch", [1, 5, 16, 24, 30])
def test_micro_batches_give_the_step_of_the_whole_batch(make: object, micro_batch: int) -> None:
    trainer = make()  # type: ignore[operator]
    first, indices = Flat.empty(trainer.layout), np.arange(24)
    first.parameters[:] = 0.01 * np.random.default_rng(0).standard_normal(first.parameters.size)
    ends, losses = [], []
    for size in (0, micro_batch):
        rule = OptimizerRule(name="sgd", micro_batch=size)
        trainer.begin(InitialState(first, 1, None, rule))
        losses.append(float(trainer.step(indices, RATE)))
        end = Flat.empty(trainer.layout)
        trainer.store(end)
        ends.append(end.parameters.copy())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-4, atol=1e-6)


def test_passes_are_as_few_and_as_even_as_they_can_be() -> None:
    assert pass_sizes(24, 0) == [24] == pass_sizes(24, 24) == pass_sizes(24, 99)
    assert pass_sizes(24, 10) == [8, 8, 8]
    assert pass_sizes(25, 10) == [9, 8, 8]


def test_no_pass_is_smaller_than_a_module_can_take() -> None:
    assert pass_sizes(9, 1, smallest=2) == [3, 2, 2, 2]
    assert pass_sizes(9, 2, smallest=2) == [3, 2, 2, 2]
    assert pass_sizes(9, 5, smallest=2) == [5, 4]
    assert pass_sizes(1, 1, smallest=2) == [1]


def test_passes_are_as_many_as_the_micro_batch_needs() -> None:
    assert pass_sizes(25, 10) == [9, 8, 8]
    assert pass_sizes(3, 1) == [1, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [("constant", (1, 1, 1, 1)), ("linear", (1, 0.5, 0, 0)), ("cosine", (1, 0.5, 0, 0))],
)
def test_schedules_end_where_the_samples_do(schedule: str, shares: tuple[float, ...]) -> None:
    schedule_shares = [schedule_share(schedule, progress) for progress in (0, 0.5, 1, 1.5)]
    assert schedule_shares == pytest.approx(shares)


@pytest.mark.parametrize("make", [torch_trainer, numpy_trainer])
def test_an_optimizer_of_a_newer_version_is_refused(make: object) -> None:
    trainer = make()  # type: ignore[operator]
    rule = msgspec.structs.replace(OptimizerRule(), name="muon")
    with pytest.raises(ShardError, match="no optimizer 'muon' here"):
        trainer.begin(InitialState(Flat.empty(trainer.layout), 0, None, rule))
