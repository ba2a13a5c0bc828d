"""Parts of an answer: draws of tokens, and the text as it comes out."""

import functools
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gpu_node.shell.worker.serving.answer_text import AnswerText
from gpu_node.shell.worker.serving.token_choice import choose_token
from hypergpu.serving.calls import Sampling
from tests.tiny_bases import save_base


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


@pytest.mark.parametrize("top_k", [1, 3, 40, 400])
def test_a_draw_of_the_likeliest_is_that_of_all_without_the_rest(top_k: int) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    order = torch.sort(logits, descending=True, stable=True).indices[:top_k]
    others = torch.full_like(logits, -torch.inf)
    others[order] = logits[order]
    for position in range(50):
        rules = Sampling(top_k=top_k, seed=3)
        alone = choose_token(others, Sampling(seed=3), position)
        assert choose_token(logits, rules, position).token == alone.token


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_base(tmp_path_factory.mktemp("base")))


def pieces_of(tokenizer: Any, text: str, *stops: str) -> tuple[list[str], AnswerText]:
    """Pieces of a text as its tokens come, until a stop."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    answer_text = AnswerText(decode, [], stops)
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
