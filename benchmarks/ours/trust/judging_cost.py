"""What judging a round costs the evaluator, against the rule of before: one gradient of 512
held-out samples.

The requests are those of a round of twenty nodes, answered by the evaluator's own code in this
process, by one thread: the held-out gradient, the gradients of samples of all shards, and a trial
of each update. Rounds by both rules run by turns.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import PartFigures
from benchmarks.ours.trust.training import BATCH, INNER_STEPS, NODES
from coordinator.core.training.trust.own_draw import SAMPLES_EACH
from coordinator.shell.evaluator.answer import Evaluator
from coordinator.shell.evaluator.process import (
    EvaluatorFailure,
    EvaluatorRequest,
    Initialise,
    Initialised,
    MeasureGradient,
    MeasureShards,
    ShardSamples,
    TryUpdate,
    expected_answer,
)
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Layout, layout_from_json

_CODEC = "int4"
_SECRET = bytes(32)
_SEED = 1
_ALPHA = 0.5
_BEFORE_SAMPLES, _NOW_SAMPLES = 512, 128
_ROUNDS = 30
"""Rounds after two that warm up; the median counts, as other work disturbs some."""
_WARM_UP = 2
_UPDATE_SCALE = 1e-3


class JudgedModel(NamedTuple):
    """A workload whose rounds are judged."""

    name: str
    workload: str
    options: dict[str, str | int | float | bool]


SMALL = JudgedModel("perceptron, 9,000", "digits-mlp", {"width": 64})
MODELS = (
    SMALL,
    JudgedModel("perceptron, 85,000", "digits-mlp", {"width": 256}),
    JudgedModel("perceptron, 1.1 million", "digits-mlp", {"width": 1000}),
    JudgedModel("CNN, 90,000", "digits-cnn", {"channels": 32}),
)


class _Round(NamedTuple):
    """Requests of a round."""

    before: Sequence[EvaluatorRequest]
    held_out: Sequence[EvaluatorRequest]
    shards: Sequence[EvaluatorRequest]
    trials: Sequence[EvaluatorRequest]


def judging_cost(models: Sequence[JudgedModel] = MODELS, rounds: int = _ROUNDS) -> PartFigures:
    """CPU of the evaluator in a judged round over that of the rule of before, model by model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        costs_s = {each.name: _costs_s(each, rounds) for each in models}
    finally:
        torch.set_num_threads(threads)
    about = (
        f"Evaluator: {NODES} nodes, {SAMPLES_EACH} samples each, {_CODEC}, one thread; before: one"
        f" gradient of {_BEFORE_SAMPLES} held-out samples; now: of {_NOW_SAMPLES}, of all shards,"
        f" trials. Medians of {rounds} rounds by turns."
    )
    rows, ratios = [], []
    for name, (before_s, *parts_s) in costs_s.items():
        ratios.append(sum(parts_s) / before_s)
        parts = " + ".join(f"{1000 * each:.1f}" for each in parts_s)
        rows.append(
            [f"evaluator, {name}, CPU ms", f"{1000 * before_s:.1f}", parts, f"{ratios[-1]:.1f}x"]
        )
    return PartFigures(
        rows=rows,
        metrics={"evaluator_cpu_over_before": max(ratios)},
        notes=[about],
    )


def _costs_s(model: JudgedModel, rounds: int) -> list[float]:
    """CPU seconds of a round before, then of the three parts of one now."""
    with tempfile.TemporaryDirectory() as name:
        evaluator = Evaluator()
        requests = _round_of(evaluator, model, Path(name))
        spent_s = [
            [_spend_s(evaluator, part) for part in requests] for _ in range(_WARM_UP + rounds)
        ]
    return [median(each) for each in zip(*spent_s[_WARM_UP:], strict=True)]


def _spend_s(evaluator: Evaluator, requests: Sequence[EvaluatorRequest]) -> float:
    started_s = time.process_time()
    answers = [evaluator.answer(each) for each in requests]
    spent_s = time.process_time() - started_s
    for answer in answers:
        if isinstance(answer, EvaluatorFailure):
            raise BenchmarkError(answer.detail)
    return spent_s


def _round_of(evaluator: Evaluator, model: JudgedModel, folder: Path) -> _Round:
    about: dict[str, Any] = {"workload": model.workload, "options": model.options}
    initial = Initialise(
        **about,
        seed=_SEED,
        model_path=str(folder / "model"),
        layout_path=str(folder / "layout"),
    )
    layout = layout_from_json(expected_answer(evaluator.answer(initial), Initialised).layout_json)
    about |= {"model_path": str(folder / "model"), "layout_digest": layout.digest}
    division: dict[str, Any] = {
        "seed": _SEED,
        "sharding": "dirichlet",
        "alpha": _ALPHA,
        "partitions": NODES,
    }
    draws = np.random.default_rng(_SEED)
    samples = [
        ShardSamples(slot, tuple(sorted(draws.choice(INNER_STEPS * BATCH, SAMPLES_EACH).tolist())))
        for slot in range(NODES)
    ]
    shards = MeasureShards(**about, **division, shards=tuple(samples), sketch_secret=_SECRET)
    trials = [
        TryUpdate(
            **about,
            **division,
            shard=each,
            update_path=_stored_update(layout, folder, slot, draws),
            codec=_CODEC,
        )
        for slot, each in enumerate(samples)
    ]
    before, now = (
        MeasureGradient(**about, samples_most=most, sketch_secret=_SECRET, by_layers=by_layers)
        for most, by_layers in ((_BEFORE_SAMPLES, False), (_NOW_SAMPLES, True))
    )
    return _Round([before], [now], [shards], trials)


def _stored_update(layout: Layout, folder: Path, slot: int, draws: np.random.Generator) -> str:
    """An update on disk; gives its path."""
    flat = Flat.empty(layout)
    flat.parameters[:] = _UPDATE_SCALE * draws.standard_normal(flat.parameters.size, np.float32)
    flat.statistics[:], flat.integers[:] = 0, 0
    path = folder / f"update-{slot}"
    path.write_bytes(encode_update(layout, _CODEC, flat).payload.tobytes())
    return str(path)
