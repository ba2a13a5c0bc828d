"""What a target costs besides time: bytes, samples, accuracy."""

import statistics
from collections.abc import Sequence

from benchmarks.ours.awareness.figures import target_of, times
from benchmarks.ours.awareness.naive import DIGITS, GRADES, reached_by_sync
from benchmarks.ours.awareness.runs import Runs, of_seeds
from benchmarks.table.parts import PartFigures
from hypergpu.client.history import Reached
from netsim.run.report import RunReport

PROMISED_BOTH, PROMISED_UP, PROMISED_SAMPLES = 200, 1000, 1.5
PROMISED_ERROR = 0.25
GRADE = "c"
NAIVE_STEPS = 224
"""Two thirds of the samples that the job states: it may take half as many again."""


def economy_figures(runs: Runs, *, seeds: int) -> PartFigures:
    """Bytes a sample, samples and accuracy on grade C, against every-step synchronisation."""
    numbers = range(1, seeds + 1)
    naive = [reached_by_sync(runs, seed) for seed in numbers]
    reports = of_seeds(numbers, lambda seed: aware_report(runs, seed))
    ours = [target_of(report, "aware") for report in reports]
    both = _a_sample(naive, is_up_only=False) / _a_sample(ours, is_up_only=False)
    up = _a_sample(naive, is_up_only=True) / _a_sample(ours, is_up_only=True)
    samples = statistics.median(each.samples for each in ours) / statistics.median(
        each.samples for each in naive
    )
    errors = [error for report in reports for error in forecast_errors(report)]
    metrics = {
        "bytes_ratio_both": both,
        "bytes_ratio_up": up,
        "samples_to_target_ratio": samples,
    }
    rows = [
        ("C: bytes a sample, both ways", "", "", times(both), f"{PROMISED_BOTH}x"),
        ("C: bytes a sample, up", "", "", times(up), f"{PROMISED_UP}x"),
        ("C: samples to 97 % over naive's", "", "", f"{samples:.2f}x", ""),
    ]
    if errors:
        metrics["forecast_mape"] = statistics.fmean(errors)
        found = f"{statistics.fmean(errors):.1%}"
        rows.append(("C: forecasts off by", found, "", "", f"{PROMISED_ERROR:.0%}"))
    return PartFigures(rows=rows, metrics=metrics)


def accuracy_figures(runs: Runs, *, seeds: int) -> PartFigures:
    """Best accuracy on grade C of all the job's work, beside that of naive training with fewer
    samples.
    """
    numbers = range(1, seeds + 1)
    ours = of_seeds(numbers, lambda seed: _to_the_end(runs, seed))
    naive = [_naive_to_the_end(runs, seed) for seed in numbers]
    best, other = (statistics.fmean(_best(each) for each in every) for every in (ours, naive))
    samples = statistics.median(_samples(each) for each in ours) / _samples(naive[0])
    gap = other - best
    said = (f"{best:.1%}", f"{other:.1%}", f"{100 * gap:.1f} points", "1 point")
    note = f"Accuracy: means of the best of all evaluations, naive's of {NAIVE_STEPS} steps."
    return PartFigures(
        rows=[
            ("C: best accuracy, naive's beside it", *said),
            ("   with so many of its samples", "", "", f"{samples:.2f}x", f"{PROMISED_SAMPLES}x"),
        ],
        metrics={"accuracy_gap": gap, "samples_ratio": samples},
        notes=[note],
    )


def aware_report(runs: Runs, seed: int) -> RunReport:
    """Our own run to the target, with every node well."""
    words = ["--job", str(DIGITS), "--strategy", "aware", "--seed", str(seed)]
    path = GRADES / f"{GRADE}.toml"
    return runs.report(f"aware-{seed}-{GRADE}", path, words, backend="tunnel")


def forecast_errors(report: RunReport) -> list[float]:
    """Errors after the tenth forecast; in a shorter job, those of its second half."""
    known = [each.forecast_error for each in report.rounds if each.forecast_error is not None]
    return known[10:] or known[len(known) // 2 :]


def _a_sample(points: Sequence[Reached], *, is_up_only: bool) -> float:
    moved = sum(each.bytes_up + (0 if is_up_only else each.bytes_down) for each in points)
    return moved / sum(each.samples for each in points)


def _to_the_end(runs: Runs, seed: int) -> RunReport:
    words = ["--strategy", "aware", "--seed", str(seed), "--target", "0"]
    path = GRADES / f"{GRADE}.toml"
    return runs.report(f"aware-{seed}-end", path, words, backend="tunnel")


def _naive_to_the_end(runs: Runs, seed: int) -> RunReport:
    words = ["--strategy", "sync", "--seed", str(seed), "--target", "0"]
    words += ["--rounds", str(NAIVE_STEPS), "--lan"]
    return runs.report(f"sync-{seed}-end", GRADES / "a.toml", words, backend="proxy")


def _samples(report: RunReport) -> int:
    return sum(each.samples for each in report.rounds)


def _best(report: RunReport) -> float:
    return max((each.metric or 0.0 for each in report.evaluations), default=0.0)
