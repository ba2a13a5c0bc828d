"""Workloads by name, their options, and the networks that they train."""

import subprocess
import sys
from typing import cast

import numpy as np
import pytest
import torch

from hypergpu.tensors.layout import Flat
from hypergpu.workloads.built_in import BUILT_IN
from hypergpu.workloads.entry import Option, OptionError, Options, WorkloadEntry, complete_options
from hypergpu.workloads.networks.task import TorchWorkload, load_module, module_layout, store_module
from hypergpu.workloads.registry import UnknownWorkloadError, build, find
from hypergpu.workloads.workload import JobWorkload

SMALL = {
    "text-gpt": {"width": 16, "layers": 2, "heads": 2, "block_length": 16},
    "imagefolder-resnet18": {"classes": 2, "image_size": 32},
    "imagefolder-vgg11": {"classes": 2, "image_size": 32},
}
INPUTS = {
    "digits-mlp": torch.zeros(2, 64),
    "digits-cnn": torch.zeros(2, 64),
    "text-gpt": torch.zeros(2, 16, dtype=torch.uint8),
    "mnist-cnn": torch.zeros(2, 1, 28, 28, dtype=torch.uint8),
    "cifar10-resnet18": torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
    "cifar10-vgg11": torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
    "imagefolder-resnet18": torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
    "imagefolder-vgg11": torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
}


def build_small(name: str) -> TorchWorkload:
    return cast(TorchWorkload, build(find(name), SMALL.get(name, {})))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", INPUTS)
def test_a_network_has_a_loss_with_a_gradient_for_every_parameter(name: str) -> None:
    workload, inputs = build_small(name), INPUTS[name]
    targets = inputs if name == "text-gpt" else torch.tensor([0, 1])
    model = workload.model()
    loss = workload.loss(model, inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", INPUTS)
def test_evaluating_adds_up_over_samples(name: str) -> None:
    workload, inputs = build_small(name), INPUTS[name]
    targets = inputs if name == "text-gpt" else torch.tensor([0, 1])
    model = workload.model().eval()
    with torch.inference_mode():
        whole = workload.evaluate(model, inputs, targets)
        parts = [workload.evaluate(model, inputs[i : i + 1], targets[i : i + 1]) for i in (0, 1)]
    joint_sums = parts[0].plus(parts[1])
    assert (joint_sums.score, joint_sums.samples) == (whole.score, whole.samples)
    assert joint_sums.loss == pytest.approx(whole.loss, rel=1e-4)


def test_flat_vectors_bring_every_tensor_back() -> None:
    workload = build_small("cifar10-resnet18")
    torch.manual_seed(1)
    model, other = workload.model(), workload.model()
    model(torch.randn(4, 3, 32, 32))
    layout = module_layout(model)
    flat = Flat.empty(layout)
    store_module(model, layout, flat)
    load_module(other, layout, flat)
    for (name, kept_tensor), loaded_tensor in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(kept_tensor, loaded_tensor), name


def test_a_byte_is_predicted_from_those_before_it_alone() -> None:
    torch.manual_seed(0)
    model = build_small("text-gpt").model().eval()
    first = torch.arange(16)[None]
    second = first.clone()
    second[0, 10:] = 99
    with torch.inference_mode():
        difference = (model(first) - model(second)).abs().amax(dim=2)[0]
    assert float(difference[:10].max()) == 0
    assert float(difference[10:].min()) > 0


def test_augmented_images_differ_only_by_the_generator_s_draw() -> None:
    workload = build_small("cifar10-vgg11")
    images = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32) % 251
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        model = workload.model().eval()
        torch.manual_seed(seed)
        losses.append(float(workload.loss(model, images, torch.tensor([0, 1])).detach()))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("text-gpt", {"width": 10, "heads": 4}, "heads must divide width"),
        ("text-mixture", {"held_experts": 9}, "held_experts must be at most experts"),
        (
            "text-mixture",
            {"held_experts": 1, "experts_per_token": 2},
            "experts_per_token must be at most held_experts",
        ),
        ("text-mixture", {"experts": 1}, "experts_per_token must be at most experts"),
        ("digits-cnn", {"channels": 30}, "it must be a multiple of 4"),
        ("mnist-cnn", {"channels": 30}, "it must be a multiple of 4"),
    ],
)
def test_options_that_cannot_go_together_say_so(
    name: str, options: dict[str, int], text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        build(find(name), options)


def test_the_mlp_learns_the_digits() -> None:
    workload = build_small("digits-mlp")
    torch.manual_seed(0)
    model = workload.model()
    dataset = workload.load("")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(200):
        batch = dataset.train.batch(np.arange(step * 32, step * 32 + 32) % 1442)
        inputs, targets = (torch.from_numpy(array) for array in batch)
        optimizer.zero_grad()
        workload.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    inputs, targets = (torch.from_numpy(array) for array in dataset.test.batch(np.arange(355)))
    with torch.inference_mode():
        assert workload.evaluate(model.eval(), inputs, targets).metric("accuracy") > 0.9


ENTRY = WorkloadEntry(
    name="toy",
    version=1,
    kind="numpy",
    dataset="toys",
    metric="accuracy",
    meaning="",
    builder="nowhere:build",
    options=(
        Option("width", 8, "", 4, 16),
        Option("rate", 0.5, "", 0.0, 1.0),
        Option("augment", default=True, meaning=""),
    ),
)


def test_what_is_not_given_takes_its_default() -> None:
    assert complete_options(ENTRY, {"width": 16}) == {
        "width": 16,
        "rate": 0.5,
        "augment": True,
    }


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"widht": 8},
            "options.widht: toy has no such option; it has: width, rate, augment",
        ),
        ({"width": 3}, "options.width of toy is 3; it must be at least 4"),
        ({"width": 17}, "options.width of toy is 17; it must be at most 16"),
        ({"width": "8"}, "options.width of toy is '8', a str; it must be a int, such as 8"),
        ({"width": True}, "options.width of toy is True, a bool; it must be a int, such as 8"),
        ({"augment": 1}, "options.augment of toy is 1, a int; it must be a bool, such as True"),
        ({"rate": float("nan")}, "options.rate of toy is not a number"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(given: Options, text: str) -> None:
    with pytest.raises(OptionError) as failure:
        complete_options(ENTRY, given)
    assert str(failure.value) == text


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        UnknownWorkloadError, match="there is no workload 'mnsit'; there are: digits"
    ):
        find("mnsit")


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_defaults_satisfy_their_own_limits(entry: WorkloadEntry) -> None:
    defaults = {option.name: option.default for option in entry.options}
    assert complete_options(entry, defaults) == defaults
    switches = {name: not value for name, value in defaults.items() if isinstance(value, bool)}
    assert complete_options(entry, switches) == {**defaults, **switches}


@pytest.mark.parametrize(
    "name", [entry.name for entry in BUILT_IN if entry.name not in {"null", "program"}]
)
def test_every_entry_builds(name: str) -> None:
    workload = build(find(name), {})
    assert callable(workload.for_job if isinstance(workload, JobWorkload) else workload.load)


def test_the_catalogue_is_read_without_torch() -> None:
    program = (
        "import sys; from hypergpu.workloads.registry import entries; entries();"
        "sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
