"""What share of a centralised cluster's speed ours reaches over home lines.

The cluster is torch's DistributedDataParallel on unshaped loopback; ours trains the same model by
as many processes with the same floor of a step and the same global batch over a grade's lines, by
Muon. Both are timed to the first evaluation at the target.
"""

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.ours.awareness.centralised import (
    CHANNELS,
    FLOOR_MS,
    OUR_RATE,
    QUICK_RATES,
    RATES,
    UTILISATION_LEAST,
    best_rate,
    centralised_seconds,
    floored_world,
    job_of_short_rounds,
)
from benchmarks.ours.awareness.runs import (
    COLUMNS,
    GRADES,
    KEPT,
    ROOT,
    NotReachedError,
    Row,
    Runs,
    by_turns,
    spread,
)
from benchmarks.ours.table import BenchmarkParts, PartFigures
from netsim.run.report import RunReport

PROMISED = {"a": 0.8, "c": 0.7}
PROMISED_SAME = 0.4
FOLDER = ROOT / "build" / "centralised-runs"
"""Holds the runs of the newest measurement alone."""
OURS, ADAMW, MUON = "ours", "adamw", "muon"
KEYS = {ADAMW: "", MUON: "_same_optimizer"}


def first_evaluation_s(report: RunReport, name: str) -> float:
    """Time from the opening of the first round to the first evaluation at the target.

    Raises:
        NotReachedError: There is none.
    """
    for each in report.evaluations:
        if each.metric is not None and each.metric >= report.target:
            return each.at_ms / 1000
    raise NotReachedError(f"{name} never reached {report.target:g}; {report.reason}")


def share_figures(grade: str, *, seeds: int, rates_to_try: tuple[float, ...]) -> PartFigures:
    """One grade's lines.

    Raises:
        BenchmarkError: The cluster's time is void, or a run failed.
    """
    rates = {optimizer: best_rate(optimizer, seeds, rates_to_try) for optimizer in KEYS}
    contenders: dict[str, Callable[[int], float]] = {
        optimizer: partial(centralised_seconds, optimizer, rate)
        for optimizer, rate in rates.items()
    }
    folder = FOLDER / grade
    shutil.rmtree(folder, ignore_errors=True)
    runs = Runs(folder)
    world = floored_world(GRADES / f"{grade}.toml", KEPT / "worlds" / "centralised")
    contenders[OURS] = lambda seed: _ours_s(runs, grade, world, seed)
    seconds = by_turns(contenders, range(1, seeds + 1))
    stated_rates = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return PartFigures(
        rows=_rows(grade, seconds),
        metrics=shares(grade, seconds),
        notes=[f"DDP's rates, each the best of {len(rates_to_try)}: {stated_rates}. {runs.note()}"],
    )


def _ours_s(runs: Runs, grade: str, world: Path, seed: int) -> float:
    words = [
        "--job",
        str(job_of_short_rounds(MUON, OUR_RATE)),
        "--strategy",
        "aware",
        "--seed",
        str(seed),
    ]
    name = f"floored-{seed}-{grade}"
    return first_evaluation_s(runs.report(name, world, words, backend="tunnel"), name)


def shares(grade: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of the cluster's times over ours."""
    ours_s = statistics.median(seconds[OURS])
    return {
        f"centralised_share_{grade}{suffix}": statistics.median(seconds[optimizer]) / ours_s
        for optimizer, suffix in KEYS.items()
    }


def _rows(grade: str, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    promises = {ADAMW: PROMISED[grade], MUON: PROMISED_SAME}
    every = shares(grade, seconds)
    return [
        (
            f"{grade.upper()}: to 97 %, DDP by {optimizer} beside it",
            spread(seconds[OURS]),
            spread(seconds[optimizer]),
            f"{every[f'centralised_share_{grade}{suffix}']:.1%}",
            f"{promises[optimizer]:.0%}",
        )
        for optimizer, suffix in KEYS.items()
    ]


def parts(is_quick: bool) -> BenchmarkParts:
    """A part for each grade."""
    seeds, rates_to_try = (1, QUICK_RATES) if is_quick else (3, RATES)
    of_grade = partial(share_figures, seeds=seeds, rates_to_try=rates_to_try)
    return BenchmarkParts(
        title="Of a centralised cluster's speed",
        columns=COLUMNS,
        parts={grade: partial(of_grade, grade) for grade in PROMISED},
        notes=lambda: [
            f"{seeds} seeds by turns; steps of {FLOOR_MS} ms or more, 8 processes of batch 4,",
            f"digits CNN of {CHANNELS} channels.",
            f"Ours: Muon at {OUR_RATE:g}, from the opening of round #1, before its first step.",
            "DDP: gradients travel within the floor; evaluations are off its clock;",
            f"void below {UTILISATION_LEAST:.0%} of its time in floors.",
        ],
    )
