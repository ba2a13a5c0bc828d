"""Training through three stages beside one process, undisturbed and through a loss, and in virtual
time.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.ours.serving.random_model import VOCABULARY, save_random_base
from benchmarks.ours.stages.trained_ring import TrainedRing, random_rows
from benchmarks.ours.stages.virtual_training import StageLoss, StageTimes, VirtualTraining
from coordinator.core.rings.training_ring import RingPlan, window_of
from hypergpu.rings.ring_training import RingTraining
from hypergpu.workloads.finetuning.adapters import AdaptedModule, AdapterPlan
from hypergpu.workloads.finetuning.base_model import LoadedBase

_LAYERS = 6
_BOUNDS = (0, 2, 4, _LAYERS)
_FORWARD_US = _BACKWARD_US = 20_000.0
_MICRO_BATCHES, _STEPS = 64, 10
TRAINING = RingTraining(
    rounds=3,
    inner_steps=2,
    batch_rows=8,
    micro_rows=2,
    rank=8,
    learning_rate=1e-2,
    clip_norm=1.0,
    gradient_codec="float32",
)
_PLAN = RingPlan(TRAINING.steps, TRAINING.micro_batches, TRAINING.inner_steps, TRAINING.clip_norm)


def gradient_error(whole: Any) -> float:
    """Largest difference of a gradient through three stages from peft's on the whole model,
    relative to the largest value of its tensor.
    """
    rows = random_rows(TRAINING.batch_rows, VOCABULARY)
    ring = TrainedRing(whole, _BOUNDS, TRAINING, lambda _: rows)
    for number in range(TRAINING.micro_batches):
        for stage in range(3):
            ring.forward(stage, 0, number)
        for stage in (1, 0):
            ring.backward(stage, number)
    model = AutoModelForCausalLM.from_config(whole.config)
    model.load_state_dict(whole.state_dict())
    plan = AdapterPlan("b", TRAINING.rank, TRAINING.alpha, TRAINING.targets, 0)
    adapted_model = AdaptedModule(LoadedBase(model, ()), plan, "0" * 64)
    token_count = sum(row.counted_tokens for row in rows)
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
        labels = torch.from_numpy(row.labels.astype(np.int64))[1:]
        logits = adapted_model(input_ids=tokens)[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / token_count
        loss.backward()  # type: ignore[no-untyped-call]
    peft_gradients = {
        name: parameter.grad
        for name, parameter in adapted_model.adapted.named_parameters()
        if parameter.grad is not None
    }
    return max(
        float((gradient - peft_gradients[name]).abs().max() / peft_gradients[name].abs().max())
        for name, gradient in ring.gradients().items()
    )


def replay_bits_differ(whole: Any) -> tuple[int, int]:
    """Trained values that differ after a stage was lost within a step, and steps that were
    computed again.
    """
    values = list[Mapping[str, torch.Tensor]]()
    replayed_steps = 0
    rows = random_rows(TRAINING.batch_rows, VOCABULARY)
    for losses in ((), (StageLoss(900.0, 1, 200.0),)):
        ring = TrainedRing(whole, _BOUNDS, TRAINING, lambda _: rows)
        driver = VirtualTraining(_PLAN, [StageTimes(20.0, 20.0, 5.0)] * 3, 4, ring)
        driver.run(losses)
        replayed_steps = driver.replayed_steps
        values.append(ring.values())
    if not replayed_steps:
        raise ValueError("the stage was lost at a time at which nothing had to be done again")
    before, after = values
    differing_count = sum(int((before[name] != after[name]).sum()) for name in before)
    return differing_count, replayed_steps


def train_over_ideal(one_way_ms: float) -> float:
    """Micro-batches a second of three stages over those of a stage without any way to it.

    Args:
        one_way_ms: From a stage to the next, through the driver: two legs.
    """
    leg_us = 500.0 * one_way_ms
    times = [StageTimes(_FORWARD_US, _BACKWARD_US, leg_us)] * 3
    window = window_of([_FORWARD_US + _BACKWARD_US] * 3, [leg_us] * 3)
    plan = RingPlan(_STEPS, _MICRO_BATCHES, _STEPS)
    took_us = VirtualTraining(plan, times, window).run()
    return _STEPS * _MICRO_BATCHES * (_FORWARD_US + _BACKWARD_US) / took_us


def random_whole(scratch: Path) -> Any:
    """A model of six layers with random weights, in float32 and one thread."""
    torch.set_num_threads(1)
    base = save_random_base(scratch / "base", width=64, layers=_LAYERS)
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def exact_figures() -> tuple[float, int, int]:
    """`gradient_error`, and both of `replay_bits_differ`."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = random_whole(Path(scratch))
        return gradient_error(whole), *replay_bits_differ(whole)
