"""Rounds by Muon of the byte GPT in other ways: sparse updates at unequal H, and schedules."""

from collections.abc import Mapping, Sequence
from statistics import median

import torch

from benchmarks.ours.samples.training import (
    MUON,
    NODES,
    TASKS,
    RoundWay,
    TrainingRun,
    samples_to,
)
from benchmarks.ours.table import PartFigures

TASK = TASKS["text"]
RATE = TASK.round_rates[MUON]
UNEQUAL = (3.0, 2.0, 1.0, 1.0, 0.5, 0.25, 0.125, 0.125)
"""Inner steps of nodes up to 24 times apart, as many in all as of equal ones."""
CODEC_WAYS = {
    "int4": RoundWay(RATE, "int4", UNEQUAL),
    "topk64": RoundWay(RATE, "topk64", UNEQUAL),
}
"""Learning rates are the best of 0.002, 0.004 and 0.008 on seed 1: docs/log.md has them."""
SCHEDULED_SAMPLES = 2_400
"""Five rounds: where a constant rate is at the target after a little more than four."""
SCHEDULE_WAYS = {
    "constant": RoundWay(RATE),
    "linear": RoundWay(4 * RATE, schedule="linear", scheduled_samples=SCHEDULED_SAMPLES),
    "cosine": RoundWay(4 * RATE, schedule="cosine", scheduled_samples=SCHEDULED_SAMPLES),
}
"""Learning rates of courses that fall to 0 are the best of once, twice and four times the constant
one on seed 1.
"""


def unequal_figures(seeds: int) -> PartFigures:
    """Sparse updates beside dense ones where nodes take unequal numbers of inner steps."""
    return _figures(CODEC_WAYS, "int4", "unequal_muon", f"H={TASK.inner_steps}, up to 24:1", seeds)


def schedule_figures(seeds: int) -> PartFigures:
    """Learning rates that fall to 0 beside a constant one."""
    what = f"H={TASK.inner_steps}, rate"
    return _figures(SCHEDULE_WAYS, "constant", "schedule_muon", what, seeds)


def _figures(
    ways: Mapping[str, RoundWay], usual: str, key: str, what: str, seeds: int
) -> PartFigures:
    torch.set_num_threads(1)
    counts = {
        name: [_samples(way, seed) for seed in range(1, seeds + 1)] for name, way in ways.items()
    }
    baseline = middle_of(counts[usual])
    rows, metrics = [], {}
    for name, each in counts.items():
        middle = middle_of(each)
        ratio = None if middle is None or baseline is None else middle / baseline
        if ratio is not None and name != usual:
            metrics[f"text_{key}_{name}_over_{usual}"] = ratio
        rows.append((f"{TASK.title}, {MUON}: {what} {name}", count_list(each), ratio_cell(ratio)))
    note = (
        f"{what}: loss {TASK.target:g}, {NODES} nodes; learning rates"
        f" {', '.join(f'{name} {way.learning_rate:g}' for name, way in ways.items())}."
    )
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def middle_of(counts: Sequence[int | None]) -> float | None:
    """The median; None: half of the seeds or more never came to the target."""
    far = float("inf")
    middle = median(far if each is None else each for each in counts)
    return None if middle == far else middle


def count_list(counts: Sequence[int | None]) -> str:
    """Counts by seed, for people."""
    return ", ".join("missed" if each is None else f"{each:,}" for each in counts)


def ratio_cell(ratio: float | None) -> str:
    """A ratio in two decimals; empty: there is none."""
    return "" if ratio is None else f"{ratio:.2f}x"


def _samples(way: RoundWay, seed: int) -> int | None:
    return samples_to(TASK.target, TrainingRun(TASK, MUON, seed).rounds(way))
