"""Requests of OpenAI's form: what is asked for is done, or refused by name."""

from typing import Any

import msgspec
import pytest

from hypergpu.serving.calls import UNSTATED_SEED
from hypergpu.user.serving.openai_requests import ApiError, ChatRequest, CompletionRequest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def chat(**changes: Any) -> ChatRequest:
    return msgspec.convert({**CHAT, **changes}, ChatRequest)


def completion(prompt: Any, **changes: Any) -> CompletionRequest:
    return msgspec.convert({"model": "tiny", "prompt": prompt, **changes}, CompletionRequest)


def test_settings_of_a_chat_are_those_of_its_call() -> None:
    (call,) = chat(
        temperature=0.2, top_p=0.9, max_completion_tokens=5, max_tokens=9, stop="end", seed=4
    ).calls()
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.seed) == (0.2, 0.9, 4)
    assert (call.new_tokens_most, call.stops, call.top_tokens) == (5, ("end",), None)


def test_several_choices_are_drawn_by_seeds_of_their_own() -> None:
    assert [call.sampling.seed for call in chat(n=3, seed=7).calls()] == [7, 8, 9]
    # Where the caller states none, the coordinator draws one for each.
    assert [call.sampling.seed for call in chat(n=2).calls()] == [UNSTATED_SEED] * 2


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    (call,) = chat(messages=[{"role": "user", "content": parts}]).calls()
    assert call.messages == ({"role": "user", "content": "hello"},)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"seed": -1}, "seed"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"stop": [str(number) for number in range(17)]}, "stop"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_field(
    changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        chat(**changes).calls()
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("prompt", "calls"),
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([5, 6], [(None, (5, 6))]),
        ([[5], [6, 7]], [(None, (5,)), (None, (6, 7))]),
    ],
)
def test_prompts_come_as_texts_or_tokens(prompt: Any, calls: list[Any]) -> None:
    assert [(call.text, call.tokens) for call in completion(prompt).calls()] == calls


@pytest.mark.parametrize("prompt", [[], [[]], [True], [1, "a"], [{}]])
def test_prompts_of_other_forms_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError):
        completion(prompt).calls()


def test_a_completion_has_sixteen_tokens_where_nothing_is_said() -> None:
    (call,) = completion("a").calls()
    assert call.new_tokens_most == 16
