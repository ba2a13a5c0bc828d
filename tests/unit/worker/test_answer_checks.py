"""Checks of answers: nothing is found in honest ones, and each swap is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import UnanswerableCallError, is_last
from gpu_node.shell.worker.serving.token_choice import choose_token, token_margin
from gpu_node.shell.worker.serving.transformers_model import TransformersModel, TransformersReader
from hypergpu.serving.calls import (
    MARGIN_MOST,
    AnswerClaim,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    CheckFigures,
    CheckResult,
    ModelCall,
    Sampling,
)
from tests.tiny_bases import save_base

PROMPT = "the cat sat on the mat"
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.3, seed=5),
    Sampling(temperature=0.9, top_p=0.8, seed=6),
    Sampling(temperature=1.0, top_k=20, seed=8),
]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder: Path = save_base(tmp_path_factory.mktemp("base"))
    return LanguageModel.load(folder, {}, torch.device("cpu"))


@pytest.fixture(scope="module")
def model(language_model: LanguageModel) -> TransformersModel:
    return TransformersModel(language_model)


def answer(model: TransformersModel, call: ModelCall) -> list[AnswerPart]:
    """The parts of an answer."""
    conversation = ModelConversation(model, call, 128)
    parts: list[AnswerPart] = []
    while not is_last(parts):
        parts += conversation.step()
    return parts


def tokens_of(parts: list[AnswerPart]) -> tuple[int, ...]:
    return tuple(part.token for part in parts if isinstance(part, AnswerToken))


def figures_of(
    model: TransformersModel, call: ModelCall, claim: AnswerClaim, *, piece_tokens: int = 512
) -> CheckFigures:
    """What a check gives."""
    claimed_call = ModelCall(
        text=call.text, sampling=call.sampling, tokens_out=call.tokens_out, claim=claim
    )
    check = AnswerCheck(model, claimed_call, 128, piece_tokens=piece_tokens)
    parts: list[AnswerPart] = []
    while not parts:
        parts = check.step()
    (part,) = parts
    assert isinstance(part, CheckResult)
    assert is_last(parts)
    return part.figures


def claim_of(call: ModelCall, tokens: tuple[int, ...]) -> ModelCall:
    return ModelCall(text=call.text, sampling=call.sampling, tokens_out=tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("piece_tokens", [512, 5])
def test_an_honest_answer_has_no_margin_however_it_is_read(
    model: TransformersModel, sampling: Sampling, piece_tokens: int
) -> None:
    call = ModelCall(text=PROMPT, sampling=sampling, new_tokens_most=40)
    parts = answer(model, call)
    tokens = tokens_of(parts)
    has_ended = parts[-1] == AnswerEnded("stop")
    whole = claim_of(call, tokens)
    figures = figures_of(model, whole, AnswerClaim(0, has_ended), piece_tokens=piece_tokens)
    assert figures.tokens == len(tokens) + has_ended
    assert figures.margin <= figures.tokens * 100
    assert figures.prompt_tokens == len(model.encode(PROMPT))
    # Only what this replica wrote is scored.
    part = figures_of(model, whole, AnswerClaim(3), piece_tokens=piece_tokens)
    assert part.tokens == len(tokens) - 3


def swap_of(language_model: LanguageModel, swap: str) -> TransformersModel:
    """A model that answers in place of the right one."""
    changed_model = copy.deepcopy(language_model.model)
    if swap == "shallow":
        changed_model.model.layers = changed_model.model.layers[:1]
        return TransformersModel(language_model._replace(model=changed_model))
    for parameter in changed_model.parameters():
        if parameter.dim() == 2:
            scale = parameter.data.abs().amax(dim=1, keepdim=True) / 7
            parameter.data = (parameter.data / scale).round() * scale
    return TransformersModel(language_model._replace(model=changed_model))


@pytest.mark.parametrize("sampling", SAMPLINGS[1:])
@pytest.mark.parametrize("swap", ["rounded", "shallow"])
def test_another_model_s_answer_has_margins(
    language_model: LanguageModel, model: TransformersModel, sampling: Sampling, swap: str
) -> None:
    call = ModelCall(text=PROMPT, sampling=sampling, new_tokens_most=40)
    tokens = tokens_of(answer(swap_of(language_model, swap), call))
    figures = figures_of(model, claim_of(call, tokens), AnswerClaim(0))
    assert figures.margin / figures.tokens > 0.1 * MARGIN_MOST


@pytest.mark.parametrize(
    "cut", [Sampling(temperature=0.9, seed=5), Sampling(temperature=1.3, top_k=20, seed=5)]
)
def test_cut_sampling_has_margins(model: TransformersModel, cut: Sampling) -> None:
    call = ModelCall(text=PROMPT, sampling=cut, new_tokens_most=40)
    tokens = tokens_of(answer(model, call))
    honest_call = ModelCall(text=PROMPT, sampling=SAMPLINGS[1])
    figures = figures_of(model, claim_of(honest_call, tokens), AnswerClaim(0))
    assert figures.margin / figures.tokens > 0.1 * MARGIN_MOST


def test_an_answer_that_is_said_to_end_too_early_or_has_no_such_token_has_margins(
    model: TransformersModel,
) -> None:
    call = ModelCall(text=PROMPT, sampling=SAMPLINGS[0], new_tokens_most=12)
    tokens = tokens_of(answer(model, call))
    early = figures_of(model, claim_of(call, tokens[:4]), AnswerClaim(0, has_ended=True))
    assert (early.tokens, early.margin > MARGIN_MOST // 10) == (5, True)
    strange = figures_of(model, claim_of(call, (10**6,)), AnswerClaim(0))
    assert (strange.tokens, strange.margin) == (1, MARGIN_MOST)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_margin_is_about_the_change_that_would_have_given_the_token(sampling: Sampling) -> None:
    draws = torch.Generator().manual_seed(3)
    for position in range(200):
        logits = torch.randn(500, generator=draws, dtype=torch.float64)
        noise = torch.randn(500, generator=draws, dtype=torch.float64)
        right = choose_token(logits, sampling, position).token
        assert token_margin(logits, sampling, position, right) == 0
        near = choose_token(logits + 0.001 * noise, sampling, position).token
        far = choose_token(noise, sampling, position).token
        assert token_margin(logits, sampling, position, near) < 0.02
        if far != right:
            assert token_margin(logits, sampling, position, far) > 0


class LastLogitsReader:
    """A reader of an engine that keeps the last logits alone."""

    def __init__(self, reader: TransformersReader) -> None:
        self.read = reader.read
        self.close = reader.close


class LastLogitsModel(TransformersModel):
    """A model of such an engine."""

    def open_reader(self, tokens_most: int) -> Any:
        return LastLogitsReader(super().open_reader(tokens_most))


def test_an_engine_that_keeps_the_last_logits_alone_scores_no_answer(
    language_model: LanguageModel,
) -> None:
    call = ModelCall(text=PROMPT, tokens_out=(1, 2), claim=AnswerClaim(0))
    check = AnswerCheck(LastLogitsModel(language_model), call, 128)
    with pytest.raises(UnanswerableCallError, match="scores no answer"):
        check.step()
