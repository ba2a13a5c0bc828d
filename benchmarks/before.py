"""Time to the target of the build before over this one's: same lines, same job, by turns.

Both run `aware`. The figure is of the job without an optimizer's name, so that each build's default
counts; beside it stand the same optimizer in both, and Muon at its own rate for this build.
"""

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.ours.awareness.before import BEFORE, EarlierRun, earlier_seconds, require_worktree
from benchmarks.ours.awareness.runs import (
    COLUMNS,
    DIGITS,
    MUON_RATE,
    ROOT,
    Row,
    Runs,
    aware_report,
    by_turns,
    muon_job,
    run_name,
    spread,
    target_of,
    times,
    write_job,
)
from benchmarks.ours.job_files import job_tree
from benchmarks.ours.table import BenchmarkParts, PartFigures
from hypergpu.jobfile.reading import read_job_file

GRADES = ("c", "d")
PROMISED = 1.5
FOLDER = ROOT / "build" / "before-runs"
"""Holds the runs of the newest measurement alone: all are of one day and by turns."""

EARLIER, DEFAULT, SAME, MUON = "before", "default", "same", "muon"


def default_job() -> Path:
    """The job by this build's default optimizer; the stated file where that states the same."""
    tree = job_tree(DIGITS)
    tree["inner"].pop("optimizer", None)
    path = write_job(tree, f"{DIGITS.stem}-default")
    return DIGITS if read_job_file(path) == read_job_file(DIGITS) else path


def grade_figures(grade: str, *, seeds: int) -> PartFigures:
    """One grade's lines.

    Raises:
        BenchmarkError: The build before cannot be had, or a run failed.
    """
    require_worktree()
    folder = FOLDER / grade
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runs = Runs(folder)

    def ours_s(job: Path, seed: int) -> float:
        report = aware_report(runs, grade, seed, job)
        return target_of(report, run_name("aware", seed, grade, job)).at_ms / 1000

    contenders: dict[str, Callable[[int], float]] = {
        EARLIER: lambda seed: earlier_seconds(EarlierRun(grade, seed), folder),
        SAME: partial(ours_s, DIGITS),
        MUON: partial(ours_s, muon_job()),
    }
    if (job := default_job()) != DIGITS:
        contenders[DEFAULT] = partial(ours_s, job)
    seconds = by_turns(contenders, range(1, seeds + 1))
    return PartFigures(
        rows=_rows(grade, seconds),
        metrics=metrics_of(grade, seconds),
        notes=[f"{grade.upper()}: {runs.note()}"],
    )


def metrics_of(grade: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of the build before over those of this one."""
    before_s = statistics.median(seconds[EARLIER])
    ratios = {name: before_s / statistics.median(each) for name, each in seconds.items()}
    key = f"tta_over_before_{grade}"
    return {
        key: ratios.get(DEFAULT, ratios[SAME]),
        f"{key}_same_optimizer": ratios[SAME],
        f"{key}_muon": ratios[MUON],
    }


def _rows(grade: str, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    before_s = statistics.median(seconds[EARLIER])
    titles = {DEFAULT: "its default optimizer", SAME: "AdamW in both", MUON: "Muon for ours"}
    return [
        (
            f"{grade.upper()}: to 97 %, {title}",
            spread(seconds[name]),
            spread(seconds[EARLIER]),
            times(before_s / statistics.median(seconds[name])),
            f"{PROMISED}x",
        )
        for name, title in titles.items()
        if name in seconds
    ]


def parts(is_quick: bool) -> BenchmarkParts:
    """A part for each grade."""
    seeds = 1 if is_quick else 3
    return BenchmarkParts(
        title=f"Time to the target against the build of commit {BEFORE}",
        columns=COLUMNS,
        parts={grade: partial(grade_figures, grade, seeds=seeds) for grade in GRADES},
        notes=lambda: [
            f"{seeds} seeds by turns, real packets, `aware` in both, the same job and lines.",
            f"Muon: learning rate {MUON_RATE:g}; else AdamW at the stated one.",
        ],
    )
