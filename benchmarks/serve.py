"""Served models by real processes: nodes killed in mid-answer; what serving adds to an engine."""

import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.ours.serving import honesty
from benchmarks.ours.serving.batch import batch_figures
from benchmarks.ours.serving.beside import beside_figures
from benchmarks.ours.serving.changing_world import changing_world_figures
from benchmarks.ours.serving.finetuned import finetune_figures
from benchmarks.ours.serving.gguf import gguf_failover_figures, gguf_figures
from benchmarks.ours.serving.gguf_honesty import gguf_honesty_figures
from benchmarks.ours.serving.kills import answers_after_kills
from benchmarks.ours.serving.lines import lines_figures
from benchmarks.ours.serving.overhead import overhead_figures
from benchmarks.ours.serving.prefixes import prefix_figures
from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.serving.served import ServedModelRun, served_model
from benchmarks.ours.serving.streams import stream_figures
from benchmarks.ours.table import BenchmarkParts, PartFigures
from gpu_node.shell.worker.farm.language_model import LanguageModel
from hypergpu.serving.calls import CheckFigures, ModelCall, Sampling

GAP_S_WANTED, SHARE_WANTED, NODES_WANTED = 2.0, 0.9, 1.8
FLOOR_MS = 40
_KILLS, _QUICK_KILLS = 200, 6
_CONVERSATIONS = 16
_PROMPT = tuple(range(100, 164))
_TURNS, _QUICK_TURNS = 5, 2
_ENGINE_TOKENS = 128
_PROMPTS, _QUICK_PROMPTS = 10_000, 2_000
_STREAMS, _QUICK_STREAMS = 10_000, 1_500
_CALLS, _QUICK_CALLS = 300, 20
_ANSWERS, _QUICK_ANSWERS = 26, 2
"""Answers of a setting, by one sampling of one small model."""
_TEXT_ANSWERS = 4
_GGUF_ANSWERS = 12
_ANSWER_TOKENS = 24
_SMALL_VOCABULARY = 512
TEXT_BASE_VARIABLE = "HYPERGPU_BENCHMARK_SMOLLM2"
"""Folder of SmolLM2-135M: `python -m tests.gguf_bases FILE FOLDER` makes it of the package's."""


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts."""
    return BenchmarkParts(
        title="A served model, real processes on this machine, one thread a node",
        columns=("", "measured", "wanted"),
        parts={
            "failover": partial(failover_figures, _QUICK_KILLS if is_quick else _KILLS),
            "engine": partial(engine_figures, _QUICK_TURNS if is_quick else _TURNS),
            "nodes": nodes_figures,
            "gguf": partial(gguf_figures, _QUICK_TURNS if is_quick else _TURNS),
            "gguf_failover": partial(gguf_failover_figures, _QUICK_KILLS if is_quick else _KILLS),
            "finetune": finetune_figures,
            "prefixes": prefix_figures,
            "beside": partial(beside_figures, _QUICK_TURNS if is_quick else _TURNS),
            "overhead": partial(overhead_figures, _QUICK_CALLS if is_quick else _CALLS),
            "batch": partial(batch_figures, _QUICK_PROMPTS if is_quick else _PROMPTS),
            "streams": partial(stream_figures, _QUICK_STREAMS if is_quick else _STREAMS),
            "world": changing_world_figures,
            "lines": lines_figures,
            "gguf_honesty": partial(
                gguf_honesty_figures, _QUICK_ANSWERS if is_quick else _GGUF_ANSWERS
            ),
            "honesty": partial(honesty_figures, _QUICK_ANSWERS if is_quick else _ANSWERS),
        },
    )


def failover_figures(kills: int) -> PartFigures:
    """Kill the node that answers at a token by chance, greedy and seeded by turns."""
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=64, layers=2)
        deaths = answers_after_kills(Path(name) / "run", base, kills)
    longest_s, middle_s = max(deaths.gaps_s), statistics.median(deaths.gaps_s)
    return PartFigures(
        rows=[
            (
                "answers with the same tokens after SIGKILL of their node",
                f"{deaths.same} of {kills}",
                "all",
            ),
            ("longest gap between two tokens", f"{longest_s:.2f} s", f"{GAP_S_WANTED:g} s"),
            ("its median", f"{middle_s:.2f} s", ""),
        ],
        metrics={"failover_identical": deaths.same / kills, "failover_gap_s": longest_s},
        notes=["Greedy and seeded by turns, float32, a pass of 20 ms at least."],
    )


def engine_figures(turns: int) -> PartFigures:
    """Tokens a second of one conversation, beside transformers alone in this process, by turns."""
    torch.set_num_threads(1)
    call = ModelCall(
        tokens=_PROMPT, sampling=Sampling(temperature=0.0), new_tokens_most=_ENGINE_TOKENS
    )
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=512, layers=8)
        model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
        inputs = torch.tensor([_PROMPT])
        ours_s, theirs_s = [], []
        with served_model(Path(name) / "run", base, ("one",)) as run:
            for _ in range(turns):
                ours_s.append(_seconds_of(run, call))
                began_s = time.monotonic()
                with torch.inference_mode():
                    model.generate(inputs, max_new_tokens=_ENGINE_TOKENS, do_sample=False)
                theirs_s.append(time.monotonic() - began_s)
    ours, theirs = (_ENGINE_TOKENS / statistics.median(each) for each in (ours_s, theirs_s))
    return PartFigures(
        rows=[
            ("tokens a second of one conversation", f"{ours:.1f}", ""),
            ("transformers alone, same weights, one thread", f"{theirs:.1f}", ""),
            ("share of the engine alone", f"{ours / theirs:.2f}", f"{SHARE_WANTED:g}"),
        ],
        metrics={"engine_share": ours / theirs, "tokens_per_s": ours},
        notes=[f"27M parameters, {len(_PROMPT)} + {_ENGINE_TOKENS} tokens, {turns} turns."],
    )


def _seconds_of(run: ServedModelRun, call: ModelCall) -> float:
    began_s = time.monotonic()
    run.answer(call)
    return time.monotonic() - began_s


def nodes_figures() -> PartFigures:
    """16 conversations at once, by one node and by two whose engines have a floor a pass."""
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=64, layers=2)
        for nodes in (("one",), ("one", "two")):
            folder = Path(name) / f"run-{len(nodes)}"
            with served_model(folder, base, nodes, floor_ms=FLOOR_MS) as run:
                seconds[len(nodes)] = _seconds_at_once(run)
    ratio = seconds[1] / seconds[2]
    return PartFigures(
        rows=[
            (
                f"{_CONVERSATIONS} conversations: two nodes over one",
                f"{ratio:.2f}x",
                f"{NODES_WANTED}x",
            )
        ],
        metrics={"two_nodes_over_one": ratio},
        notes=[f"A pass of {FLOOR_MS} ms at least, for each conversation by itself."],
    )


def _seconds_at_once(run: ServedModelRun) -> float:
    calls = [
        ModelCall(
            tokens=tuple(itertools.islice(itertools.count(number), 16)),
            sampling=Sampling(temperature=0.0),
            new_tokens_most=24,
        )
        for number in range(_CONVERSATIONS)
    ]
    threads = [threading.Thread(target=run.answer, args=(call,)) for call in calls]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began_s


def honesty_figures(answers: int) -> PartFigures:
    """Honest nodes by unlike settings, and liars: who is doubted, and after how many tokens."""
    checks = accusations = 0
    most: dict[str, int] = {}
    names: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for base, count in _checked_bases(Path(name), answers):
            names.append(base.name)
            for rules in honesty.SAMPLINGS.values():
                by_pair: dict[str, list[CheckFigures]] = {}
                for pair, figures in honesty.honest_figures(base, rules, count):
                    by_pair.setdefault(pair, []).append(figures)
                checks += sum(map(len, by_pair.values()))
                accusations += sum(map(honesty.accusations, by_pair.values()))
                for lie, tokens in _liars_found(base, rules):
                    most[lie] = max(most.get(lie, 0), tokens)
    rows = [("honest nodes accused", f"{accusations} in {checks} checks", "0 in 3000")]
    rows += [(f"{lie}: tokens until it is doubted", str(most[lie]), "1000") for lie in most]
    return PartFigures(
        rows=rows,
        metrics={
            "swap_found_tokens": max(most.values()),
            "honest_accused": accusations,
            "honest_checks": checks,
        },
        notes=[f"{', '.join(names)}; five samplings; the setting that takes longest."],
    )


def _liars_found(base: honesty.CheckedBase, rules: Sampling) -> Iterator[tuple[str, int]]:
    """Each lie, with the tokens until it is doubted."""
    for lie, model in base.swaps.items():
        yield lie, honesty.tokens_until_found(base, model, rules)
    if rules.temperature:
        honest = base.model(honesty.SETTINGS[0])
        for lie, cut in honesty.CUTS.items():
            yield lie, honesty.tokens_until_found(base, honest, rules, cut)


def _checked_bases(folder: Path, answers: int) -> Iterator[tuple[honesty.CheckedBase, int]]:
    """The models, each with its answers of a setting by one sampling."""
    small_folder = save_random_base(
        folder / "base", width=128, layers=4, vocabulary=_SMALL_VOCABULARY
    )
    small = LanguageModel.load(small_folder, {}, torch.device("cpu"))
    draws = random.Random(3)
    prompts = [tuple(draws.randrange(_SMALL_VOCABULARY) for _ in range(16)) for _ in range(answers)]
    yield honesty.CheckedBase("random weights", small, prompts, _ANSWER_TOKENS), answers
    counter = honesty.train_to_count(small, _SMALL_VOCABULARY)
    yield honesty.CheckedBase("trained to count", counter, prompts, _ANSWER_TOKENS), answers
    if text_folder := os.environ.get(TEXT_BASE_VARIABLE):
        text_base = LanguageModel.load(Path(text_folder), {}, torch.device("cpu"))
        text_prompts = honesty.text_prompts(text_base)
        count = min(answers, _TEXT_ANSWERS)
        yield honesty.CheckedBase("SmolLM2-135M", text_base, text_prompts, _ANSWER_TOKENS), count
