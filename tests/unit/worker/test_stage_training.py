"""Training of a tiny model through stages: the bits of one process, also after a loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.ours.stages.trained_ring import (
    TrainedRing,
    forward_request,
    random_rows,
    trained_stage,
)
from benchmarks.ours.stages.virtual_training import (
    StageLoss,
    StageTimes,
    VirtualTraining,
)
from coordinator.core.rings.training_ring import RingPlan
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import LabelledRow
from hypergpu.serving.stage_messages import StageRefused
from hypergpu.serving.training_messages import (
    GiveAdapter,
    TakeAdapter,
    TrainBackward,
    UseAdapter,
)
from hypergpu.workloads.finetuning.adapters import AdaptedModule, AdapterPlan
from hypergpu.workloads.finetuning.base_model import LoadedBase
from tests.tiny_bases import save_base

LAYERS = 4
TRAINING = RingTraining(
    rounds=3,
    inner_steps=2,
    batch_rows=6,
    micro_rows=2,
    rank=4,
    learning_rate=1e-2,
    clip_norm=0.5,
    gradient_codec="float32",
)
PLAN = RingPlan(TRAINING.steps, TRAINING.micro_batches, TRAINING.inner_steps, TRAINING.clip_norm)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    folder: Path = save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def rows(whole: Any) -> list[LabelledRow]:
    return random_rows(TRAINING.batch_rows, whole.config.vocab_size)


def run_ring(
    whole: Any,
    rows: list[LabelledRow],
    bounds: tuple[int, ...],
    losses: tuple[StageLoss, ...] = (),
    **changes: Any,
) -> tuple[TrainedRing, VirtualTraining]:
    codec, held_out = changes.pop("codec", "float32"), changes.pop("held_out", [])
    training = replace(TRAINING, **changes)
    ring = TrainedRing(whole, bounds, training, lambda _: rows, codec, held_out)
    times = [StageTimes(20.0, 20.0, 5.0)] * (len(bounds) - 1)
    plan = replace(PLAN, held_out_batches=-(-len(held_out) // training.micro_rows))
    driver = VirtualTraining(plan, times, 3, ring, store_us=30.0)
    driver.run(losses)
    return ring, driver


def assert_same_bits(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in ours.items())


def test_three_stages_train_the_bits_of_one(whole: Any, rows: list[LabelledRow]) -> None:
    alone, _ = run_ring(whole, rows, (0, LAYERS))
    ring, driver = run_ring(whole, rows, (0, 1, 3, LAYERS))
    assert driver.most_in_flight == 3
    assert_same_bits(ring.values(), alone.values())
    assert ring.losses == alone.losses
    assert ring.losses[5] < ring.losses[0]


def test_rows_that_are_held_out_change_no_bit_and_have_the_loss_of_the_plain_library(
    whole: Any, rows: list[LabelledRow]
) -> None:
    held_out = random_rows(11, whole.config.vocab_size)[-5:]
    bounds = (0, 1, 3, LAYERS)
    alone, _ = run_ring(whole, rows, bounds)
    ring, driver = run_ring(whole, rows, bounds, held_out=held_out)
    assert_same_bits(ring.values(), alone.values())
    assert ring.losses == alone.losses
    lost_ring, _ = run_ring(
        whole, rows, bounds, (StageLoss(driver.now_us * 0.6, 1, 100.0),), held_out=held_out
    )
    assert lost_ring.held_out_sums == ring.held_out_sums
    sums = ring.held_out_sums
    assert list(sums) == [2, 4, 6]
    assert len(set(sums.values())) == 3
    model = peft_model(whole)
    model.load_state_dict({f"adapted.{name}": each for name, each in ring.values().items()}, False)
    with torch.no_grad():
        loss = float(loss_sum(model, held_out))
    assert sums[6] == pytest.approx(loss, rel=1e-6)


def peft_model(whole: Any) -> AdaptedModule:
    """The whole model with an untrained adapter."""
    model = AutoModelForCausalLM.from_config(whole.config)
    model.load_state_dict(whole.state_dict())
    plan = AdapterPlan("b", TRAINING.rank, TRAINING.alpha, TRAINING.targets, 0)
    return AdaptedModule(LoadedBase(model, ()), plan, "0" * 64)


def loss_sum(model: AdaptedModule, rows: list[LabelledRow]) -> torch.Tensor:
    """Loss of all tokens that count."""
    loss = torch.zeros(())
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
        logits = model(input_ids=tokens)[0, :-1]
        targets = torch.from_numpy(row.labels.astype(np.int64))[1:]
        loss = loss + F.cross_entropy(logits, targets, reduction="sum")
    return loss


def test_gradients_are_those_of_the_plain_library(whole: Any, rows: list[LabelledRow]) -> None:
    ring = TrainedRing(whole, (0, 2, LAYERS), TRAINING, lambda _: rows)
    for number in range(TRAINING.micro_batches):
        for stage in (0, 1):
            ring.forward(stage, 0, number)
        ring.backward(0, number)
    adapted_model = peft_model(whole)
    loss = loss_sum(adapted_model, rows) / sum(row.counted_tokens for row in rows)
    loss.backward()  # type: ignore[no-untyped-call]
    assert ring.losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    gradients = ring.gradients()
    peft_gradients = {
        name: parameter.grad
        for name, parameter in adapted_model.adapted.named_parameters()
        if parameter.grad is not None
    }
    assert gradients.keys() == peft_gradients.keys()
    for name, gradient in gradients.items():
        error = (gradient - peft_gradients[name]).abs().max() / peft_gradients[name].abs().max()
        assert float(error) < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_lost_within_a_step_costs_a_round_at_most_and_no_bit(
    whole: Any, rows: list[LabelledRow], stage: int
) -> None:
    bounds = (0, 1, 3, LAYERS)
    whole_ring, driver = run_ring(whole, rows, bounds)
    at_us = driver.now_us * 0.6
    ring, driver = run_ring(whole, rows, bounds, (StageLoss(at_us, stage, 100.0),))
    assert 0 < driver.replayed_steps <= 2 * TRAINING.inner_steps
    assert_same_bits(ring.values(), whole_ring.values())
    assert ring.losses == whole_ring.losses


def test_coded_activations_and_gradients_train_nearly_the_same(
    whole: Any, rows: list[LabelledRow]
) -> None:
    exact, _ = run_ring(whole, rows, (0, 2, LAYERS))
    coded_ring, _ = run_ring(whole, rows, (0, 2, LAYERS), codec="int8o", gradient_codec="int8o")
    assert coded_ring.losses[5] == pytest.approx(exact.losses[5], rel=0.01)
    assert coded_ring.losses != exact.losses


def test_what_does_not_fit_a_stage_is_refused_with_the_reason(
    whole: Any, rows: list[LabelledRow]
) -> None:
    first = trained_stage(whole, LayerSpan(0, 2), TRAINING)
    request, _ = forward_request(rows, 0, TRAINING)
    assert first.perform(request) != first.perform(TrainBackward(micro_batch=1, states=bytes(128)))
    reply = first.perform(TrainBackward(micro_batch=0, states=b"\xff" * 128 * request.rows))
    assert isinstance(reply, StageRefused)
    assert reply.blames_input
    reply = first.perform(TakeAdapter(2, 3, b""))
    assert reply == StageRefused("layer 3 is not here")
    reply = first.perform(TakeAdapter(2, 1, bytes(8)))
    assert isinstance(reply, StageRefused)
    assert "8 bytes, not" in reply.reason
    values = np.full(first.layer_bytes(1) // 4, np.nan, "<f4")
    reply = first.perform(TakeAdapter(2, 1, values.tobytes()))
    assert reply == StageRefused("the adapter of layer 1 is not finite")
    assert not first.perform(UseAdapter(2)).is_there  # type: ignore[union-attr]
    assert first.perform(GiveAdapter(2, 1)).content == b""  # type: ignore[union-attr]


def test_a_head_that_is_the_embedding_is_trained_beside_in_stages(
    tmp_path: Path, rows: list[LabelledRow]
) -> None:
    folder = save_base(tmp_path, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    tied_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    alone, _ = run_ring(tied_model, rows, (0, LAYERS))
    ring, _ = run_ring(tied_model, rows, (0, 1, 3, LAYERS))
    assert_same_bits(ring.values(), alone.values())
    assert ring.losses == alone.losses
