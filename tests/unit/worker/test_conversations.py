"""Answers of a served model: those of transformers, and the same after any break."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.answer_text import AnswerText
from gpu_node.shell.worker.serving.conversation import (
    CallTooLongError,
    ModelConversation,
    UnanswerableCallError,
    is_last,
)
from gpu_node.shell.worker.serving.token_choice import choose_token
from gpu_node.shell.worker.serving.transformers_engine import check_steps
from hypergpu.serving.calls import AnswerBegun, AnswerEnded, AnswerToken, ModelCall, Sampling
from tests.tiny_bases import save_base

GREEDY = Sampling(temperature=0.0)
PROMPT = "the cat sat on the mat"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    folder = save_base(tmp_path_factory.mktemp("base"), request.param)
    return LanguageModel.load(folder, {}, torch.device("cpu"))


def answer(model: LanguageModel, call: ModelCall, *, piece_tokens: int = 512) -> list[object]:
    conversation = ModelConversation(model, call, 128, piece_tokens=piece_tokens)
    parts: list[object] = []
    while not parts or not is_last(parts):  # type: ignore[arg-type]
        parts += conversation.step()
    return parts


def tokens_of(parts: Sequence[object]) -> list[int]:
    return [part.token for part in parts if isinstance(part, AnswerToken)]


def text_of(parts: Sequence[object]) -> str:
    return "".join(part.text for part in parts if isinstance(part, AnswerToken | AnswerEnded))


def test_the_likeliest_tokens_are_those_of_transformers(model: LanguageModel) -> None:
    parts = answer(model, ModelCall(text=PROMPT, sampling=GREEDY, new_tokens_most=40))
    inputs = model.tokenizer(PROMPT, return_tensors="pt")
    theirs = model.model.generate(**inputs, max_new_tokens=40, do_sample=False)
    new_tokens = theirs[0, inputs["input_ids"].shape[1] :].tolist()
    assert tokens_of(parts) == [token for token in new_tokens if token not in model.end_tokens]
    assert isinstance(parts[0], AnswerBegun)
    assert parts[0].prompt_tokens == inputs["input_ids"].shape[1]


def test_a_chat_is_read_by_the_model_s_own_template(model: LanguageModel) -> None:
    messages = ({"role": "user", "content": "hello"},)
    parts = answer(model, ModelCall(messages=messages, sampling=GREEDY, new_tokens_most=4))
    theirs = model.tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert isinstance(parts[0], AnswerBegun)
    assert parts[0].prompt_tokens == len(theirs)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.3, top_p=0.9, seed=5)])
def test_an_answer_that_another_replica_goes_on_with_is_the_same(
    model: LanguageModel, sampling: Sampling
) -> None:
    call = ModelCall(text=PROMPT, sampling=sampling, new_tokens_most=24, top_tokens=1)
    whole = answer(model, call)
    tokens = tokens_of(whole)
    assert len(tokens) > 5
    for cut in range(len(tokens) + 1):
        rest_call = ModelCall(
            text=PROMPT,
            sampling=sampling,
            new_tokens_most=24,
            top_tokens=1,
            tokens_out=tuple(tokens[:cut]),
        )
        rest = answer(model, rest_call)
        assert tokens_of(rest) == tokens[cut:]
        begun_text = "".join(
            part.text for part in whole[1 : 1 + cut] if isinstance(part, AnswerToken)
        )
        assert begun_text + text_of(rest) == text_of(whole)


def test_a_long_prompt_is_read_in_pieces_and_answered_alike(model: LanguageModel) -> None:
    tokens = tuple(place % 300 for place in range(100))
    call = ModelCall(tokens=tokens, sampling=GREEDY, new_tokens_most=6)
    whole = tokens_of(answer(model, call))
    assert tokens_of(answer(model, call, piece_tokens=7)) == whole


def test_a_prompt_without_room_for_its_answer_is_refused_with_the_figures(
    model: LanguageModel,
) -> None:
    call = ModelCall(tokens=(5,) * 120, new_tokens_most=9)
    with pytest.raises(CallTooLongError, match=r"120 tokens, and 9 new ones are asked for; .* 128"):
        ModelConversation(model, call, 128)
    parts = answer(model, ModelCall(tokens=(5,) * 120, sampling=GREEDY))
    assert len(tokens_of(parts)) <= 8


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (ModelCall(tokens=(10_000,)), "token 10000 is none"),
        (ModelCall(text=""), "no token"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(
    model: LanguageModel, call: ModelCall, reason: str
) -> None:
    with pytest.raises(UnanswerableCallError, match=reason):
        ModelConversation(model, call, 128)


def test_log_probabilities_are_the_model_s_own_whatever_is_drawn_from(
    model: LanguageModel,
) -> None:
    call = ModelCall(
        text=PROMPT, sampling=Sampling(temperature=2.0, top_k=3), new_tokens_most=3, top_tokens=5
    )
    parts = [part for part in answer(model, call) if isinstance(part, AnswerToken)]
    inputs = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for part in parts:
        with torch.inference_mode():
            logits = model.model(input_ids=inputs).logits[0, -1]
        chances = torch.log_softmax(logits.double(), 0)
        assert part.log_probability == pytest.approx(float(chances[part.token]), abs=1e-4)
        assert len(part.likely) == 5
        assert part.token in {likely.token for likely in part.likely}
        inputs = torch.cat([inputs, torch.tensor([[part.token]])], dim=1)


def test_draws_come_as_often_as_they_are_likely() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    counts = [0, 0, 0, 0]
    for seed in range(4_000):
        counts[choose_token(logits, Sampling(seed=seed), 0).token] += 1
    for count, chances in zip(counts, (2_000, 1_200, 600, 200), strict=True):
        assert abs(count - chances) < 150
    narrow = Sampling(top_p=0.6, seed=1)
    assert {choose_token(logits, narrow, place).token for place in range(200)} == {0, 1}
    assert {choose_token(logits, Sampling(top_k=1), place).token for place in range(20)} == {0}


def test_a_model_that_gives_other_numbers_in_steps_is_not_served(model: LanguageModel) -> None:
    check_steps(model)

    class WithoutMemory(torch.nn.Module):
        """Forgets what it has read."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model.model
            self.config, self.dtype = model.model.config, model.model.dtype

        def get_input_embeddings(self) -> torch.nn.Module:
            return model.model.get_input_embeddings()  # type: ignore[no-any-return]

        def forward(self, input_ids: torch.Tensor, **_: object) -> object:
            return self.inner(input_ids=input_ids)

    with pytest.raises(Exception, match="token by token"):
        check_steps(model._replace(model=WithoutMemory()))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_base(tmp_path_factory.mktemp("base")))


def pieces_of(tokenizer: Any, text: str, *stops: str) -> tuple[list[str], AnswerText]:
    """Pieces of a text as its tokens come, until a stop."""
    answer_text = AnswerText(tokenizer, [], stops)
    pieces = []
    for token in tokenizer(text)["input_ids"]:
        pieces.append(answer_text.add(token))
        if answer_text.is_stopped:
            break
    return pieces, answer_text


@pytest.mark.parametrize("text", ["plain words", "naïve «quoted» 数 😀 end", "a\nb\t c  d"])
def test_pieces_make_the_whole_and_hold_no_half_character(tokenizer: Any, text: str) -> None:
    pieces, answer_text = pieces_of(tokenizer, text)
    assert "".join(pieces) + answer_text.end() == text
    assert "�" not in "".join(pieces)


def test_nothing_of_a_stop_is_out_even_where_it_comes_in_pieces(tokenizer: Any) -> None:
    pieces, answer_text = pieces_of(tokenizer, "one two three four", "o thr", "five")
    assert answer_text.is_stopped
    assert "".join(pieces) + answer_text.end() == "one tw"


def test_what_only_looks_like_a_stop_comes_out_in_the_end(tokenizer: Any) -> None:
    pieces, answer_text = pieces_of(tokenizer, "one two th", "three")
    assert "".join(pieces) == "one two "
    assert answer_text.end() == "th"
    assert not answer_text.is_stopped
