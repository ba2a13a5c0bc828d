"""A GGUF file served, beside llama.cpp alone in this process; and its nodes killed."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.serving.kills import answers_after_kills
from benchmarks.ours.serving.random_model import save_random_gguf
from benchmarks.ours.serving.served import ServedModelRun, served_model
from benchmarks.ours.table import PartFigures
from hypergpu.serving.calls import ModelCall, Sampling

_SHARE_WANTED = 0.9
_PROMPT = tuple(range(100, 164))
_TOKENS = 128
_CONTEXT = 512


def gguf_figures(turns: int) -> PartFigures:
    """Tokens a second of one conversation, beside llama.cpp's own server alone, by turns."""
    with tempfile.TemporaryDirectory() as name:
        file = save_random_gguf(Path(name) / "base", width=512, layers=8)
        alone = llama_alone(file)
        ours_s, theirs_s = [], []
        with served_model(Path(name) / "run", file, ("one",)) as run:
            for _ in range(turns):
                ours_s.append(_our_seconds(run))
                theirs_s.append(llama_seconds(alone, _TOKENS))
    ours, theirs = (_TOKENS / statistics.median(each) for each in (ours_s, theirs_s))
    return PartFigures(
        rows=[
            ("tokens a second of one conversation, GGUF", f"{ours:.1f}", ""),
            ("llama.cpp's server alone, same file, one thread", f"{theirs:.1f}", ""),
            ("share of the engine alone", f"{ours / theirs:.2f}", f"{_SHARE_WANTED:g}"),
        ],
        metrics={"gguf_engine_share": ours / theirs, "gguf_tokens_per_s": ours},
        notes=[f"27M parameters in float32, {len(_PROMPT)} + {_TOKENS} tokens, {turns} turns."],
    )


def llama_alone(file: Path, answers: int = 1, context: int = _CONTEXT) -> Any:
    """llama.cpp's own server of a file, in this process, one thread.

    Args:
        file: The model.
        answers: How many it gives at once.
        context: Tokens of each, with its prompt.
    """
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel = answers * context, answers
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.warmup, settings.fit_params = True, False
    settings.verbosity = -1
    return xllamacpp.Server(settings)


def _our_seconds(run: ServedModelRun) -> float:
    greedy = Sampling(temperature=0.0)
    call = ModelCall(tokens=_PROMPT, sampling=greedy, new_tokens_most=_TOKENS)
    began_s = time.monotonic()
    answer = run.answer(call)
    seconds = time.monotonic() - began_s
    if len(answer.tokens) != _TOKENS:
        raise BenchmarkError(f"the answer has {len(answer.tokens)} tokens and not {_TOKENS}")
    return seconds


def llama_seconds(server: Any, count: int) -> float:
    """Time of an answer of so many tokens to the benchmark's prompt."""
    body = {
        "prompt": list(_PROMPT),
        "max_tokens": count,
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    began_s = time.monotonic()
    answer = server.handle_completions(body)
    seconds = time.monotonic() - began_s
    if (tokens := answer["usage"]["completion_tokens"]) != count:
        raise BenchmarkError(f"llama.cpp's answer has {tokens} tokens and not {count}")
    return seconds


def gguf_failover_figures(kills: int) -> PartFigures:
    """The share of answers that are the same after a kill, which no fingerprint promises."""
    with tempfile.TemporaryDirectory() as name:
        file = save_random_gguf(Path(name) / "base", width=64, layers=2)
        deaths = answers_after_kills(Path(name) / "run", file, kills)
    return PartFigures(
        rows=[
            (
                "GGUF: answers with the same tokens after SIGKILL of their node",
                f"{deaths.same} of {kills}",
                "",
            ),
            ("longest gap between two tokens", f"{max(deaths.gaps_s):.2f} s", "2 s"),
        ],
        metrics={
            "gguf_failover_identical": deaths.same / kills,
            "gguf_failover_gap_s": max(deaths.gaps_s),
        },
        notes=["Two nodes of one machine; keys and values are held as float16."],
    )
