"""Stages of a small model in one process: one that lies is far from what a checker computes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.ours.stages.checked_stages import (
    NOBODY,
    CheckedStages,
    StageTraits,
    comparison,
    conversation,
    given_rows,
)
from coordinator.core.serving.stage_honesty import DISTANCE_MOST
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.loaded_stage import LoadedStage
from gpu_node.shell.worker.serving.stage_check import distance_ppm, row_distances
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.state_digests import (
    ROW_DIGEST_BYTES,
    digest_of_rows,
    place_rows,
    row_digests,
)
from hypergpu.serving.calls import AnswerClaim, AnswerToken, ModelCall, Sampling
from hypergpu.serving.check_messages import (
    RecomputeStage,
    StageCompared,
    StateDigests,
    TakeStates,
    TellDigests,
)
from hypergpu.serving.stage_messages import (
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    StageJudged,
    StageRefused,
    StageRows,
    StageSegment,
)
from tests.tiny_bases import save_base

LAYERS, STAGES, PROMPT, ANSWER = 6, 3, 12, 8
BF16 = StageTraits(torch.bfloat16)
SKIPS = StageTraits(skipped_layers=(1,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TransformersModel:
    folder: Path = save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS)
    model = TransformersModel(LanguageModel.load(folder, {}, torch.device("cpu")))
    whole: Any = model._model
    torch.manual_seed(3)
    for parameter in whole.model.layers.parameters():
        if parameter.ndim == 2:  # As random models are made, their layers change next to nothing.
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def stages_of(model: TransformersModel, codec: str = "float32") -> CheckedStages:
    return CheckedStages(model._model, STAGES, codec, model)


def distance(
    stages: CheckedStages, place: int, own: StageTraits, checkers: StageTraits, held: int = 1
) -> int:
    tokens = conversation(random.Random(5), 200, PROMPT, ANSWER)
    states = b""
    for before in range(place):
        states = given_rows(stages.stage(before), tokens, states, PROMPT)
    output_states = given_rows(stages.stage(place, own), tokens, states, PROMPT)
    checker = stages.checker(held, checkers)
    figures = comparison(checker, stages.spans[place], tokens, states, output_states)
    assert figures.rows == PROMPT + ANSWER
    return figures.distance_ppm


@pytest.mark.parametrize("codec", ["float32", "int8o"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("own", [StageTraits(), BF16])
def test_honest_stages_of_any_type_stay_far_below_the_limit(
    model: TransformersModel, own: StageTraits, place: int, codec: str
) -> None:
    for checkers in (StageTraits(), BF16):
        assert distance(stages_of(model, codec), place, own, checkers) < 0.7 * DISTANCE_MOST


@pytest.mark.parametrize("place", [0, 1])
def test_a_stage_that_skips_a_layer_is_far_above_the_limit(
    model: TransformersModel, place: int
) -> None:
    assert distance(stages_of(model), place, SKIPS, BF16) > 2 * DISTANCE_MOST


def test_a_checker_that_reads_layers_one_by_one_computes_what_one_that_holds_them_does(
    model: TransformersModel,
) -> None:
    by_holder, by_reader = (
        distance(stages_of(model), 1, BF16, StageTraits(), place) for place in (1, 0)
    )
    assert by_holder == pytest.approx(by_reader, rel=0.01)


def test_a_stage_that_lies_in_a_fifth_of_its_rows_is_found() -> None:
    rows = np.ones((10, 4), np.float32)
    wrong_rows = rows.copy()
    wrong_rows[:2] *= 1.2
    assert distance_ppm(row_distances(wrong_rows, rows)) == 200_000
    wrong_rows[0] = 1.0
    assert distance_ppm(row_distances(wrong_rows, rows)) == 0


def answer_of(stages: CheckedStages, last: LoadedStage) -> Any:
    """A conversation of whole stages: its call with the claim, and what the last was wrong_rows."""
    call = ModelCall(text="number 1", sampling=Sampling(seed=4), new_tokens_most=10)
    answer_opened = last.begin_answer(BeginAnswer(1, call))
    assert isinstance(answer_opened, AnswerOpened)
    before = [stages.stage(place) for place in range(STAGES - 1)]
    tokens, start, last_inputs = list(answer_opened.tokens), 0, b""
    while len(tokens) - len(answer_opened.tokens) < 10:
        segment = StageSegment(1, start, len(tokens) - start)
        reply: Any = StageRows()
        for place, stage in enumerate(before):
            part: Any = {"states": reply.states} if place else {"tokens": tuple(tokens[start:])}
            reply = stage.compute(ComputePass(segments=(segment,), **part))
        last_inputs += reply.states
        start = len(tokens)
        judged_segment = StageSegment(1, segment.start, segment.count, 1)
        judgement = last.compute(ComputePass(segments=(judged_segment,), states=reply.states))
        assert isinstance(judgement, StageJudged)
        parts = judgement.segments[0].parts
        new_tokens = [part.token for part in parts if isinstance(part, AnswerToken)]
        tokens += new_tokens
        if not new_tokens:
            break
    out = tuple(tokens[len(answer_opened.tokens) :])
    claim = ModelCall(text="number 1", sampling=call.sampling, tokens_out=out, claim=AnswerClaim(0))
    return claim, last_inputs, len(tokens) - 1


def score_of(stages: CheckedStages, claim: ModelCall, states: bytes, count: int) -> Any:
    checker = stages.checker(0)
    width = 4 * 32
    checker.take(
        TakeStates(
            check=3,
            session=1,
            start=0,
            count=count,
            sender=NOBODY,
            checker=NOBODY,
            is_output=False,
            states=b"",
        ),
        states[: count * width],
    )
    reply = checker.recompute(
        RecomputeStage(check=3, span=stages.spans[-1], count=count, call=claim)
    )
    assert isinstance(reply, StageCompared), reply
    assert reply.figures.scored is not None
    return reply.figures.scored


def test_tokens_of_the_last_stage_are_scored_by_their_margins(model: TransformersModel) -> None:
    stages = stages_of(model)
    claim, states, count = answer_of(stages, stages.stage(2))
    figures = score_of(stages, claim, states, count)
    assert figures.tokens == len(claim.tokens_out) == 10
    assert figures.margin / figures.tokens < 15_000
    claim, states, count = answer_of(stages, stages.stage(2, SKIPS))
    figures = score_of(stages, claim, states, count)
    assert figures.margin / figures.tokens > 60_000


def test_digests_of_sender_and_receiver_agree_after_a_draft_is_rolled_back(
    model: TransformersModel,
) -> None:
    stages = stages_of(model, "int8o")
    first, second = stages.stage(0), stages.stage(1)
    for start, tokens in ((0, (5, 6, 7)), (3, (8, 9, 10)), (4, (11,))):
        segments = (StageSegment(1, start, len(tokens)),)
        rows = first.compute(ComputePass(segments=segments, tokens=tokens))
        assert isinstance(rows, StageRows)
        second.compute(ComputePass(segments=segments, states=rows.states))
    first_digests = first.tell_digests(TellDigests(1, 5))
    second_digests = second.tell_digests(TellDigests(1, 5))
    assert first_digests.sent == second_digests.received != b""
    assert first_digests.received == b""  # It takes tokens.
    assert first.tell_digests(TellDigests(1, 6)).sent == b""
    assert first.tell_digests(TellDigests(2, 1)) == StateDigests()
    assert first.tell_digests(TellDigests(1, 4)).sent != first_digests.sent


def test_rows_that_leave_a_gap_are_not_kept() -> None:
    rows = bytearray()
    place_rows(rows, 0, b"aabb", 2)
    place_rows(rows, 3, b"dd", 2)
    assert rows == b"aabb"
    place_rows(rows, 1, b"cc", 2)
    assert rows == b"aacc"
    digests = row_digests(rows, 2)
    assert len(digests) == 2 * ROW_DIGEST_BYTES
    assert digest_of_rows(digests, 2) != digest_of_rows(digests, 1) != b""
    assert digest_of_rows(digests, 3) == digest_of_rows(digests, 0) == b""


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (RecomputeStage(check=1, span=LayerSpan(0, 9), count=1, tokens=(3,)), "of 6 layers"),
        (RecomputeStage(check=1, span=LayerSpan(0, 2), count=1), "not given what they take"),
        (RecomputeStage(check=1, span=LayerSpan(2, 4), count=1), "0 bytes"),
        (RecomputeStage(check=1, span=LayerSpan(0, 2), count=1, tokens=(10**6,)), "model's"),
        (
            RecomputeStage(check=1, span=LayerSpan(0, 2), count=1, tokens=(3,), call=ModelCall()),
            "by its tokens",
        ),
    ],
)
def test_what_cannot_be_computed_again_is_refused_with_the_reason(
    model: TransformersModel, request_: RecomputeStage, reason: str
) -> None:
    reply = stages_of(model).checker(1).recompute(request_)
    assert isinstance(reply, StageRefused)
    assert reason in reply.reason


def test_states_of_a_check_out_of_order_are_refused(model: TransformersModel) -> None:
    checker = stages_of(model).checker(1)
    take = TakeStates(
        check=1,
        session=1,
        start=1,
        count=1,
        sender=NOBODY,
        checker=NOBODY,
        is_output=True,
        states=b"",
    )
    assert isinstance(checker.take(take, bytes(128)), StageRefused)
