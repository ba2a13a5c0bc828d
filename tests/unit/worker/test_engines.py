"""What every engine passes: answers that follow from their calls alone, and clear limits."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from msgspec.structs import replace

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import (
    CallTooLongError,
    TokenModel,
    UnanswerableCallError,
    is_last,
)
from gpu_node.shell.worker.serving.gguf_model import GgufModel
from gpu_node.shell.worker.serving.prefix_states import PrefixStates
from gpu_node.shell.worker.serving.token_engine import TokenEngine, check_steps
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.serving.calls import (
    MARGIN_MOST,
    AnswerBegun,
    AnswerClaim,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    CheckResult,
    ModelCall,
    Sampling,
)
from hypergpu.workloads.gguf.writing import write_gguf
from tests.tiny_bases import save_base

GREEDY = Sampling(temperature=0.0)
DRAWS = [
    GREEDY,
    Sampling(temperature=1.3, top_p=0.9, seed=5),
    Sampling(temperature=0.8, top_k=7, seed=9),
]
PROMPT = "the cat sat on the mat"
CONTEXT = 128


class LoadedEngine(NamedTuple):
    """An engine, and the same model as transformers has it."""

    engine: TokenEngine
    model: TokenModel
    plain: LanguageModel
    logit_error: float
    """Largest difference of logits from those of transformers, relative to the largest one."""


def _transformers_engine(folder: Path, kind: str) -> LoadedEngine:
    plain = LanguageModel.load(save_base(folder, kind), {}, torch.device("cpu"))
    model = TransformersModel(plain)
    return LoadedEngine(TokenEngine(model, CONTEXT), model, plain, 1e-5)


def _gguf_engine(folder: Path, kind: str) -> LoadedEngine:
    base = save_base(folder, kind)
    write_gguf(base, folder / "model.gguf")
    model = GgufModel(folder / "model.gguf")
    plain = LanguageModel.load(base, {}, torch.device("cpu"))
    # llama.cpp holds keys and values as float16.
    return LoadedEngine(TokenEngine(model, CONTEXT), model, plain, 2e-3)


ENGINES = {
    "gguf, llama": lambda folder: _gguf_engine(folder, "llama"),
    "gguf, gpt2": lambda folder: _gguf_engine(folder, "gpt2"),
    "transformers, llama": lambda folder: _transformers_engine(folder, "llama"),
    "transformers, gpt2": lambda folder: _transformers_engine(folder, "gpt2"),
}


@pytest.fixture(scope="module", params=ENGINES)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoadedEngine:
    return ENGINES[request.param](tmp_path_factory.mktemp("base"))


def answer(engine: TokenEngine, call: ModelCall) -> list[AnswerPart]:
    conversation = engine.open(call)
    parts: list[AnswerPart] = []
    while not is_last(parts):
        parts += conversation.step()
    conversation.close()
    return parts


def tokens_of(parts: Sequence[AnswerPart]) -> list[int]:
    return [part.token for part in parts if isinstance(part, AnswerToken)]


def text_of(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, AnswerToken | AnswerEnded))


def test_a_model_gives_the_logits_of_transformers(subject: LoadedEngine) -> None:
    check_steps(subject.model)
    tokens = subject.model.encode(PROMPT)
    inputs = subject.plain.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert tokens == inputs[0].tolist()
    assert subject.model.decode(tokens) == PROMPT
    reader = subject.model.open_reader(CONTEXT)
    logits = reader.read(tokens)
    with torch.inference_mode():
        theirs = subject.plain.model(input_ids=inputs).logits[0, -1]
    error = float((logits - theirs).abs().max() / theirs.abs().max())
    assert error <= subject.logit_error
    reader.close()


def test_the_likeliest_tokens_are_those_of_transformers(subject: LoadedEngine) -> None:
    parts = answer(subject.engine, ModelCall(text=PROMPT, sampling=GREEDY, new_tokens_most=40))
    inputs = subject.plain.tokenizer(PROMPT, return_tensors="pt")
    theirs = subject.plain.model.generate(**inputs, max_new_tokens=40, do_sample=False)
    new_tokens = theirs[0, inputs["input_ids"].shape[1] :].tolist()
    ends = subject.model.end_tokens
    assert ends >= set(subject.plain.end_tokens)
    assert tokens_of(parts) == [*itertools.takewhile(lambda token: token not in ends, new_tokens)]
    assert isinstance(parts[0], AnswerBegun)
    assert parts[0].prompt_tokens == inputs["input_ids"].shape[1]


def test_a_chat_is_read_by_the_model_s_own_template(subject: LoadedEngine) -> None:
    messages = (
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello <|end|> 数 😀"},
    )
    theirs = subject.plain.tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert subject.model.encode_chat(messages, ()) == theirs


@pytest.mark.parametrize("sampling", DRAWS)
def test_an_answer_that_another_replica_goes_on_with_is_the_same(
    subject: LoadedEngine, sampling: Sampling
) -> None:
    call = ModelCall(text=PROMPT, sampling=sampling, new_tokens_most=24, top_tokens=1)
    whole = answer(subject.engine, call)
    tokens = tokens_of(whole)
    assert len(tokens) > 5
    for cut in range(len(tokens) + 1):
        rest = answer(subject.engine, replace(call, tokens_out=tuple(tokens[:cut])))
        assert tokens_of(rest) == tokens[cut:]
        begun_text = text_of(whole[1 : 1 + cut])
        assert begun_text + text_of(rest) == text_of(whole)


def test_tokens_that_are_out_are_read_as_they_were_where_that_decides_digits(
    subject: LoadedEngine,
) -> None:
    prompt = tuple(subject.model.encode(PROMPT))
    out = (7, 300, 21, 8, 5)
    steps_reader = subject.model.open_reader(CONTEXT)
    logits = steps_reader.read(prompt).clone()
    for token in out:
        logits = steps_reader.read([token]).clone()
    steps_reader.close()
    call = ModelCall(
        tokens=prompt, tokens_out=out, sampling=GREEDY, new_tokens_most=9, top_tokens=5
    )
    first = next(part for part in answer(subject.engine, call) if isinstance(part, AnswerToken))
    chances = torch.log_softmax(logits.double(), 0)
    values = torch.topk(chances, 5).values.tolist()
    exactness = 1e-12 if subject.model.rounds_by_piece else 1e-4
    told_values = [likely.log_probability for likely in first.likely]
    assert told_values == pytest.approx(values, abs=exactness)


def test_answers_side_by_side_are_those_of_each_alone(subject: LoadedEngine) -> None:
    calls = [
        ModelCall(text=f"{PROMPT} {number}", sampling=rules, new_tokens_most=12)
        for number, rules in enumerate(DRAWS)
    ]
    conversations = [subject.engine.open(call) for call in calls]
    answers: list[list[AnswerPart]] = [[] for _ in calls]
    while not all(map(is_last, answers)):
        for conversation, parts in zip(conversations, answers, strict=True):
            if not is_last(parts):
                parts.extend(conversation.step())
    for conversation in conversations:
        conversation.close()
    assert answers == [answer(subject.engine, call) for call in calls]


@pytest.mark.parametrize("sampling", DRAWS)
def test_a_conversation_goes_on_from_what_was_read_before_and_is_answered_alike(
    subject: LoadedEngine, sampling: Sampling
) -> None:
    prefixes = PrefixStates()
    prefixes.room_bytes = 1 << 24
    keeping_engine = TokenEngine(subject.model, CONTEXT, prefixes)
    first = ModelCall(
        text=PROMPT, sampling=sampling, new_tokens_most=24, prefix_scope="one", top_tokens=1
    )
    prompt, first_tokens = subject.model.encode(PROMPT), tokens_of(answer(keeping_engine, first))
    for begin in ([*prompt, *first_tokens], prompt):
        call = ModelCall(tokens=(*begin, 9, 8, 7), sampling=sampling, new_tokens_most=24)
        plain, kept_answer = (
            answer(subject.engine, call),
            answer(keeping_engine, replace(call, prefix_scope="one")),
        )
        assert tokens_of(kept_answer) == tokens_of(plain)
        assert isinstance(kept_answer[0], AnswerBegun)
        assert kept_answer[0].prompt_tokens == len(begin) + 3
        assert len(begin) - 1 <= kept_answer[0].held_tokens < len(begin) + 3
        strange = answer(keeping_engine, replace(call, prefix_scope=f"two {len(begin)}"))
        assert strange[0] == AnswerBegun(len(begin) + 3)


@pytest.mark.parametrize("sampling", DRAWS)
def test_an_engine_scores_its_own_answer_without_a_margin_and_another_one_with(
    subject: LoadedEngine, sampling: Sampling
) -> None:
    call = ModelCall(text=PROMPT, sampling=sampling, new_tokens_most=24)
    tokens = tuple(tokens_of(answer(subject.engine, call)))
    margins = []
    for claimed_tokens in (tokens, tuple((token + 5) % 300 for token in tokens)):
        check_call = replace(call, tokens_out=claimed_tokens, claim=AnswerClaim(0))
        (result,) = answer(subject.engine, check_call)
        assert isinstance(result, CheckResult)
        assert result.figures.tokens == len(tokens)
        assert result.figures.prompt_tokens == len(subject.model.encode(PROMPT))
        margins.append(result.figures.margin / len(tokens))
    assert margins[0] <= 100
    assert margins[1] > MARGIN_MOST / 10


def test_a_long_prompt_is_read_in_pieces_and_answered_alike(subject: LoadedEngine) -> None:
    tokens = tuple(place % 300 for place in range(100))
    call = ModelCall(tokens=tokens, sampling=GREEDY, new_tokens_most=6)
    conversation = ModelConversation(subject.model, call, CONTEXT, piece_tokens=7)
    parts: list[AnswerPart] = []
    steps = 0
    while not is_last(parts):
        parts += conversation.step()
        steps += 1
    assert steps >= 100 // 7
    assert parts == answer(subject.engine, call)


def test_nothing_of_a_stop_is_out(subject: LoadedEngine) -> None:
    call = ModelCall(text=PROMPT, sampling=GREEDY, new_tokens_most=30)
    text = text_of(answer(subject.engine, call))
    stop = text[6:9]
    parts = answer(
        subject.engine, ModelCall(text=PROMPT, sampling=GREEDY, new_tokens_most=30, stops=(stop,))
    )
    assert text_of(parts) == text[: text.index(stop)]
    assert isinstance(parts[-1], AnswerEnded)
    assert parts[-1].finish == "stop"


def test_a_conversation_that_is_closed_gives_its_memory_back(subject: LoadedEngine) -> None:
    call = ModelCall(text=PROMPT, sampling=GREEDY, new_tokens_most=30)
    whole = tokens_of(answer(subject.engine, call))
    for steps in range(4):
        conversation = subject.engine.open(call)
        for _ in range(steps):
            assert len(tokens_of(conversation.step())) <= 1
        conversation.close()
        conversation.close()
    assert tokens_of(answer(subject.engine, call)) == whole


def test_a_prompt_without_room_for_its_answer_is_refused_with_the_figures(
    subject: LoadedEngine,
) -> None:
    call = ModelCall(tokens=(5,) * 120, new_tokens_most=9)
    with pytest.raises(CallTooLongError, match=r"120 tokens, and 9 new ones are asked for; .* 128"):
        subject.engine.open(call)
    parts = answer(subject.engine, ModelCall(tokens=(5,) * 120, sampling=GREEDY))
    assert len(tokens_of(parts)) <= 8
    assert subject.engine.open(ModelCall(tokens=(5,) * 20, new_tokens_most=9)).tokens_most == 29


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (ModelCall(tokens=(10_000,)), "token 10000 is none"),
        (ModelCall(text=""), "no token"),
        (ModelCall(messages=({"role": 5},)), "the chat template refuses the messages: "),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(
    subject: LoadedEngine, call: ModelCall, reason: str
) -> None:
    with pytest.raises(UnanswerableCallError, match=reason):
        subject.engine.open(call)


def test_log_probabilities_are_the_model_s_own_whatever_is_drawn_from(
    subject: LoadedEngine,
) -> None:
    call = ModelCall(
        text=PROMPT, sampling=Sampling(temperature=2.0, top_k=3), new_tokens_most=3, top_tokens=5
    )
    parts = [part for part in answer(subject.engine, call) if isinstance(part, AnswerToken)]
    inputs = subject.plain.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for part in parts:
        with torch.inference_mode():
            logits = subject.plain.model(input_ids=inputs).logits[0, -1]
        chances = torch.log_softmax(logits.double(), 0)
        assert part.log_probability == pytest.approx(float(chances[part.token]), abs=1e-2)
        assert len(part.likely) == 5
        assert part.token in {likely.token for likely in part.likely}
        inputs = torch.cat([inputs, torch.tensor([[part.token]])], dim=1)


def test_an_engine_tells_the_memory_that_it_takes(subject: LoadedEngine) -> None:
    weights = sum(each.numel() for each in subject.plain.model.parameters())
    memory = subject.engine.memory
    assert weights <= memory.weights_bytes <= 5 * weights
    config = subject.plain.model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    numbers = 2 * config.num_hidden_layers * heads * 32 // config.num_attention_heads
    assert 2 * numbers <= memory.token_bytes <= 4 * numbers
    assert memory.conversation_bytes(10) == 10 * memory.token_bytes


def test_a_model_that_gives_other_numbers_in_steps_is_not_served(subject: LoadedEngine) -> None:
    class ForgetfulReader:
        """Reads each piece as if it were the first one."""

        def __init__(self, tokens_most: int) -> None:
            self._tokens_most = tokens_most

        def read(self, tokens: Sequence[int]) -> torch.Tensor:
            reader = subject.model.open_reader(self._tokens_most)
            logits = reader.read(tokens).clone()
            reader.close()
            return logits

        def close(self) -> None:
            pass

    class ForgetfulModel:
        """Remembers nothing of what it read."""

        vocabulary = subject.model.vocabulary
        step_error_most = subject.model.step_error_most
        open_reader = ForgetfulReader

    with pytest.raises(ShardError, match="token by token"):
        check_steps(ForgetfulModel())  # type: ignore[arg-type]
