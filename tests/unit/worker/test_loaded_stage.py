"""Stages of a tiny model in one process: what each keeps, gives again and refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.loaded_stage import LoadedStage
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.serving.calls import ModelCall, Sampling
from hypergpu.serving.stage_messages import (
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    ReplayRows,
    StageJudged,
    StageRefused,
    StageRows,
    StageSegment,
)
from hypergpu.tensors.hidden_states import state_codec
from hypergpu.workloads.slices.layer_slice import LayerSlice
from tests.tiny_bases import save_base

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TransformersModel:
    folder: Path = save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=4)
    return TransformersModel(LanguageModel.load(folder, {}, CPU))


def stages_of(model: TransformersModel, codec: str = "float32") -> list[LoadedStage]:
    whole: Any = model._model
    stages = []
    for span in (LayerSpan(0, 2), LayerSpan(2, 4)):
        layer_slice = LayerSlice(whole.config, span)
        state = whole.state_dict()
        values = {name: state[full] for name, full in layer_slice.whole_names()}
        layer_slice.model.load_state_dict(values, assign=True)
        layer_slice.model.requires_grad_(requires_grad=False)
        text = model if layer_slice.is_last else None
        stages.append(LoadedStage(layer_slice, CPU, state_codec(codec), text, 128))
    return stages


def rows_of(reply: object) -> bytes:
    assert isinstance(reply, StageRows)
    return reply.states


def test_tokens_go_through_two_stages_and_right_drafts_are_taken_at_once(
    model: TransformersModel,
) -> None:
    first, last = stages_of(model)
    answer_opened = last.begin_answer(BeginAnswer(1, ModelCall(text="number 1", sampling=GREEDY)))
    assert isinstance(answer_opened, AnswerOpened)
    count = len(answer_opened.tokens)
    states = rows_of(
        first.compute(
            ComputePass(segments=(StageSegment(1, 0, count),), tokens=answer_opened.tokens)
        )
    )
    reply = last.compute(ComputePass(segments=(StageSegment(1, 0, count, 1),), states=states))
    assert isinstance(reply, StageJudged)
    (token,) = reply.segments[0].tokens
    # A draft that cannot be right: the model goes on with another token, which is given.
    wrong_draft = (token, (token + 1) % model.vocabulary, 0)
    states = rows_of(
        first.compute(ComputePass(segments=(StageSegment(1, count, 3),), tokens=wrong_draft))
    )
    segment = StageSegment(1, count, 3, 3, wrong_draft[1:])
    reply = last.compute(ComputePass(segments=(segment,), states=states))
    assert isinstance(reply, StageJudged)
    assert 1 <= len(reply.segments[0].tokens) <= 2


def test_what_a_stage_gave_it_gives_again(model: TransformersModel) -> None:
    first, _ = stages_of(model, "int8o")
    states = rows_of(
        first.compute(ComputePass(segments=(StageSegment(1, 0, 4),), tokens=(5, 6, 7, 8)))
    )
    row_bytes = len(states) // 4
    assert rows_of(first.replay(ReplayRows(1, 1, 2))) == states[row_bytes : 3 * row_bytes]
    assert rows_of(first.replay(ReplayRows(1, 2, 3))) == b""
    assert rows_of(first.replay(ReplayRows(2, 0, 1))) == b""
    first.forget(1)
    assert rows_of(first.replay(ReplayRows(1, 0, 1))) == b""


def test_a_stage_that_repairs_keys_gives_nothing_and_can_replay_them(
    model: TransformersModel,
) -> None:
    first, _ = stages_of(model)
    request = ComputePass(segments=(StageSegment(1, 0, 2),), tokens=(5, 6), wants_output=False)
    assert rows_of(first.compute(request)) == b""
    assert rows_of(first.replay(ReplayRows(1, 0, 2)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_states_that_are_not_finite_are_the_fault_of_the_stage_before(
    model: TransformersModel, wrong: float
) -> None:
    _, last = stages_of(model)
    rows = np.zeros((2, 32), np.float32)
    rows[1, 3] = wrong
    request = ComputePass(segments=(StageSegment(1, 0, 2),), states=rows.tobytes())
    reply = last.compute(request)
    assert isinstance(reply, StageRefused)
    assert reply.blames_input
    assert "not finite" in reply.reason


@pytest.mark.parametrize(
    ("stage", "request_", "reason"),
    [
        (0, ComputePass(segments=(StageSegment(1, 0, 1),), states=bytes(128)), "takes tokens"),
        (1, ComputePass(segments=(StageSegment(1, 0, 1),), tokens=(3,)), "takes tokens"),
        (0, ComputePass(segments=(StageSegment(1, 0, 1),), tokens=(10**6,)), "the model knows"),
        (0, ComputePass(segments=(StageSegment(1, 128, 1),), tokens=(3,)), "128 tokens at most"),
        (1, ComputePass(segments=(StageSegment(9, 0, 1, 1),), states=bytes(128)), "has no call"),
        (1, ComputePass(segments=(StageSegment(1, 0, 2),), states=bytes(128)), "1 rows for 2"),
    ],
)
def test_a_pass_that_does_not_fit_the_stage_is_refused_with_the_reason(
    model: TransformersModel, stage: int, request_: ComputePass, reason: str
) -> None:
    reply = stages_of(model)[stage].compute(request_)
    assert isinstance(reply, StageRefused)
    assert reason in reply.reason


def test_times_and_memory_are_measured(model: TransformersModel) -> None:
    first, last = stages_of(model)
    for stage in (first, last):
        speed = stage.speed
        assert speed.pass_us >= 0
        assert speed.pass_us + speed.token_us > 0
        # Keys and values of two layers with two heads of eight numbers each, in float32.
        assert stage.token_bytes == 2 * 2 * 2 * 8 * 4
        assert stage.weights_bytes > 0
