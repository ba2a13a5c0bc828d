"""Stages of a ring that trained in one process: a checker computes them with base and adapter."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.ours.stages.checked_stages import (
    CPU,
    NOBODY,
    CheckedStages,
    SourceLayers,
    comparison,
    conversation,
    given_rows,
    whole_model,
)
from coordinator.core.serving.stage_honesty import DISTANCE_MOST
from gpu_node.shell.worker.serving.adapter_values import AdapterValues
from gpu_node.shell.worker.serving.loaded_stage import LoadedStage
from gpu_node.shell.worker.serving.stage_check import StageChecker
from gpu_node.shell.worker.serving.stage_training import StageTraining
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_adapter import trained_values
from hypergpu.rings.ring_training import RingTraining
from hypergpu.serving.check_messages import RecomputeStage, TakeAdapterValues, TakeStates
from hypergpu.serving.stage_messages import StageRefused, StageRows
from hypergpu.serving.training_messages import AdapterKept, GiveAdapter, KeepAdapter
from hypergpu.tensors.hidden_states import state_codec
from hypergpu.units import Bytes
from hypergpu.workloads.slices.layer_slice import SliceError
from tests.tiny_bases import save_base

LAYERS, STAGES, PROMPT, ANSWER = 6, 3, 12, 8
PLACE = 1
PART_BYTES = 1_000
"""So that each layer has several."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = whole_model(save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS))
    torch.manual_seed(3)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:  # As random models are made, their layers change next to nothing.
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def training_of(mode: str = "b") -> RingTraining:
    return RingTraining(
        rounds=1, inner_steps=2, batch_rows=1, rank=4, learning_rate=0.05, mode=mode
    )


def trained_stage(whole: Any, training: RingTraining, place: int) -> LoadedStage:
    """A stage whose adapter is far from what it began with."""
    stage = CheckedStages(whole, STAGES).stage(place)
    stage.training = StageTraining(stage.layer_slice, CPU, state_codec("float32"), training)
    for layer, tensors in stage.training.adapter.layers.items():
        count = sum(each.parameter.numel() for each in tensors)
        values = np.random.default_rng(layer).normal(0, 0.3, count).astype(np.float32)
        stage.training.adapter.set_layer(layer, values)
    stage.training.perform(KeepAdapter(2))
    return stage


def checker_of(whole: Any, training: RingTraining, held_place: int) -> StageChecker:
    """A node that stands by, as it is before it was given an adapter."""
    own_stage = CheckedStages(whole, STAGES).stage(held_place)
    own_stage.training = StageTraining(own_stage.layer_slice, CPU, state_codec("float32"), training)
    return StageChecker(own_stage, SourceLayers(whole, torch.float32))


def give_adapter(checker: StageChecker, stage: LoadedStage) -> None:
    """What the coordinator does with the blobs of the newest round."""
    assert stage.training is not None
    span = stage.layer_slice.span
    for layer in range(span.first, span.end):
        kept_adapter = stage.training.perform(GiveAdapter(2, layer))
        assert isinstance(kept_adapter, AdapterKept)
        values = trained_values(kept_adapter.content)
        for start in range(0, len(values), PART_BYTES):
            part = values[start : start + PART_BYTES]
            assert checker.take_adapter(TakeAdapterValues(layer, start, part)) == StageRows()


def distance_of(whole: Any, stage: LoadedStage, checker: StageChecker) -> int:
    """How far a stage is from what a checker computes."""
    stages = CheckedStages(whole, STAGES)
    tokens = conversation(random.Random(5), 200, PROMPT, ANSWER)
    states = given_rows(stages.stage(0), tokens, b"", PROMPT)
    sent_states = given_rows(stage, tokens, states, PROMPT)
    return comparison(checker, stages.spans[PLACE], tokens, states, sent_states).distance_ppm


@pytest.mark.parametrize("mode", ["b", "full"])
@pytest.mark.parametrize("held_place", [0, PLACE])
def test_a_stage_with_its_adapter_is_right_and_one_that_leaves_it_out_is_found(
    whole: Any, held_place: int, mode: str
) -> None:
    training = training_of(mode)
    stage = trained_stage(whole, training, PLACE)
    checker = checker_of(whole, training, held_place)
    give_adapter(checker, stage)
    assert distance_of(whole, stage, checker) < DISTANCE_MOST / 100
    without_adapter = CheckedStages(whole, STAGES).stage(PLACE)
    assert distance_of(whole, without_adapter, checker) > 2 * DISTANCE_MOST


def test_a_checker_computes_no_stage_that_trained_without_its_adapter(whole: Any) -> None:
    training = training_of()
    request = RecomputeStage(check=1, span=LayerSpan(0, 2), count=1, tokens=(3,))
    output_states = TakeStates(
        check=1,
        session=1,
        start=0,
        count=1,
        sender=NOBODY,
        checker=NOBODY,
        is_output=True,
        states=b"",
    )
    for held_place in (0, PLACE):
        checker = checker_of(whole, training, held_place)
        assert checker.take(output_states, bytes(128)) == StageRows()
        reply = checker.recompute(request)
        assert isinstance(reply, StageRefused)
        assert "the adapter of layer 0 was not given" in reply.reason


def values_of(training: RingTraining | None, bytes_most: int = 100) -> AdapterValues:
    return AdapterValues(training, LAYERS, Bytes(bytes_most))


def test_parts_of_an_adapter_out_of_order_or_without_end_are_refused() -> None:
    values = values_of(training_of())
    assert values.take(TakeAdapterValues(0, 0, bytes(40))) == ""
    assert "come in order" in values.take(TakeAdapterValues(0, 44, bytes(4)))
    assert "come in order" in values.take(TakeAdapterValues(1, 4, bytes(4)))
    assert values.take(TakeAdapterValues(0, 40, bytes(40))) == ""
    assert "more than 100 bytes" in values.take(TakeAdapterValues(1, 0, bytes(40)))
    assert values.take(TakeAdapterValues(0, 0, bytes(40))) == ""  # It begins anew.
    assert values.take(TakeAdapterValues(1, 0, bytes(40))) == ""
    assert "no adapter of layer 6" in values.take(TakeAdapterValues(LAYERS, 0, b""))
    assert "no adapter of layer 0" in values_of(None).take(TakeAdapterValues(0, 0, b""))


def test_values_of_another_adapter_are_refused(whole: Any) -> None:
    training = training_of()
    stage = trained_stage(whole, training, 0)
    assert stage.training is not None
    values, span = values_of(training, 1 << 20), LayerSpan(0, 1)
    values.take(TakeAdapterValues(0, 0, bytes(6)))
    with pytest.raises(SliceError, match="ends within a number"):
        values.set_on(stage.training.adapter, span)
    values.take(TakeAdapterValues(0, 0, bytes(8)))
    with pytest.raises(SliceError, match="has 2 values, not"):
        values.set_on(stage.training.adapter, span)
    count = sum(each.parameter.numel() for each in stage.training.adapter.layers[0])
    wrong_values: NDArray[np.float32] = np.full(count, np.nan, np.float32)
    values.take(TakeAdapterValues(0, 0, wrong_values.tobytes()))
    with pytest.raises(SliceError, match="is not finite"):
        values.set_on(stage.training.adapter, span)
