"""How soon a stage that leaves layers out is found, and whether honest ones are blamed."""

import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.stages.checked_stages import (
    CheckedStages,
    StageTraits,
    comparison,
    conversation,
    given_rows,
    whole_model,
)
from coordinator.core.serving.stage_honesty import DISTANCE_MOST, USUAL_PERMILLE

_PROMPT, _ANSWER = 24, 16
_STAGES = 3
_DRAWS = 10_000
_P99 = 0.99


class LiarFigures(NamedTuple):
    """Distances of real conversations, and what follows from them."""

    liar_ppm: list[int]
    """Distances of a stage that leaves out one layer in ten."""
    honest_ppm: list[int]
    """Distances of honest stages of all types and thread counts."""
    sessions_p99: int
    """Conversations after which 99 of 100 liars were found."""

    @property
    def honest_blamed(self) -> int:
        """Honest conversations above the limit."""
        return sum(each > DISTANCE_MOST for each in self.honest_ppm)

    @property
    def liar_found(self) -> float:
        """Share of the liar's conversations that are found wrong where they are checked."""
        return sum(each > DISTANCE_MOST for each in self.liar_ppm) / len(self.liar_ppm)


def liar_figures(
    folder: Path, texts: Sequence[Sequence[int]], dtypes: Sequence[Any]
) -> LiarFigures:
    """Figures of the middle stage of three.

    Args:
        folder: Of a decoder.
        texts: Tokens of conversations; empty: drawn ones.
        dtypes: Types that honest nodes and checkers compute in.
    """
    whole = whole_model(folder)
    draws = random.Random(1)
    vocabulary = whole.config.vocab_size
    tokens_of = [*texts] or [conversation(draws, vocabulary, _PROMPT, _ANSWER) for _ in range(6)]
    liar_ppm, honest_ppm = list[int](), list[int]()
    for codec in ("float32", "int8o"):
        stages = CheckedStages(whole, _STAGES, codec)
        middle = stages.spans[1]
        first = stages.stage(0)
        skipped_layers = tuple(range(0, middle.count, 10)) or (0,)
        own = [StageTraits(dtype, threads) for dtype in dtypes for threads in (1, 2)]
        honest = [(traits.threads, stages.stage(1, traits)) for traits in own]
        liar = stages.stage(1, StageTraits(dtypes[0], 1, skipped_layers))
        checkers = [stages.checker(1, StageTraits(dtype)) for dtype in dtypes]
        for tokens in tokens_of:
            input_states = given_rows(first, tokens, b"", _PROMPT)
            honest_states = [
                given_rows(each, tokens, input_states, _PROMPT, count) for count, each in honest
            ]
            lie = given_rows(liar, tokens, input_states, _PROMPT)
            for checker in checkers:
                honest_ppm += [
                    comparison(checker, middle, tokens, input_states, each).distance_ppm
                    for each in honest_states
                ]
                liar_ppm.append(comparison(checker, middle, tokens, input_states, lie).distance_ppm)
    return LiarFigures(liar_ppm, honest_ppm, _sessions_until_found(liar_ppm))


def _sessions_until_found(liar_ppm: Sequence[int]) -> int:
    """Conversations until a liar is found: draws at the usual share over measured distances."""
    counts = []
    for seed in range(_DRAWS):
        draws, count = random.Random(seed), 0
        while True:
            count += 1
            is_checked = draws.randrange(1_000) < USUAL_PERMILLE
            if is_checked and draws.choice(liar_ppm) > DISTANCE_MOST:
                break
            if count >= 100_000:
                break
        counts.append(count)
    return sorted(counts)[int(_P99 * _DRAWS) - 1]


def random_figures(dtypes: Sequence[Any]) -> LiarFigures:
    """The same of random weights, of which no layer does next to nothing."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = save_random_base(Path(name) / "base", width=128, layers=30)
        whole = whole_model(folder)
        torch.manual_seed(2)
        for parameter in whole.model.layers.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
        whole.save_pretrained(folder)
        return liar_figures(folder, (), dtypes)


def text_tokens(folder: Path, names: Sequence[str]) -> list[list[int]]:
    """Beginnings of modules of Python as conversations of a model."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    library = Path(os.__file__).parent
    count = _PROMPT + _ANSWER
    return [
        tokenizer((library / name).read_text("utf-8"))["input_ids"][200 : 200 + count]
        for name in names
    ]
