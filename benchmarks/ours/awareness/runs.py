"""Jobs over the tunnel, each run once and kept under ``build``, and the figures told of them.

A run is known by its inputs and by the product's own source, so that nothing measured on other
code is passed off as this one's. It is run again, once, when its links were not as asked. Naive
training is a few measured steps over the lines, as often as a target takes on this machine's
loopback: running all of them would take hours and tell nothing more.
"""

import atexit
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.job_files import job_tree, text_of
from benchmarks.ours.warm import warm_starts
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, RemoteFailureError
from hypergpu.ids import Digest
from hypergpu.user.client.history import Reached
from netsim.compare.compare import NetsimRun, execute_run, kept_report, prospect
from netsim.compare.outcome import step_time_us
from netsim.link import NetsimError
from netsim.run.report import RunReport
from netsim.tunnel.tunnel import require_tunnel

ROOT = Path(__file__).parents[3]
WORLDS = ROOT / "benchmarks" / "worlds"
KEPT = ROOT / "build" / "awareness"
PRODUCT = ("coordinator", "gpu_node", "hypergpu", "netsim")
TRIES = 2

T = TypeVar("T")


class LateError(BenchmarkError):
    """A run's links were late each time: its times mean nothing, and no figure rests on them."""


class Runs:
    """Runs what it has not yet run."""

    def __init__(self, folder: Path = KEPT) -> None:
        """Refuse a machine that cannot build the tunnel.

        Raises:
            BenchmarkError: With the fix.
        """
        try:
            require_tunnel()
        except NetsimError as error:
            raise BenchmarkError(f"{error.detail}. Fix: {error.fix}") from error
        self._folder = folder
        self._product = product_digest()
        self._warm = ExitStack()
        self._is_warm = False
        atexit.register(self._warm.close)
        self.invalid: list[str] = []
        """Runs that were late each time."""

    def report(
        self,
        name: str,
        world: Path,
        words: Sequence[str],
        *,
        backend: str,
        is_warm: bool = True,
    ) -> RunReport:
        """Run, or read what was kept.

        Args:
            name: Names its folder; the same name with other inputs is another run.
            world: A world file.
            words: More options of ``netsim run``.
            backend: ``tunnel``, or ``proxy`` for what needs no true links, or ``world``.
            is_warm: Start workers and evaluator with torch loaded. Times count from the first
                round, so that this changes no figure unless nodes start again later.

        Raises:
            LateError: Its links were not as asked, the second time either.
            BenchmarkError: It did not end as a run ends.
        """
        if is_warm and not self._is_warm:
            self._warm.enter_context(warm_starts())
        elif not is_warm:
            self._warm.close()
        self._is_warm = is_warm
        run_words = (str(world), "--backend", backend, "--give-up-after", "3000", *words)
        run = NetsimRun(name, run_words)
        sys.stderr.write(f"{name}: ")
        sys.stderr.flush()
        try:
            report = self._report(run, is_timed=backend == "tunnel")
        except (RemoteFailureError, HyperGPUError) as error:
            sys.stderr.write("failed\n")
            raise BenchmarkError(f"{name}: {error}") from error
        sys.stderr.write(f"{_summary(report)}\n")
        if backend == "tunnel" and not report.verdict.is_valid:
            self.invalid.append(name)
            raise LateError(f"{name}: {report.verdict.sentence}")
        return report

    def _report(self, run: NetsimRun, *, is_timed: bool) -> RunReport:
        inputs = prospect(run, self._folder).inputs if is_timed else " ".join(run.words)
        key = digest_of(f"{inputs} {self._product}".encode())
        if stored_report := kept_report(run, key, self._folder):
            sys.stderr.write("kept, ")
            return stored_report
        report = execute_run(run, key, self._folder)
        for _ in range(TRIES - 1):
            if report.verdict.is_valid or not is_timed:
                break
            report = execute_run(run, key, self._folder)
        return report

    def note(self) -> str:
        """On what the figures rest."""
        late = f" Late each time and left out: {', '.join(self.invalid)}." if self.invalid else ""
        return f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.{late}"


def of_seeds(seeds: Iterable[int], measure: Callable[[int], T]) -> list[T]:
    """What was measured by each seed, without those whose links were late.

    Raises:
        LateError: All were.
    """
    results: list[T] = []
    late: list[LateError] = []
    for seed in seeds:
        try:
            results.append(measure(seed))
        except LateError as each:
            late.append(each)
    if not results:
        raise late[-1]
    return results


def product_digest() -> Digest:
    """Digest of every line of Python that a run executes."""
    paths = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    file_lines = (f"{path.relative_to(ROOT)} {digest_of(path.read_bytes())}" for path in paths)
    return digest_of("\n".join(file_lines).encode())


def _summary(report: RunReport) -> str:
    seconds = report.rounds[-1].ended_ms / 1000 if report.rounds else 0.0
    doubt = "" if report.verdict.is_valid else " (INVALID)"
    there = report.to_target
    target_text = "" if there is None else f", target after {there.at_ms / 1000:.1f} s"
    metric = "" if report.metric is None else f", {report.metric_name} {report.metric:.3f}"
    return f"{len(report.rounds)} rounds in {seconds:.1f} s{metric}{target_text}{doubt}"


def write_job(tree: Mapping[str, Any], name: str) -> Path:
    """The tables as a job file of that name."""
    path = KEPT / "jobs" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(tree), encoding="utf-8")
    return path


Row = tuple[str, str, str, str, str]
COLUMNS: Row = ("", "ours", "the other", "ratio", "promised")


class NotReachedError(BenchmarkError):
    """A run never came to its target: there is no time to tell."""


def target_of(report: RunReport, name: str) -> Reached:
    """What it took.

    Raises:
        NotReachedError: It was not reached.
    """
    if report.to_target is None:
        best = max((each.metric for each in report.evaluations if each.metric), default=0.0)
        what = f"{name} never reached {report.target:g}: {best:.3f} at best; {report.reason}"
        raise NotReachedError(what)
    return report.to_target


def spread(values: Iterable[float], unit: str = " s") -> str:
    """The median, and least to most where there are several."""
    ordered_values = sorted(values)
    middle = statistics.median(ordered_values)
    if len(ordered_values) == 1:
        return f"{middle:.3g}{unit}"
    return f"{middle:.3g} [{ordered_values[0]:.3g}..{ordered_values[-1]:.3g}]{unit}"


def times(ratio: float) -> str:
    """A ratio in three digits."""
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


GRADES = WORLDS / "grades"
VIRTUAL_STEPS = 20
DIGITS = WORLDS / "jobs" / "digits.toml"


def reached_by_sync(runs: Runs, seed: int, job: Path = DIGITS) -> Reached:
    """Steps, samples and bytes to the target; the time is that of loopback and means nothing."""
    name = run_name("sync", seed, "near", job)
    words = ["--job", str(job), "--strategy", "sync", "--seed", str(seed), "--lan"]
    return target_of(runs.report(name, GRADES / "a.toml", words, backend="proxy"), name)


def aware_report(runs: Runs, grade: str, seed: int, job: Path = DIGITS) -> RunReport:
    """Report a run of our own to the target, with every node well."""
    words = ["--job", str(job), "--strategy", "aware", "--seed", str(seed)]
    name = run_name("aware", seed, grade, job)
    return runs.report(name, GRADES / f"{grade}.toml", words, backend="tunnel")


def naive_step_s(
    runs: Runs, grade: str, steps: int, job: Path = DIGITS, *, connections: int = 1
) -> float:
    """Seconds of a step over a grade's lines; the first, with its model's download, is left out.

    Args:
        runs: Keeps what is measured.
        grade: A file of `GRADES`.
        steps: How many are measured; 0: none, many are played in virtual time instead.
        job: What is trained.
        connections: Of each node.
    """
    path = _job_over(job, connections)
    words = ["--job", str(path), "--strategy", "sync", "--seed", "1", "--target", "0"]
    words += ["--rounds", str((steps or VIRTUAL_STEPS) + 1)]
    name = run_name("sync", 1, grade if steps else f"{grade}-virtual", job)
    backend = "tunnel" if steps else "world"
    report = runs.report(
        f"{name}-over-{connections}", GRADES / f"{grade}.toml", words, backend=backend
    )
    return step_time_us(report) / 1e6


def _job_over(job: Path, connections: int) -> Path:
    tree = job_tree(job)
    tree["strategy"] = "sync"
    tree["training"].pop("inner_steps", None)
    tree["round"] = {"connections": connections}
    tree.pop("outer", None)
    tree.pop("aware", None)
    return write_job(tree, f"{job.stem}-sync-over-{connections}")


def run_name(strategy: str, seed: int, place: str, job: Path) -> str:
    """What a run is called: the digits, which most runs train, are not named."""
    task = "" if job == DIGITS else f"{job.stem}-"
    return f"{task}{strategy}-{seed}-{place}"


MUON_RATE = 0.001
"""Best of 0.00025 to 0.002 by rounds of 28 steps in one process: docs/log.md, 2026-11-29."""


def muon_job() -> Path:
    """The job with Muon for hidden weights."""
    tree = job_tree(DIGITS)
    tree["inner"] |= {"optimizer": "muon", "learning_rate": MUON_RATE}
    return write_job(tree, f"{DIGITS.stem}-muon")


SecondsOf = Mapping[str, Callable[[int], float]]
"""Contenders: seconds to the target by a seed."""


def by_turns(contenders: SecondsOf, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of every contender, seed after seed; a seed of which one was late is left out.

    Raises:
        LateError: Each seed was.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    late: list[LateError] = []
    for seed in seeds:
        try:
            of_seed = {name: measure(seed) for name, measure in contenders.items()}
        except LateError as error:
            late.append(error)
            continue
        for name, each in of_seed.items():
            seconds[name].append(each)
    if late and len(late) == len(seeds):
        raise late[-1]
    return seconds
