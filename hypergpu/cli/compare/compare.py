"""A comparison from beginning to end."""

import signal
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.cli.compare.chart import comparison_svg
from hypergpu.cli.compare.outcome import (
    Comparison,
    StrategyRun,
    UnmeasuredError,
    outcome,
    standings,
)
from hypergpu.cli.compare.runs import (
    ComparisonOrder,
    NetsimRun,
    execute_run,
    kept_report,
    planned_runs,
    prospect,
    seed_runs,
)
from hypergpu.cli.compare.table import footnotes, outcome_text, standings_table
from hypergpu.cluster.folder import RunFolder, require_own, run_folder
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import read_job_file
from hypergpu.terminal.failure import usage_error
from hypergpu.terminal.output import note, say, say_json, say_table
from hypergpu.units import several
from netsim.run.report import PlannedRun, RunReport

JSON_NAME = "compare.json"
CHART_NAME = "compare.svg"
_MARK = ".hypergpu-compare"
_RUNS = "runs"


class ComparisonFiles(NamedTuple):
    """Files that a comparison leaves."""

    json: Path
    chart: Path


def compare(order: ComparisonOrder, *, as_json: bool) -> Comparison:
    """Run what has not been run, one after the other, and print it side by side.

    Raises:
        HyperGPUError: The order, the job, the world and this machine do not fit; or a run failed.
    """
    order.check()
    # SIGTERM ends this program as Ctrl-C does, with everything that it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found, files = _run_comparison(order)
    except KeyboardInterrupt:
        note(f"what is finished is kept in {order.out}; the same command goes on from there")
        raise
    if as_json:
        say_json(found)
        return found
    say()
    say_table(*standings_table(found), empty="nothing was compared")
    for line in footnotes(found):
        say(line)
    say(f"written: {files.json}, {files.chart}")
    return found


def _run_comparison(order: ComparisonOrder) -> tuple[Comparison, ComparisonFiles]:
    read_job_file(order.job)
    require_own(RunFolder(order.out, _MARK, (_RUNS, JSON_NAME, CHART_NAME)))
    # Nothing of an earlier comparison is removed: what is finished need not be run again.
    with run_folder(RunFolder(order.out, _MARK, ())):
        prospects = _prospects(order)
        reports = _reports(order, prospects)
        found = _comparison(order, prospects, reports)
        return found, _write_files(found, order.out)


def _prospects(order: ComparisonOrder) -> list[PlannedRun]:
    """Prospects of the first seed's runs, so that errors come before anything is run."""
    found = [prospect(run, order.out / _RUNS) for run in seed_runs(order, 1)]
    if not any(each.target for each in found):
        fix = "give --target 0.97, or target in the job file's [evaluation]"
        raise usage_error("there is no target to be first at", fix)
    return found


def _reports(order: ComparisonOrder, prospects: list[PlannedRun]) -> dict[str, RunReport]:
    """All of a seed before the next: half a comparison compares something already."""
    reports: dict[str, RunReport] = {}
    folder = order.out / _RUNS
    for seed in range(1, order.seeds + 1):
        for run, seen in zip(seed_runs(order, seed), prospects, strict=True):
            number = f"{len(reports) + 1}/{order.seeds * len(prospects)}"
            _say_piece(f"[{number}] {run.name}: ")
            key = digest_of(f"{seen.inputs} {seed}".encode())
            report = kept_report(run, key, folder)
            was_kept = " (kept)" if report else ""
            try:
                report = report or execute_run(run, key, folder)
            except BaseException:
                _say_piece("\n")
                raise
            reports[run.name] = report
            _say_piece(f"{_outcome_line(report)}{was_kept}\n")
    return reports


def _say_piece(text: str) -> None:
    """Write a part of a line for the person, at once visible."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _outcome_line(report: RunReport) -> str:
    if report.target:
        return outcome_text(outcome([report]))
    doubt = "" if report.verdict.is_valid else "; INVALID"
    steps = max(0, len(report.rounds) - 1)
    spent_ms = report.rounds[-1].ended_ms - report.rounds[0].ended_ms if steps else 0
    return f"{several(steps, 'step')} in {spent_ms / 1000:.1f} s{doubt}"


def _comparison(
    order: ComparisonOrder, prospects: list[PlannedRun], reports: dict[str, RunReport]
) -> Comparison:
    outcomes = [
        _outcome(planned_runs(order, strategy, seed), reports)
        for strategy in order.strategies
        for seed in range(1, order.seeds + 1)
    ]
    seen = next(each for each in prospects if each.target)
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


def _outcome(behind: tuple[NetsimRun, ...], reports: dict[str, RunReport]) -> StrategyRun:
    try:
        return outcome([reports[each.name] for each in behind])
    except UnmeasuredError as short:
        detail = f"{behind[-1].name}: {short}"
        raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, detail, fix="see its logs") from short


def _write_files(found: Comparison, out: Path) -> ComparisonFiles:
    files = ComparisonFiles(out / JSON_NAME, out / CHART_NAME)
    text = msgspec.json.format(msgspec.json.encode(found), indent=2)
    files.json.write_bytes(text + b"\n")
    files.chart.write_text(comparison_svg(found), "utf-8")
    return files
