"""A comparison from beginning to end."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.cli.compare.chart import comparison_svg
from hypergpu.cli.compare.comparison import Comparison, standings
from hypergpu.cli.compare.order import ComparisonOrder, Errand, all_errands, errands
from hypergpu.cli.compare.outcome import Report, StrategyRun, UnmeasuredError, outcome
from hypergpu.cli.compare.running import RunProspect, kept_report, key_of, prospect, ran
from hypergpu.cli.compare.table import columns, footnotes, outcome_text, rows
from hypergpu.cluster.folder import RunFolder, require_own, run_folder
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import read_job_file
from hypergpu.terminal.failure import usage_error
from hypergpu.terminal.output import say, say_json, say_table
from hypergpu.units import several

JSON_NAME = "compare.json"
CHART_NAME = "compare.svg"
_MARK = ".hypergpu-compare"
_RUNS = "runs"
Say = Callable[[str], None]
"""Takes pieces of lines."""


class Files(NamedTuple):
    """What a comparison leaves."""

    json: Path
    chart: Path


def run_comparison(order: ComparisonOrder, say: Say) -> tuple[Comparison, Files]:
    """Run what has not been run, one after the other, and put it side by side.

    Raises:
        HyperGPUError: The order, the job, the world and this machine do not fit; or a run failed.
    """
    read_job_file(order.job)
    require_own(RunFolder(order.out, _MARK, (_RUNS, JSON_NAME, CHART_NAME)))
    # Nothing of an earlier comparison is removed: what is finished need not be run again.
    with run_folder(RunFolder(order.out, _MARK, ())):
        prospects = _prospects(order)
        reports = _reports(order, prospects, say)
        found = _comparison(order, prospects, reports)
        return found, _write_files(found, order.out)


def _prospects(order: ComparisonOrder) -> dict[str, RunProspect]:
    """Prospects of the first seed's runs, so that errors come before anything is run."""
    found = {
        _kind(errand): prospect(errand, order.out / _RUNS)
        for strategy in order.strategies
        for errand in errands(order, strategy, 1)
    }
    if not any(each.target for each in found.values()):
        fix = "give --target 0.97, or target in the job file's [evaluation]"
        raise usage_error("there is no target to be first at", fix)
    return found


def _kind(errand: Errand) -> str:
    """What the same run is called by every seed."""
    return errand.name.replace(f"-{errand.seed}", "", 1)


def _reports(
    order: ComparisonOrder, prospects: dict[str, RunProspect], say: Say
) -> dict[str, Report]:
    reports = {}
    every = list(all_errands(order))
    folder = order.out / _RUNS
    for number, errand in enumerate(every, 1):
        say(f"[{number}/{len(every)}] {errand.name}: ")
        key = key_of(errand, prospects[_kind(errand)])
        report = kept_report(errand, key, folder)
        was_kept = " (kept)" if report else ""
        try:
            report = report or ran(errand, key, folder)
        except BaseException:
            say("\n")
            raise
        reports[errand.name] = report
        say(f"{_outcome_line(errand, report)}{was_kept}\n")
    return reports


def _outcome_line(errand: Errand, report: Report) -> str:
    if report.target:
        return outcome_text(outcome(errand.strategy, errand.seed, [report]))
    doubt = "" if report.verdict.is_valid else "; INVALID"
    steps = max(0, len(report.rounds) - 1)
    spent_ms = report.rounds[-1].ended_ms - report.rounds[0].ended_ms if steps else 0
    return f"{several(steps, 'step')} in {spent_ms / 1000:.1f} s{doubt}"


def _comparison(
    order: ComparisonOrder, prospects: dict[str, RunProspect], reports: dict[str, Report]
) -> Comparison:
    outcomes = [
        _outcome(errands(order, strategy, seed), reports)
        for strategy in order.strategies
        for seed in range(1, order.seeds + 1)
    ]
    seen = next(each for each in prospects.values() if each.target)
    return Comparison(
        job=order.job.stem,
        workload=seen.workload,
        world=seen.world,
        backend=order.backend,
        metric_name=seen.metric_name,
        target=seen.target,
        baseline=order.baseline,
        strategies=standings(order.strategies, outcomes, order.baseline),
        outcomes=outcomes,
    )


def _outcome(behind: tuple[Errand, ...], reports: dict[str, Report]) -> StrategyRun:
    first = behind[0]
    try:
        return outcome(first.strategy, first.seed, [reports[each.name] for each in behind])
    except UnmeasuredError as short:
        detail = f"{behind[-1].name}: {short}"
        raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, detail, fix="see its logs") from short


def _write_files(found: Comparison, out: Path) -> Files:
    files = Files(out / JSON_NAME, out / CHART_NAME)
    text = msgspec.json.format(msgspec.json.encode(found), indent=2)
    files.json.write_bytes(text + b"\n")
    files.chart.write_text(comparison_svg(found), "utf-8")
    return files


def tell(comparison: Comparison, files: Files, *, as_json: bool) -> None:
    """The table with what must be known to read it, or one JSON document."""
    if as_json:
        say_json(comparison)
        return
    say()
    say_table(columns(comparison), rows(comparison), empty="nothing was compared")
    for line in footnotes(comparison):
        say(line)
    say(f"written: {files.json}, {files.chart}")
