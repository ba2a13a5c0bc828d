"""The optimizers of workers, against torch's own classes and each other."""

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import nn

from gpu_node.shell.worker.flat_optimizer import FlatOptimizer
from gpu_node.shell.worker.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.torch_muon import orthogonal
from gpu_node.shell.worker.torch_optimizer import TorchOptimizer
from gpu_node.shell.worker.trainer import InitialState, ShardError
from hypergpu.jobfile.spec import Inner
from hypergpu.optimizer import OptimizerRule, pass_sizes, schedule_share
from hypergpu.tensors.codec import decode_parameters, encode_update
from hypergpu.tensors.layout import Flat, unpack
from hypergpu.workloads.networks.task import Device, load_module, module_initial, module_layout
from hypergpu.workloads.registry import build, find

RULES = {
    "adamw": OptimizerRule(weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6),
    "adamw-matrices": OptimizerRule(weight_decay=0.5, decay_scope="matrices"),
    "sgd": OptimizerRule(name="sgd"),
    "sgd-momentum": OptimizerRule(name="sgd", momentum=0.9, weight_decay=0.01),
    "clip": OptimizerRule(name="sgd", momentum=0.5, clip_norm=0.1),
    "muon": Inner(optimizer="muon", weight_decay=0.1).rule,
    "muon-ratio": Inner(optimizer="muon", momentum=0.8, muon_ratio=4.0, clip_norm=0.5).rule,
}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
RATE = 0.05
HIDDEN = ("0.weight", "2.weight", "4.weight")
"""Hidden weights of `module`."""


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)
    )


def set_gradients(model: nn.Module, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=dice)


class ReferenceMuon:
    """Torch's Muon and AdamW beside each other, on the parameters that each has of `module`."""

    def __init__(self, model: nn.Module, rule: OptimizerRule) -> None:
        hidden_parameters = [model.get_parameter(name) for name in HIDDEN]
        others = [each for name, each in model.named_parameters() if name not in HIDDEN]
        self._muon = torch.optim.Muon(
            hidden_parameters,
            lr=RATE * rule.hidden_ratio,
            weight_decay=rule.weight_decay,
            momentum=rule.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = reference_optimizer(nn.ParameterList(others), replace(rule, name="adamw"))

    def step(self) -> None:
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()


def reference_optimizer(
    model: nn.Module, rule: OptimizerRule
) -> torch.optim.Optimizer | ReferenceMuon:
    """Torch's own class for a rule."""
    if rule.name == "muon":
        return ReferenceMuon(model, rule)
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
    for (name, mine), expected_tensor in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        # Torch iterates in bfloat16, of which eight bits are exact.
        is_coarse = rule.name == "muon" and name in HIDDEN
        atol = 0.03 * RATE * rule.hidden_ratio if is_coarse else 1e-7
        torch.testing.assert_close(mine, expected_tensor, rtol=1e-6, atol=atol)


@by_rule
def test_numpys_step_is_torchs(rule: OptimizerRule) -> None:
    model = module()
    layout = module_layout(model)
    flat, gradient = Flat.empty(layout), np.empty(layout.parameters_count, np.float32)
    tensors = [parameter for _, parameter in sorted(model.named_parameters())]
    flat.parameters[:] = np.concatenate([each.detach().numpy().ravel() for each in tensors])
    optimizer = TorchOptimizer(model, torch.device("cpu"))
    numpys = FlatOptimizer(layout, frozenset(HIDDEN))
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


def test_muon_is_torchs_on_a_real_batch_but_for_the_format_of_its_numbers() -> None:
    trainer, rule = torch_trainer(), Inner(optimizer="muon", weight_decay=0.0).rule
    before, after = Flat.empty(trainer.layout), Flat.empty(trainer.layout)
    before.parameters[:] = module_initial(build(find("digits-cnn"), {}).model, 3).parameters
    trainer.begin(InitialState(before, 1, None, rule))
    trainer.step(np.arange(32), RATE)
    trainer.store(after)
    tensors_after = unpack(trainer.layout, after)
    workload = build(find("digits-cnn"), {})
    model, hidden_names = workload.model(), ("4.weight", "7.weight", "12.weight")
    load_module(model, trainer.layout, before)
    workload.loss(model, *map(torch.from_numpy, trainer.samples.batch(np.arange(32)))).backward()
    for name in hidden_names:
        weight = model.get_parameter(name)
        gradient = weight.grad
        assert gradient is not None
        matrix = nn.Parameter(weight.detach().flatten(1).clone())
        matrix.grad = gradient.flatten(1)
        start = matrix.detach().clone()
        muon = torch.optim.Muon([matrix], lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        muon.step()  # type: ignore[no-untyped-call]
        theirs = (matrix.detach() - start).numpy().ravel()
        ours = tensors_after[name].ravel() - weight.detach().numpy().ravel()
        likeness = ours @ theirs / (np.linalg.norm(ours) * np.linalg.norm(theirs))
        assert likeness > 0.98  # the smallest singular values are below bfloat16's rounding
        assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(theirs), rel=0.03)
        # As AdamW's at most: fewer where a gradient's rank is lower than the weight's.
        assert np.sqrt(np.mean(ours**2)) < 0.3 * RATE


def test_muons_iteration_is_its_polynomial_of_the_singular_values() -> None:
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    left_vectors, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / matrix.double().norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected_matrix = (left_vectors * values @ right).float()
    torch.testing.assert_close(orthogonal(matrix[None])[0], expected_matrix, rtol=0, atol=2e-5)
    torch.testing.assert_close(
        orthogonal(matrix.mT[None])[0], expected_matrix.mT, rtol=0, atol=2e-5
    )


def test_muons_update_is_nearly_orthogonal_whatever_the_gradients_length() -> None:
    dice = torch.Generator().manual_seed(0)
    matrices = (
        torch.randn(3, 12, 20, generator=dice) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
    )
    for group in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonal(group))
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.25
    assert not orthogonal(torch.zeros(1, 4, 4)).any()


def test_muon_leaves_half_the_state_of_adamw_for_hidden_weights() -> None:
    model = module()
    optimizer = TorchOptimizer(model, torch.device("cpu"))
    optimizer.begin(Inner(optimizer="muon").rule, None)
    set_gradients(model, 0)
    optimizer.step(RATE)
    names = [name for name in optimizer.state() if name.endswith("/2.weight")]
    assert names == ["momentum/2.weight"]
    assert {name.partition("/")[0] for name in optimizer.state() if name.endswith("/5.weight")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


def shard_of(trainer: TorchTrainer, rule: OptimizerRule, start: int) -> NDArray[np.float32]:
    """The pseudo-gradient of twenty steps from the workload's first model."""
    first = module_initial(build(find("digits-cnn"), {}).model, 3)
    end = Flat.empty(trainer.layout)
    trainer.begin(InitialState(first, 1, None, rule))
    for step in range(20):
        trainer.step(start + 16 * step + np.arange(16), 1e-3)
    trainer.store(end)
    return first.parameters - end.parameters


def likeness(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_two_trainings_of_a_shard_by_muon_are_alike_and_of_two_shards_are_not(codec: str) -> None:
    trainer = torch_trainer()
    # Another order of sums, as on another kind of processor.
    rules = [Inner(optimizer="muon", micro_batch=passes).rule for passes in (0, 5)]
    updates = [shard_of(trainer, rules[0], 0), shard_of(trainer, rules[1], 0)]
    updates.append(shard_of(trainer, rules[0], 700))
    decoded_updates = []
    for update in updates:
        flat = Flat.empty(trainer.layout)._replace(parameters=update)
        payload = encode_update(trainer.layout, codec, flat).payload
        decoded_updates.append(decode_parameters(trainer.layout, codec, payload.tobytes()))
    assert likeness(decoded_updates[0], decoded_updates[1]) >= 0.99
    assert likeness(decoded_updates[0], decoded_updates[2]) < 0.7


def torch_trainer() -> TorchTrainer:
    workload = build(find("digits-cnn"), {})
    return TorchTrainer(workload, Device("cpu", "", 0, False), workload.load("").train)  # type: ignore[arg-type]


def numpy_trainer() -> NumpyTrainer:
    workload = build(find("digits-softmax"), {})
    return NumpyTrainer(workload, workload.load("").train)


@pytest.mark.parametrize("make", [torch_trainer, numpy_trainer])
@pytest.mark.parametrize("micro_batch", [1, 5, 16, 24, 30])
@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_micro_batches_give_the_step_of_the_whole_batch(
    make: object, micro_batch: int, name: str
) -> None:
    trainer = make()  # type: ignore[operator]
    first, indices = Flat.empty(trainer.layout), np.arange(24)
    first.parameters[:] = 0.01 * np.random.default_rng(0).standard_normal(first.parameters.size)
    ends, losses = [], []
    for size in (0, micro_batch):
        rule = Inner(optimizer=name, micro_batch=size, epsilon=0.1).rule
        trainer.begin(InitialState(first, 1, None, rule))
        losses.append(float(trainer.step(indices, RATE)))
        end = Flat.empty(trainer.layout)
        trainer.store(end)
        ends.append(end.parameters.copy())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # Muon makes small singular values as large as the others, and their rounding with them.
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-4, atol=1e-5 if name == "muon" else 1e-6)


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
    rule = msgspec.structs.replace(OptimizerRule(), name="lion")
    with pytest.raises(ShardError, match="no optimizer 'lion' here"):
        trainer.begin(InitialState(Flat.empty(trainer.layout), 0, None, rule))
