"""A real model in three slices beside llama.cpp on the same weights, each on one thread."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from benchmarks.ours.cluster import BenchmarkError
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.workloads.gguf.writing import write_gguf
from hypergpu.workloads.slices.layer_slice import LayerSlice, layers_of, open_session
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
    slices = _slices_of(folder)
    with tempfile.TemporaryDirectory() as name:
        file = write_gguf(folder, Path(name) / "f16.gguf", "f16").path
        alone, many = _server(file, 1), _server(file, SESSIONS)
        small = None if quantized_file is None else _server(quantized_file, 1)
        one, sixteen, rates, theirs, their_sixteen, their_rates, their_small = (
            list[float]() for _ in range(7)
        )
        for _ in range(turns):
            one.append(sum(_stage_seconds(slices, 1)))
            sixteen.append(sum(_stage_seconds(slices, SESSIONS)) / SESSIONS)
            share = -(-SESSIONS // STAGES)  # Passes that keep all stages at work have a third.
            rates.append(share / max(_stage_seconds(slices, share)))
            theirs.append(_llama_cost(alone, 1).core_seconds)
            cost = _llama_cost(many, SESSIONS)
            their_sixteen.append(cost.core_seconds)
            their_rates.append(cost.tokens_per_s)
            if small is not None:
                their_small.append(_llama_cost(small, 1).core_seconds)
    middle = statistics.median
    return LlamaFigures(
        middle(one) / middle(theirs),
        middle(one) / middle(their_small) if their_small else 0.0,
        middle(rates) / middle(their_rates),
        middle(sixteen) / middle(their_sixteen),
    )


def _slices_of(folder: Path) -> list[LayerSlice]:
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers, state, slices = layers_of(whole.config), whole.state_dict(), []
    for first, end in pairwise(layers * stage // STAGES for stage in range(STAGES + 1)):
        layer_slice = LayerSlice(whole.config, LayerSpan(first, end))
        values = {name: state[full] for name, full in layer_slice.whole_names()}
        layer_slice.model.load_state_dict(values, assign=True)
        layer_slice.model.requires_grad_(requires_grad=False)
        slices.append(layer_slice)
    return slices


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


def _server(file: Path, slots: int) -> Any:
    """llama.cpp's own server of a file, in this process, one thread."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel = slots * _SLOT_TOKENS, slots
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.warmup, settings.fit_params = True, False
    settings.verbosity = -1
    return xllamacpp.Server(settings)


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
