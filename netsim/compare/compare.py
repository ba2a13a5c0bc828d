"""A comparison from beginning to end: the runs of netsim behind it are planned, started, kept,
reported.
"""

import re
import signal
import sys
from pathlib import Path
from shutil import copyfile, rmtree
from subprocess import Popen, TimeoutExpired
from typing import NamedTuple

import msgspec

from hypergpu.command_line import program
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.ids import Digest
from hypergpu.jobfile.reading import read_job_file
from hypergpu.jobfile.spec import STRATEGIES
from hypergpu.jobfile.toml import join_words, suggestion
from hypergpu.leash import leash_command
from hypergpu.units import several
from hypergpu.user.client.settings import comparisons_folder
from hypergpu.user.cluster.folder import RunFolder, require_own, run_folder
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.user.terminal.commands import usage_error
from hypergpu.user.terminal.output import note, say, say_json, say_table
from netsim.compare.chart import comparison_svg
from netsim.compare.outcome import (
    Comparison,
    StrategyRun,
    UnmeasuredError,
    footnotes,
    outcome,
    outcome_text,
    standings,
    standings_table,
)
from netsim.run.report import PlannedRun, RunReport

BACKENDS = ("proxy", "tunnel", "tc")
NAIVE = "sync"
"""The baseline wherever it is among the strategies."""
END_WITHIN_S = 60.0
_ERROR = re.compile(r"^(?:\x1b\[\d+m)?error (\d+): (.*?)\.? Fix: (.*?)(?:\x1b\[0m)?$")
_REPORT = "report.json"
_ERRORS = "netsim.err"
_STATE = "state"
"""What a run leaves beside its logs: the models of a job that nobody will go on with."""


class ComparisonOrder(NamedTuple):
    """A comparison as the command line states it."""

    job: Path
    world: Path
    strategies: tuple[str, ...]
    seeds: int
    """Runs a strategy, by the seeds from 1 on."""
    backend: str
    target: float | None
    """None: the job's own."""
    out: Path
    sync_steps: int
    """Inner steps of `sync` that are measured over the links; 0: all that it takes."""
    worker: str
    give_up_after_s: float

    @property
    def baseline(self) -> str:
        """The strategy that the others are told in multiples of."""
        return NAIVE if NAIVE in self.strategies else self.strategies[0]

    def check(self) -> None:
        """Refuse strategies and backends that do not exist.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, with the choices.
        """
        for strategy in self.strategies:
            if strategy not in STRATEGIES:
                raise usage_error(
                    f'there is no strategy "{strategy}"', suggestion(strategy, STRATEGIES)
                )
        if not self.strategies:
            raise usage_error("there is nothing to compare", "name some: --strategies sync,aware")
        if len(set(self.strategies)) < len(self.strategies):
            raise usage_error("a strategy is named twice", "name each once")
        if self.backend not in BACKENDS:
            detail = f"--backend {self.backend}: nothing is trained there"
            raise usage_error(detail, f"choose one of {join_words(BACKENDS)}")


class NetsimRun(NamedTuple):
    """One run of netsim."""

    name: str
    words: tuple[str, ...]
    """Arguments of `netsim run`, without its output folder."""


def planned_runs(order: ComparisonOrder, strategy: str, seed: int) -> tuple[NetsimRun, ...]:
    """The runs behind one number: one; or for `sync` its steps on a LAN, and their time here."""
    name = f"{strategy}-{seed}"
    shared_options = (
        *(str(order.world), "--job", str(order.job), "--strategy", strategy, "--seed", str(seed)),
        *("--worker", order.worker, "--give-up-after", str(order.give_up_after_s)),
    )
    goal = () if order.target is None else ("--target", str(order.target))
    if strategy != NAIVE or not order.sync_steps:
        return (NetsimRun(name, (*shared_options, "--backend", order.backend, *goal)),)
    # The first step begins with everybody fetching the model: it is taken and left out.
    few = ("--backend", order.backend, "--target", "0", "--rounds", str(order.sync_steps + 1))
    return (
        NetsimRun(f"{name}-lan", (*shared_options, "--lan", "--backend", "proxy", *goal)),
        NetsimRun(f"{name}-steps", (*shared_options, *few)),
    )


def seed_runs(order: ComparisonOrder, seed: int) -> list[NetsimRun]:
    """Every run by one seed."""
    return [run for strategy in order.strategies for run in planned_runs(order, strategy, seed)]


class KeptReport(msgspec.Struct, frozen=True):
    """A finished run on disk."""

    key: str
    """Digest of the run's inputs."""
    report: RunReport


def prospect(run: NetsimRun, folder: Path) -> PlannedRun:
    """Check a run and describe it, without starting it.

    Raises:
        RemoteFailureError: netsim refuses it, and says why.
    """
    try:
        text = _output(run, ["--dry-run"], folder / run.name)
    except RemoteFailureError as error:
        # What is refused before anything is run is no single run's fault.
        what = error.detail.removeprefix(f"{run.name}: ")
        raise RemoteFailureError(number=error.number, detail=what, fix=error.fix) from error
    return msgspec.json.decode(text, type=PlannedRun)


def kept_report(run: NetsimRun, key: Digest, folder: Path) -> RunReport | None:
    """The report of an earlier run with the same inputs; None when there is none."""
    try:
        stored_report = msgspec.json.decode(
            (folder / run.name / _REPORT).read_bytes(), type=KeptReport
        )
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return stored_report.report if stored_report.key == key else None


def execute_run(run: NetsimRun, key: Digest, folder: Path) -> RunReport:
    """Run it and keep its report.

    Raises:
        RemoteFailureError: netsim refused it or gave up.
        HyperGPUError: CHILD_ENDED, it ended without saying why.
    """
    place = folder / run.name
    (place / _REPORT).unlink(missing_ok=True)
    report = msgspec.json.decode(_output(run, [], place), type=RunReport)
    rmtree(place / _STATE, ignore_errors=True)
    partial = place / f"{_REPORT}.part"
    partial.write_bytes(msgspec.json.encode(KeptReport(key, report)))
    partial.replace(place / _REPORT)
    return report


def _output(run: NetsimRun, more: list[str], place: Path) -> str:
    place.mkdir(parents=True, exist_ok=True)
    (place / _ERRORS).write_bytes(b"")
    words = ["run", *run.words, "--out", str(place), "--json", *more]
    child = start(leash_command(program("netsim", *words)), log=place / _ERRORS, is_read=True)
    try:
        text, _ = child.communicate()
    except BaseException:
        _end(child)
        raise
    # A job that missed its end, and links that were not as asked, are a status of 1 and a report.
    if not text.strip():
        raise _failure(run, child.returncode, place / _ERRORS)
    return text


def _end(child: "Popen[str]") -> None:
    """Let it take its links and programs down."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.communicate(timeout=END_WITHIN_S)
    except TimeoutExpired:
        kill_group(child)


def _failure(run: NetsimRun, status: int, errors: Path) -> Exception:
    for line in reversed(errors.read_text("utf-8", "replace").splitlines()):
        if match := _ERROR.match(line):
            what = f"{run.name}: {match[2]}"
            return RemoteFailureError(number=int(match[1]), detail=what, fix=match[3])
    detail = f"{run.name} ended with status {status} and without a report"
    return HyperGPUError(Reason.CHILD_ENDED, detail, fix=f"read {errors}")


JSON_NAME = "compare.json"
CHART_NAME = "compare.svg"
_MARK = ".hypergpu-compare"
_RUNS = "runs"


class ComparisonFiles(NamedTuple):
    """Files that a comparison leaves."""

    json: Path
    chart: Path


def run_comparison(order: ComparisonOrder, *, as_json: bool) -> Comparison:
    """Run what has not been run, one after the other, and print it side by side.

    Raises:
        HyperGPUError: The order, the job, the world and this machine do not fit; or a run failed.
    """
    order.check()
    # SIGTERM ends this program as Ctrl-C does, with everything that it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        comparison, files = _run_comparison(order)
    except KeyboardInterrupt:
        note(f"what is finished is kept in {order.out}; the same command goes on from there")
        raise
    if as_json:
        say_json(comparison)
        return comparison
    say()
    say_table(*standings_table(comparison), empty="nothing was compared")
    for line in footnotes(comparison):
        say(line)
    say(f"written: {files.json}, {files.chart}")
    return comparison


def _run_comparison(order: ComparisonOrder) -> tuple[Comparison, ComparisonFiles]:
    read_job_file(order.job)
    require_own(RunFolder(order.out, _MARK, (_RUNS, JSON_NAME, CHART_NAME)))
    # Nothing of an earlier comparison is removed: what is finished need not be run again.
    with run_folder(RunFolder(order.out, _MARK, ())):
        prospects = _prospects(order)
        reports = _reports(order, prospects)
        comparison = _comparison(order, prospects, reports)
        return comparison, _write_files(comparison, order.out)


def _prospects(order: ComparisonOrder) -> list[PlannedRun]:
    """Prospects of the first seed's runs, so that errors come before anything is run."""
    prospects = [prospect(run, order.out / _RUNS) for run in seed_runs(order, 1)]
    if not any(each.target for each in prospects):
        fix = "give --target 0.97, or target in the job file's [evaluation]"
        raise usage_error("there is no target to be first at", fix)
    return prospects


def _reports(order: ComparisonOrder, prospects: list[PlannedRun]) -> dict[str, RunReport]:
    """All of a seed before the next: half a comparison compares something already."""
    reports: dict[str, RunReport] = {}
    folder = order.out / _RUNS
    for seed in range(1, order.seeds + 1):
        for run, planned_run in zip(seed_runs(order, seed), prospects, strict=True):
            number = f"{len(reports) + 1}/{order.seeds * len(prospects)}"
            _say_piece(f"[{number}] {run.name}: ")
            key = digest_of(f"{planned_run.inputs} {seed}".encode())
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
    planned_run = next(each for each in prospects if each.target)
    return Comparison(
        job=order.job.stem,
        workload=planned_run.workload,
        world=planned_run.world,
        backend=order.backend,
        metric_name=planned_run.metric_name,
        target=planned_run.target,
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
    _copy_for_page(files.json)
    return files


def _copy_for_page(result: Path) -> None:
    """Leave a copy where the page looks; the same output folder has one copy."""
    folder = comparisons_folder()
    name = f"{result.parent.resolve().name}-{digest_of(bytes(result.resolve()))[:8]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        copyfile(result, folder / name)
    except OSError as full:
        note(f"the page's Compare will not show it: {folder}: {full.strerror}")
