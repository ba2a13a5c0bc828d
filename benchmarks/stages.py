"""Rings of stages: placement, codec, real processes, and the ring's machine in virtual time."""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.serving.served import served_model
from benchmarks.ours.stages.beside_llama import SESSIONS, beside_llama
from benchmarks.ours.stages.coded_cuts import CutFigures, coded_figures
from benchmarks.ours.stages.lined_ring import lined_rates
from benchmarks.ours.stages.lying_stages import (
    LiarFigures,
    liar_figures,
    random_figures,
    text_tokens,
)
from benchmarks.ours.stages.ring_losses import median_losses
from benchmarks.ours.stages.swarms import equal_split, random_swarm
from benchmarks.ours.stages.trained_figures import exact_figures, train_over_ideal
from benchmarks.ours.stages.virtual_ring import (
    VirtualRing,
    direct_ways,
    random_text,
    relayed_ways,
    repeated_text,
)
from benchmarks.ours.table import BenchmarkParts, PartFigures
from coordinator.core.rings.ring_state import RingLimits, StagePace
from hypergpu.rings.placement import place_layers, placement_cost
from hypergpu.serving.calls import ModelCall, Sampling
from hypergpu.units import several
from netsim.network.pairs import hop_times
from netsim.network.world_file import parse_world

TEXT_BASE_VARIABLE = "HYPERGPU_BENCHMARK_SMOLLM2"
"""Folder of SmolLM2-135M: `python -m tests.gguf_bases FILE FOLDER` makes it of the package's."""
QUANTIZED_VARIABLE = "HYPERGPU_BENCHMARK_SMOLLM2_GGUF"
"""The package's file, whose weights have four bits."""
_SWARMS, _QUICK_SWARMS = 100, 5
_NODES, _LAYERS, _SPLITS = 8, 32, 20
_FLOOR_MS = 40
_STAGES = 3
_TOKENS = 64
_ONE_WAY_MS = (0, 30, 80)
_LIAR_TEXTS = ("argparse.py", "heapq.py", "statistics.py", "textwrap.py", "shutil.py", "bisect.py")
_NEAR_MS, _FAR_MS = 5, 40
_PASS_US, _TOKEN_US = 20_000.0, 1_200.0
"""Costs of a stage on a processor, as measured of ten layers of SmolLM2."""


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts."""
    return BenchmarkParts(
        title="Rings of stages",
        columns=("", "measured", "wanted"),
        parts={
            "placement": partial(placement_figures, _QUICK_SWARMS if is_quick else _SWARMS),
            "virtual": virtual_figures,
            "training": training_figures,
            "rings": partial(rings_figures, 1 if is_quick else 3),
            "ring": ring_figures,
            **{f"lines{each}": partial(lines_figures, each) for each in _ONE_WAY_MS},
            "codec": partial(codec_figures, 1 if is_quick else 4),
            "llama": partial(llama_figures, 1 if is_quick else 5),
            "liars": partial(liars_figures, 1 if is_quick else len(_LIAR_TEXTS)),
        },
    )


def placement_figures(swarms: int) -> PartFigures:
    """The solver's placement beside an equal split in random order, latency of a token."""
    ratios, times_s = [], []
    for seed in range(swarms):
        draws = random.Random(seed)
        problem = random_swarm(draws, _NODES, _LAYERS)
        began_s = time.process_time()
        placement = place_layers(problem)
        times_s.append(time.process_time() - began_s)
        if placement is None:
            raise ValueError(f"swarm {seed} holds too little")
        others = [placement_cost(problem, equal_split(draws, problem)) for _ in range(_SPLITS)]
        ratios.append(statistics.median(others) / placement.cost_us)
    ratio, longest_s = statistics.median(ratios), max(times_s)
    return PartFigures(
        rows=[
            ("latency of an equal split in random order over the solver's", f"{ratio:.2f}x", "2x"),
            ("CPU time of a placement, longest", f"{longest_s * 1000:.0f} ms", "1 s"),
        ],
        metrics={"placement_over_equal": ratio, "placement_s": longest_s},
        notes=[f"{swarms} random swarms of {_NODES} unequal nodes, {_LAYERS} layers, a relay."],
    )


def virtual_figures() -> PartFigures:
    """The machine of a ring in virtual time, three stages."""
    rows, metrics = [], {}
    for one_way_ms in _ONE_WAY_MS:
        rate = _virtual_rate(1, one_way_ms, has_drafts=False)
        ideal = 1e6 / (_STAGES * (_PASS_US + _TOKEN_US + 2_000.0 * one_way_ms))
        rows.append(
            (f"one session, {one_way_ms} ms a leg: tokens/s", f"{rate:.1f}", f"{ideal:.1f}")
        )
        metrics[f"virtual_tokens_over_model_{one_way_ms}"] = rate / ideal
    many, some = (_virtual_rate(count, 30, has_drafts=False) for count in (64, 16))
    edit, chat = (_draft_gain(is_repeated=each) for each in (True, False))
    direct_rate, relay_rate = _near_rates()
    rows += [
        ("64 sessions over 16, 30 ms a leg", f"{many / some:.2f}x", "2.5x"),
        ("text that repeats: with drafts over without, 30 ms a leg", f"{edit:.2f}x", "2.5x"),
        ("text that does not: the same", f"{chat:.3f}x", "0.98x"),
        (
            f"nodes {_NEAR_MS} ms apart, {_FAR_MS} ms from the coordinator: direct over relayed",
            f"{direct_rate / relay_rate:.2f}x",
            "",
        ),
    ]
    metrics |= {
        "virtual_sessions_64_over_16": many / some,
        "virtual_draft_edit_over_none": edit,
        "virtual_draft_chat_over_none": chat,
        "virtual_direct_over_relay": direct_rate / relay_rate,
    }
    return PartFigures(
        rows=rows,
        metrics=metrics,
        notes=[f"A stage takes {_PASS_US / 1000:g} ms and {_TOKEN_US / 1000:g} ms a token."],
    )


def _near_rates() -> tuple[float, float]:
    """Tokens a second of a ring of near nodes whose coordinator is far: direct, and relayed."""
    text = f"""
[coordinator]
rtt_ms = 0
[[nodes]]
name = "near"
count = {_STAGES}
profile = "home-fibre"
rtt_ms = {2 * _FAR_MS}
[[pairs]]
between = ["near", "near"]
delay_ms = {_NEAR_MS}
"""
    world = parse_world(text, source="a benchmark")
    links = {node.name: node.link for node in world.nodes}
    hops = hop_times(links, world.coordinator, world.pairs)
    paces = [StagePace(_PASS_US, _TOKEN_US)] * _STAGES
    rates = []
    for ways in (direct_ways(hops.direct_us), relayed_ways(hops.relayed_us)):
        ring = VirtualRing(paces, RingLimits(has_drafts=False), ways=ways)
        rates.append(_rate_of(ring, 1))
    return rates[0], rates[1]


def _draft_gain(*, is_repeated: bool) -> float:
    rates = [
        _virtual_rate(1, 30, has_drafts=has_drafts, is_repeated=is_repeated)
        for has_drafts in (True, False)
    ]
    return rates[0] / rates[1]


def _virtual_rate(
    sessions: int, one_way_ms: int, *, has_drafts: bool, is_repeated: bool = False
) -> float:
    """Tokens a second of all sessions, from the first token to the last."""
    paces = [StagePace(_PASS_US, _TOKEN_US, 1_000.0 * one_way_ms)] * _STAGES
    text = repeated_text if is_repeated else random_text
    ring = VirtualRing(paces, RingLimits(has_drafts=has_drafts), text)
    return _rate_of(ring, sessions, prompt=80 if is_repeated else 8)


def _rate_of(ring: VirtualRing, sessions: int, prompt: int = 8) -> float:
    for session in range(sessions):
        ring.open(session, prompt=prompt, answer=200)
    answers = ring.run()
    times = [at_us for answer in answers.values() for at_us in answer.times_us]
    return (len(times) - sessions) / (max(times) - min(times)) * 1e6


def training_figures() -> PartFigures:
    """Training through three stages: gradients, a lost stage, and the rate in virtual time."""
    error, differing_count, replayed_steps = exact_figures()
    shares = {one_way_ms: train_over_ideal(one_way_ms) for one_way_ms in _ONE_WAY_MS}
    rows = [
        ("gradients of three stages from peft's on the whole", f"{error:.1e}", "1e-5"),
        (
            f"values that differ after a lost stage, {replayed_steps} steps again",
            f"{differing_count}",
            "0",
        ),
    ]
    rows += [
        (f"micro-batches over the ideal, {each} ms one way", f"{share:.3f}", "0.9 at 30 ms")
        for each, share in shares.items()
    ]
    return PartFigures(
        rows=rows,
        metrics={
            "gradient_error": error,
            "replay_bits_differ": float(differing_count),
            **{f"train_over_ideal_{each}": share for each, share in shares.items()},
        },
        notes=[
            "Six layers of random weights, float32, in one process; rates in virtual time.",
            "64 micro-batches a step, 20 ms forward and 20 ms backward, one way between stages.",
        ],
    )


def rings_figures(seeds: int) -> PartFigures:
    """Loss of two rings of one training beside one, at equal time and at equal tokens."""
    losses = median_losses(range(seeds))
    return PartFigures(
        rows=[
            ("held-out loss of two rings", f"{losses.two:.3f}", ""),
            ("of one ring in the same time, with half of the tokens", f"{losses.one:.3f}", "more"),
            ("of one ring in twice the time, with as many tokens", f"{losses.one_twice:.3f}", ""),
        ],
        metrics={
            "loss_two_rings": losses.two,
            "loss_one_ring_same_time": losses.one,
            "loss_one_ring_same_tokens": losses.one_twice,
        },
        notes=[
            f"Medians of {seeds} seeds; six layers of random weights, float32, in one process.",
            "12 rounds of 5 steps of 8 rows each; rounds of one ring are not folded with anything.",
        ],
    )


def ring_figures() -> PartFigures:
    """Three real nodes and one that stands by, stages with a floor; then the last stage is killed,
    once to stay away and once to be back at once.
    """
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=64, layers=6)
        nodes = ("one", "two", "three", "four")
        with served_model(
            Path(name) / "run", base, nodes, floor_ms=_FLOOR_MS, stages=_STAGES
        ) as run:
            alone = run.answer(_call(0))
            rate = (_TOKENS - 1) / (alone.at_s[-1] - alone.at_s[0])
            began_s = time.monotonic()
            with ThreadPoolExecutor(8) as callers:
                counts = [
                    len(each.tokens) for each in callers.map(run.answer, map(_call, range(8)))
                ]
            eight_rate = sum(counts) / (time.monotonic() - began_s)
            whole = run.answer(_call(1))
            run.wait_for_standby()
            after_kill = run.answer(_call(1), kill_after=_TOKENS // 3, restarts=False)
            run.start_again()
            run.wait_for_standby()
            after_restart = run.answer(_call(1), kill_after=_TOKENS // 3)
    ideal = 1000 / (_STAGES * _FLOOR_MS)
    changed_count = sum(
        first != second
        for answer in (after_kill, after_restart)
        for first, second in zip(whole.tokens, answer.tokens, strict=True)
    )
    return PartFigures(
        rows=[
            ("one session, tokens/s", f"{rate:.2f}", f"{ideal:.2f} by the floors alone"),
            ("eight sessions, tokens/s", f"{eight_rate:.1f}", ""),
            (
                "longest gap after SIGKILL of the last stage",
                f"{after_kill.longest_gap_s:.1f} s",
                "3 s",
            ),
            (
                "the same where its node is started again at once",
                f"{after_restart.longest_gap_s:.1f} s",
                "3 s",
            ),
            ("tokens changed by both", f"{changed_count}", "0"),
        ],
        metrics={
            "tokens_over_model_0": rate / ideal,
            "ring_tokens_per_s_8": eight_rate,
            "gap_s": after_kill.longest_gap_s,
            "gap_restart_s": after_restart.longest_gap_s,
            "tokens_changed": float(changed_count),
        },
        notes=[
            f"Loopback, float32, {_FLOOR_MS} ms a pass and stage at least, drafts as they come."
        ],
    )


def lines_figures(one_way_ms: int) -> PartFigures:
    """Three real nodes so far from the coordinator, with one and with many sessions."""
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=64, layers=6)
        rates = lined_rates(base, Path(name) / "run", one_way_ms)
    token_s = _STAGES * (rates.pass_ms + 2 * one_way_ms) / 1000
    rows, metrics = [], {}
    for sessions, rate in rates.tokens_per_s.items():
        share = rate * token_s / sessions
        text = f"{rate:.2f} tokens/s; {share:.3f}"
        rows.append((f"{several(sessions, 'session')}, {one_way_ms} ms", text, "0.95"))
        metrics[f"lines_tokens_over_model_{one_way_ms}_sessions_{sessions}"] = share
    return PartFigures(
        rows=rows,
        metrics=metrics,
        notes=[
            "Three real nodes behind netsim's proxy, one way; 0 ms: loopback without it.",
            "Over sessions / (floors of all stages + six legs), drafts as they come.",
        ],
    )


def _call(seed: int) -> ModelCall:
    draws = random.Random(seed)
    prompt = tuple(draws.randrange(4_096) for _ in range(24))
    # Drawn hot, so that nothing repeats and no draft is right.
    rules = Sampling(temperature=3.0, seed=seed)
    return ModelCall(tokens=prompt, sampling=rules, new_tokens_most=_TOKENS)


def codec_figures(texts: int) -> PartFigures:
    """SmolLM2 whole and in three slices, hidden states as float32 and as int8o."""
    folder = os.environ.get(TEXT_BASE_VARIABLE, "")
    if not folder:
        return PartFigures(notes=[f"Not measured: set {TEXT_BASE_VARIABLE}."])
    figures = coded_figures(Path(folder), texts)
    return PartFigures(
        rows=_codec_rows(figures),
        metrics={
            "tokens_same_float32": figures[0].same_prompts,
            "prompts_same_int8o": figures[1].same_prompts,
            "next_token_same_int8o": figures[1].same_next,
            "perplexity_int8o_over_float32": figures[1].perplexity / figures[0].perplexity,
        },
        notes=["SmolLM2-135M-Instruct, float32, one thread, two cuts; greedy prompts."],
    )


def _codec_rows(figures: Sequence[CutFigures]) -> list[tuple[str, str, str]]:
    return [
        (
            f"{each.codec}: perplexity; same next tokens; prompts with the tokens of one process",
            f"{each.perplexity:.3f}; {each.same_next:.4f}; {each.same_prompts:.2f}",
            "1" if each.codec == "float32" else "0.95",
        )
        for each in figures
    ]


def llama_figures(turns: int) -> PartFigures:
    """SmolLM2 in three slices beside llama.cpp with the same weights, each on one thread."""
    folder, file = (os.environ.get(each, "") for each in (TEXT_BASE_VARIABLE, QUANTIZED_VARIABLE))
    if not folder:
        return PartFigures(notes=[f"Not measured: set {TEXT_BASE_VARIABLE}."])
    figures = beside_llama(Path(folder), Path(file) if file else None, turns)
    what = "CPU time of a token over llama.cpp's with weights in F16"
    beside = f"{what}, {SESSIONS} sessions"
    rows = [
        (
            "CPU time of a token over llama.cpp's with weights in F16",
            f"{figures.core_seconds:.2f}x",
            "3",
        ),
        (beside, f"{figures.core_seconds_16:.2f}x", ""),
        (
            f"tokens a second of {SESSIONS} sessions by three machines over llama.cpp's on one",
            f"{figures.tokens:.2f}x",
            "1",
        ),
    ]
    metrics = {
        "llama_core_seconds_ratio": figures.core_seconds,
        "llama_core_seconds_ratio_16": figures.core_seconds_16,
        "llama_tokens_ratio_16": figures.tokens,
    }
    notes = [f"SmolLM2-135M-Instruct in float32, one thread each, medians of {turns} turns."]
    if figures.core_seconds_quantized:
        ratio = figures.core_seconds_quantized
        rows.append(("CPU time of a token over llama.cpp's in four bits", f"{ratio:.2f}x", ""))
        metrics["llama_core_seconds_ratio_q4"] = ratio
    else:
        notes.append(f"Four bits not measured: set {QUANTIZED_VARIABLE}.")
    return PartFigures(rows=rows, metrics=metrics, notes=notes)


def liars_figures(texts: int) -> PartFigures:
    """How soon a stage that leaves out one layer in ten is found, and whether honest are blamed."""
    import torch

    torch.set_num_threads(1)
    dtypes = (torch.float32, torch.bfloat16)
    all_figures = {"random weights": random_figures(dtypes)}
    folder = os.environ.get(TEXT_BASE_VARIABLE, "")
    if folder:
        tokens = text_tokens(Path(folder), _LIAR_TEXTS[:texts])
        all_figures["SmolLM2-135M-Instruct"] = liar_figures(Path(folder), tokens, dtypes)
    rows = [row for name, figures in all_figures.items() for row in _liar_rows(name, figures)]
    return PartFigures(
        rows=rows,
        metrics={
            "liar_sessions_p99": float(max(each.sessions_p99 for each in all_figures.values())),
            "honest_blamed": float(sum(each.honest_blamed for each in all_figures.values())),
            "honest_distance_most_percent": max(
                max(each.honest_ppm) for each in all_figures.values()
            )
            / 1e4,
            "liar_distance_least_percent": min(min(each.liar_ppm) for each in all_figures.values())
            / 1e4,
        },
        notes=[
            "The middle of three stages, 30 layers in all; a prompt of 24 tokens, 16 one by one.",
            "float32 and bfloat16, one and two threads, both codecs; draws at 2 %, virtual.",
            *([] if folder else [f"SmolLM2 not measured: set {TEXT_BASE_VARIABLE}."]),
        ],
    )


def _liar_rows(name: str, figures: LiarFigures) -> list[tuple[str, str, str]]:
    least, most = min(figures.liar_ppm) / 1e4, max(figures.honest_ppm) / 1e4
    honest_count = len(figures.honest_ppm)
    return [
        (
            f"{name}: conversations until a stage that leaves out one layer in ten is found, p99",
            f"{figures.sessions_p99}",
            "230",
        ),
        (
            f"{name}: its distance, least; of honest ones, most",
            f"{least:.1f} %; {most:.2f} %",
            "above, below 5 %",
        ),
        (f"{name}: honest blamed of {honest_count}", f"{figures.honest_blamed}", "0"),
    ]
