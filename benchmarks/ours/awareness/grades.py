"""Time to accuracy on the four grades of lines: ``aware`` against ``sync``."""

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.awareness.figures import spread, target_of, times
from benchmarks.ours.awareness.naive import DIGITS, GRADES, naive_step_s, reached_by_sync, run_name
from benchmarks.ours.awareness.runs import WORLDS, Runs, of_seeds
from benchmarks.table.parts import PartFigures, measure_part, merge_figures
from hypergpu.jobfile import read_job_file

TEXT = WORLDS / "jobs" / "text.toml"
PROMISED = {"a": 5, "b": 10, "c": 30, "d": 30}
BESIDE = {"c-independent": "C, losses one by one", "c-bbr": "C between hosts with BBR"}
"""Second columns: no promise rests on them."""
CONNECTIONS = {"a": 4, "b": 16, "c": 16, "d": 16, "c-independent": 16, "c-bbr": 1}
"""Connections of each naive node, as plans give on the same lines."""


class SeedsAndSteps(NamedTuple):
    """How much is measured."""

    seeds: int
    steps: int
    """Measured steps of the naive strategy over the grades A to C."""
    slow_steps: int
    """The same over D."""

    def steps_of(self, grade: str) -> int:
        """Over one grade."""
        return self.slow_steps if grade == "d" else self.steps


QUICK = SeedsAndSteps(seeds=1, steps=4, slow_steps=2)
WHOLE = SeedsAndSteps(seeds=3, steps=10, slow_steps=4)


def aware_seconds(runs: Runs, grade: str, seed: int, job: Path = DIGITS) -> float:
    """Time to the target, counted from the opening of the first round."""
    name = run_name("aware", seed, grade, job)
    words = ["--job", str(job), "--strategy", "aware", "--seed", str(seed)]
    report = runs.report(name, GRADES / f"{grade}.toml", words, backend="tunnel")
    return target_of(report, name).at_ms / 1000


def aware_median_s(runs: Runs, grade: str, seeds: int) -> float:
    """The same, the middle of the seeds from 1 on."""
    every = of_seeds(range(1, seeds + 1), lambda seed: aware_seconds(runs, grade, seed))
    return statistics.median(every)


def grade_figures(runs: Runs, effort: SeedsAndSteps, *, is_quick: bool) -> PartFigures:
    """All four grades; the whole benchmark has two more worlds of grade C beside them."""
    steps = {seed: reached_by_sync(runs, seed).rounds for seed in range(1, effort.seeds + 1)}
    grades = (*PROMISED, *(() if is_quick else BESIDE))
    every = [
        measure_part(f"grade {grade}", partial(_of_one, runs, grade, effort, steps))
        for grade in grades
    ]
    return merge_figures([*every, PartFigures(notes=[_note(effort, list(steps.values()))])])


def text_figures(runs: Runs, effort: SeedsAndSteps) -> PartFigures:
    """A second task, on grade C: the byte-level GPT to a stated perplexity."""
    seeds = range(1, effort.seeds + 1)
    step_s = naive_step_s(runs, "c", effort.steps, TEXT, connections=CONNECTIONS["c"])
    naive_s = [reached_by_sync(runs, seed, TEXT).rounds * step_s for seed in seeds]
    ours_s = of_seeds(seeds, lambda seed: aware_seconds(runs, "c", seed, TEXT))
    ratio = statistics.median(naive_s) / statistics.median(ours_s)
    what = f"C: GPT to perplexity {read_job_file(TEXT).evaluation.target:g}, naive beside it"
    return PartFigures(
        rows=[(what, spread(ours_s), spread(naive_s), times(ratio), "")],
        metrics={"text_tta_ratio_c": ratio},
    )


def _of_one(runs: Runs, grade: str, effort: SeedsAndSteps, steps: Mapping[int, int]) -> PartFigures:
    several = CONNECTIONS[grade]
    step_s = naive_step_s(runs, grade, effort.steps_of(grade), connections=several)
    lone_step_s = naive_step_s(runs, grade, 0)
    naive_s = [wanted * step_s for wanted in steps.values()]
    ours_s = of_seeds(steps, lambda seed: aware_seconds(runs, grade, seed))
    ratio = statistics.median(naive_s) / statistics.median(ours_s)
    lone = ratio * lone_step_s / step_s
    key = grade.replace("-", "_")
    promise = f"{PROMISED[grade]}x" if grade in PROMISED else ""
    what = BESIDE.get(grade, f"{grade.upper()}: to 97 %, naive beside it")
    rows = [
        (f"{what}, {several} connections", spread(ours_s), spread(naive_s), times(ratio), promise)
    ]
    if several > 1:
        rows.append(("   naive over one connection", "", "", times(lone), ""))
    return PartFigures(
        rows=rows,
        metrics={
            f"tta_ratio_{key}": ratio,
            f"tta_ratio_{key}_one_connection": lone,
            f"naive_step_s_{key}": step_s,
        },
    )


def _note(effort: SeedsAndSteps, steps: list[int]) -> str:
    counted = ", ".join(map(str, steps))
    return (
        f"Naive: {effort.steps} measured steps ({effort.slow_steps} on D), times the steps that the"
        f" target took on loopback ({counted}); over one connection steps in virtual time."
    )
