"""Learning among liars, through the product's codec, admission, sketches, weighing and fold."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.ours.trust.attacks import ATTACKS, NONE, POISONS, RoundView
from benchmarks.ours.trust.outcome import Outcome, Setting
from benchmarks.ours.trust.simulated import Machinery, train_job
from benchmarks.ours.trust.training import (
    BATCH,
    LEARNING_RATE,
    NODES,
    WEIGHT_DECAY,
    NodeShards,
    Poison,
    Rows,
    TrainingNodes,
    digits_workload,
    held_out_parts,
)
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, OptimizerState
from hypergpu.optimizer import OptimizerRule
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes
from hypergpu.workloads.networks.task import Device, module_initial

ROUNDS = 16
POINTS = 8.0
"""What two liars in five may cost."""
ALIE = "ALIE 3"

Train = Callable[[str, str], Outcome]


def alie(view: RoundView) -> Rows:
    """A little is enough (arXiv:1902.06156): a shift by the spread of each coordinate."""
    forged_rows = view.mean - np.float32(3) * view.honest.std(axis=0)
    return view.spread(forged_rows)


@pytest.fixture(scope="module")
def machinery() -> Machinery:
    """Workload and attacks."""
    torch.set_num_threads(1)
    workload = digits_workload()
    return Machinery(workload, held_out_parts(workload), {**ATTACKS, ALIE: alie})


@pytest.fixture(scope="module")
def train(machinery: Machinery, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train one job on even data with one seed; the same one once only."""

    @cache
    def outcome_of(rule: str, attack: str) -> Outcome:
        folder = tmp_path_factory.mktemp("job")
        setting = Setting(rule, attack, 40, "inf", 1)
        return train_job(machinery, setting, folder, rounds=ROUNDS)

    return outcome_of


def test_two_liars_in_five_cost_less_than_eight_points(train: Train) -> None:
    clean = train("robust", NONE).accuracy
    assert clean > 90
    assert clean - train("robust", "flip x10").accuracy < POINTS
    assert clean - train("robust", ALIE).accuracy < POINTS


def test_the_plain_mean_fails_the_same_check(train: Train) -> None:
    assert train("robust", NONE).accuracy - train("mean", "flip x10").accuracy > POINTS


def test_values_near_the_largest_float_stop_nothing(train: Train) -> None:
    outcome = train("robust", "huge")
    assert outcome.accuracy > 90
    assert outcome.attackers_pay == 0


def test_all_nodes_at_once_train_as_the_worker_trains_one(machinery: Machinery) -> None:
    layout, base = machinery.parts.trial.layout, machinery.parts.trial.initial(3)
    shards = NodeShards(machinery.workload, 0.5, 3)
    nodes = TrainingNodes(machinery.workload, shards, range(NODES))
    trainer = TorchTrainer(
        machinery.workload,
        Device("cpu", "CPU", Bytes(0), has_bf16=False),
        machinery.workload.load("").train,
    )
    kept_state: OptimizerState | None = None
    for number in range(2):
        updates = nodes.train(layout, base, number)
        trainer.begin(InitialState(base, 3, kept_state, OptimizerRule(weight_decay=WEIGHT_DECAY)))
        chosen_indices = shards.indices(4, number)
        for start in range(0, len(chosen_indices), BATCH):
            trainer.step(chosen_indices[start : start + BATCH], LEARNING_RATE)
        after, kept_state = Flat.empty(layout), trainer.optimizer()
        trainer.store(after)
        np.testing.assert_allclose(updates[4], base.parameters - after.parameters, atol=1e-6)


def test_poisoned_data_change_the_liars_updates_alone(machinery: Machinery) -> None:
    layout, base = machinery.parts.trial.layout, machinery.parts.trial.initial(3)
    shards = NodeShards(machinery.workload, 0.0, 3)

    def train(poison: Poison | None) -> Rows:
        nodes = TrainingNodes(machinery.workload, shards, range(NODES))
        return nodes.train(layout, base, 0, poison, liars=[4])

    honest = train(None)
    for poison in POISONS.values():
        differs = (honest != train(poison)).any(axis=1)
        assert np.flatnonzero(differs).tolist() == [4]


def test_nodes_that_do_not_train_change_no_other_update(machinery: Machinery) -> None:
    layout, base = machinery.parts.trial.layout, machinery.parts.trial.initial(3)
    shards = NodeShards(machinery.workload, 0.5, 3)
    every = TrainingNodes(machinery.workload, shards, range(NODES)).train(layout, base, 0)
    some = TrainingNodes(machinery.workload, shards, [2, 7]).train(layout, base, 0)
    np.testing.assert_allclose(some[[2, 7]], every[[2, 7]], atol=1e-6)
    assert not some[[0, 1, 3]].any()


def test_a_cnn_of_all_nodes_trains_as_the_worker_trains_one() -> None:
    workload = digits_workload("cnn")
    layout, base = held_out_parts(workload).trial.layout, module_initial(workload.model, 3)
    shards = NodeShards(workload, 0.5, 3)
    update = TrainingNodes(workload, shards, range(NODES)).train(layout, base, 0)[4]
    device = Device("cpu", "CPU", Bytes(0), has_bf16=False)
    trainer = TorchTrainer(workload, device, workload.load("").train)
    trainer.begin(InitialState(base, 3, None, OptimizerRule(weight_decay=WEIGHT_DECAY)))
    chosen_indices = shards.indices(4, 0)
    for start in range(0, len(chosen_indices), BATCH):
        trainer.step(chosen_indices[start : start + BATCH], LEARNING_RATE)
    after = Flat.empty(layout)
    trainer.store(after)
    np.testing.assert_allclose(update, base.parameters - after.parameters, atol=1e-5)
