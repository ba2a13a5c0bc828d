"""A real model in three slices beside llama.cpp on the same weights, each on one thread."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.serving.gguf import llama_alone
from benchmarks.ours.stages.coded_cuts import three_slices
from hypergpu.workloads.gguf.writing import write_gguf
from hypergpu.workloads.slices.layer_slice import LayerSlice, open_session
from hypergpu.workloads.slices.ragged_attention import SessionKeys, SessionSegment

SESSIONS = 16
STAGES = 3
_PROMPT_TOKENS, _TOKENS, _WARM_TOKENS = 64, 64, 4
_SLOT_TOKENS = 256


class LlamaFigures(NamedTuple):
    """What both take."""

    core_seconds: float
    """CPU time of a token of one session in all stages, over llama.cpp's with weights in F16."""
    core_seconds_quantized: float
    """The same over llama.cpp's with weights in four bits; 0: no such file was given."""
    tokens: float
    """Tokens a second of 16 sessions by three machines of one thread, over llama.cpp's on one."""
    core_seconds_16: float
    """As the first, of 16 sessions."""


def beside_llama(folder: Path, quantized_file: Path | None, turns: int) -> LlamaFigures:
    """Figures of a causal language model.

    Args:
        folder: As transformers has it.
        quantized_file: Its weights in four bits; None: there is no such file.
        turns: Measurements of each, by turns; medians count.
    """
    torch.set_num_threads(1)
    slices = three_slices(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with tempfile.TemporaryDirectory() as name:
        file = write_gguf(folder, Path(name) / "f16.gguf", "f16").path
        alone = llama_alone(file)
        many = llama_alone(file, SESSIONS, _SLOT_TOKENS)
        four_bits = None if quantized_file is None else llama_alone(quantized_file)
        costs = [_costs(slices, alone, many, four_bits) for _ in range(turns)]
    middle = _Costs(*map(statistics.median, zip(*costs, strict=True)))
    return LlamaFigures(
        core_seconds=middle.one / middle.llama_one,
        core_seconds_quantized=middle.one / middle.llama_quantized if quantized_file else 0.0,
        tokens=middle.rate / middle.llama_rate,
        core_seconds_16=middle.many / middle.llama_many,
    )


class _Costs(NamedTuple):
    """CPU time of a token, in seconds, of one session and of 16; and tokens a second of 16."""

    one: float
    many: float
    rate: float
    """By three machines."""
    llama_one: float
    llama_many: float
    llama_rate: float
    llama_quantized: float


def _costs(slices: Sequence[LayerSlice], alone: Any, many: Any, four_bits: Any) -> _Costs:
    share = -(-SESSIONS // STAGES)  # Passes that keep all stages at work have a third.
    llama_many = _llama_cost(many, SESSIONS)
    return _Costs(
        one=sum(_stage_seconds(slices, 1)),
        many=sum(_stage_seconds(slices, SESSIONS)) / SESSIONS,
        rate=share / max(_stage_seconds(slices, share)),
        llama_one=_llama_cost(alone, 1).core_seconds,
        llama_many=llama_many.core_seconds,
        llama_rate=llama_many.tokens_per_s,
        llama_quantized=0.0 if four_bits is None else _llama_cost(four_bits, 1).core_seconds,
    )


@torch.inference_mode()
def _stage_seconds(slices: Sequence[LayerSlice], sessions: int) -> list[float]:
    """CPU time of a pass of one token of each session, in each stage; each has read a prompt."""
    keys = [[open_session() for _ in range(sessions)] for _ in slices]
    tokens = torch.arange(sessions * _PROMPT_TOKENS) % 4_096 + 100
    _pass_seconds(slices, keys, tokens, 0, _PROMPT_TOKENS)
    totals = [0.0] * len(slices)
    for place in range(_WARM_TOKENS + _TOKENS):
        tokens = torch.arange(sessions) * 7 + place + 100
        seconds = _pass_seconds(slices, keys, tokens, _PROMPT_TOKENS + place, 1)
        if place >= _WARM_TOKENS:
            totals = [total + each for total, each in zip(totals, seconds, strict=True)]
    return [total / _TOKENS for total in totals]


def _pass_seconds(
    slices: Sequence[LayerSlice],
    keys: Sequence[Sequence[SessionKeys]],
    tokens: torch.Tensor,
    start: int,
    count: int,
) -> list[float]:
    states, seconds = tokens, list[float]()
    for layer_slice, own_keys in zip(slices, keys, strict=True):
        began_s = time.process_time()
        segments = [SessionSegment(each, start, count) for each in own_keys]
        states = layer_slice.compute(states, segments)
        seconds.append(time.process_time() - began_s)
    return seconds


class _LlamaCost(NamedTuple):
    core_seconds: float
    """CPU time of a token."""
    tokens_per_s: float


def _llama_cost(server: Any, sessions: int) -> _LlamaCost:
    """What a token takes after the prompts: the time of long answers without that of short ones."""
    (short_cpu_s, short_s), (long_cpu_s, long_s) = (
        _answer_seconds(server, sessions, count) for count in (_WARM_TOKENS, _WARM_TOKENS + _TOKENS)
    )
    tokens = sessions * _TOKENS
    return _LlamaCost((long_cpu_s - short_cpu_s) / tokens, tokens / (long_s - short_s))


def _answer_seconds(server: Any, sessions: int, count: int) -> tuple[float, float]:
    """CPU time and time of so many answers at once."""

    def answer(session: int) -> None:
        body = {
            "prompt": [(session * 64 + place) % 4_096 + 100 for place in range(_PROMPT_TOKENS)],
            "max_tokens": count,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        tokens = server.handle_completions(body)["usage"]["completion_tokens"]
        if tokens != count:
            raise BenchmarkError(f"llama.cpp's answer has {tokens} tokens and not {count}")

    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(sessions) as callers:
        list(callers.map(answer, range(sessions)))
    return time.process_time() - began_cpu_s, time.monotonic() - began_s
