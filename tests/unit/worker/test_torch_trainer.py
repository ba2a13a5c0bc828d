import numpy as np
import pytest
import torch
from torch import nn

from gpu_node.shell.worker.torch_trainer import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes
from hypergpu.workloads.networks.device import Device, chosen_device
from hypergpu.workloads.networks.task import Classification
from hypergpu.workloads.networks.tensors import store_module
from hypergpu.workloads.workload import ArraySamples, Dataset

CPU = Device("cpu", "CPU", Bytes(0), has_bf16=False)
INPUTS = np.linspace(-1, 3, 64, dtype=np.float32).reshape(16, 4)
LABELS = np.arange(16, dtype=np.int64) % 2
SAMPLES = ArraySamples(INPUTS, LABELS, LABELS)


def normalising_module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


@pytest.fixture
def trainer() -> TorchTrainer:
    torch.set_num_threads(1)
    workload = Classification(normalising_module, lambda _: Dataset(SAMPLES, SAMPLES))
    return TorchTrainer(workload, CPU, SAMPLES)


def first_model(trainer: TorchTrainer) -> Flat:
    torch.manual_seed(0)
    flat = Flat.empty(trainer.layout)
    store_module(normalising_module(), trainer.layout, flat)
    return flat


def after(trainer: TorchTrainer, start: InitialState, steps: int) -> Flat:
    trainer.begin(start)
    for _ in range(steps):
        trainer.step(np.arange(8), 1e-2)
    flat = Flat.empty(trainer.layout)
    trainer.store(flat)
    return flat


def test_statistics_and_integers_hold_what_training_made_of_them(trainer: TorchTrainer) -> None:
    flat = after(trainer, InitialState(first_model(trainer), 1, None, 0.0), steps=3)
    assert flat.integers.tolist() == [3]
    assert flat.statistics.size == 12
    assert not np.array_equal(flat.statistics, first_model(trainer).statistics)


def test_a_round_depends_on_nothing_that_was_trained_before_it(trainer: TorchTrainer) -> None:
    start = InitialState(first_model(trainer), 1, None, 0.01)
    first = after(trainer, start, steps=3)
    after(trainer, InitialState(first, 9, None, 0.5), steps=2)
    again = after(trainer, start, steps=3)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_seed_decides_what_the_model_draws(trainer: TorchTrainer) -> None:
    first = after(trainer, InitialState(first_model(trainer), 1, None, 0.0), steps=2)
    other = after(trainer, InitialState(first_model(trainer), 2, None, 0.0), steps=2)
    assert not np.array_equal(first.parameters, other.parameters)


def test_the_optimizer_state_goes_on_where_it_was(trainer: TorchTrainer) -> None:
    middle = after(trainer, InitialState(first_model(trainer), 1, None, 0.01), steps=2)
    kept = {name: array.copy() for name, array in trainer.optimizer().items()}
    resumed = after(trainer, InitialState(middle, 2, kept, 0.01), steps=2)
    fresh = after(trainer, InitialState(middle, 2, None, 0.01), steps=2)
    assert kept["step/0.weight"] == 2
    assert trainer.optimizer()["step/0.weight"] == 2
    assert not np.array_equal(resumed.parameters, fresh.parameters)


def test_the_chosen_device_has_computed_something() -> None:
    device = chosen_device()
    assert device.kind in {"cpu", "cuda", "mps"}
    assert device.memory_bytes > 0
    assert not (device.kind == "cpu" and device.has_bf16)
