"""Jobs over the tunnel, each run once: what is finished is kept under ``build`` and read again.

A run is known by its inputs and by the product's own source, so that nothing measured on other code
is passed off as this one's. It is run again, once, when its links were not as asked.
"""

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.warm import warm_starts
from hypergpu.cli.compare.runs import NetsimRun, execute_run, kept_report, prospect
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, RemoteFailureError
from hypergpu.ids import Digest
from netsim.link.error import NetsimError
from netsim.run.report import RunReport
from netsim.tunnel.device import require_tunnel

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
        except NetsimError as refused:
            raise BenchmarkError(f"{refused.detail}. Fix: {refused.fix}") from refused
        self._folder = folder
        self._product = product_digest()
        self._starts = ExitStack()
        atexit.register(self._starts.close)
        self._warm: Mapping[str, str] = {}
        self.invalid: list[str] = []
        """Runs that were late each time."""

    def cold_report(self, name: str, world: Path, words: Sequence[str]) -> RunReport:
        """RunReport a run over the tunnel in which programs start as they do for people."""
        self._starts.close()
        return self._checked_report(name, world, words, backend="tunnel")

    def report(self, name: str, world: Path, words: Sequence[str], *, backend: str) -> RunReport:
        """RunReport a run whose workers and evaluator start with torch loaded.

        Its times count from the first round, so that starting is no part of them.
        """
        if not self._warm:
            self._warm = self._starts.enter_context(warm_starts())
            self._starts.callback(self._cool)
            os.environ.update(self._warm)
        return self._checked_report(name, world, words, backend=backend)

    def _cool(self) -> None:
        for name in self._warm:
            os.environ.pop(name, None)
        self._warm = {}

    def _checked_report(
        self, name: str, world: Path, words: Sequence[str], *, backend: str
    ) -> RunReport:
        """Run, or read what was kept.

        Args:
            name: Names its folder; the same name with other inputs is another run.
            world: A world file.
            words: More options of ``netsim run``.
            backend: ``tunnel``, or ``proxy`` for what needs no true links, or ``world``.

        Raises:
            LateError: Its links were not as asked, the second time either.
            BenchmarkError: It did not end as a run ends.
        """
        given = (str(world), "--backend", backend, "--give-up-after", "3000", *words)
        run = NetsimRun(name, given)
        sys.stderr.write(f"{name}: ")
        sys.stderr.flush()
        try:
            report = self._report(run, is_timed=backend == "tunnel")
        except (RemoteFailureError, HyperGPUError) as failed:
            sys.stderr.write("failed\n")
            raise BenchmarkError(f"{name}: {failed}") from failed
        sys.stderr.write(f"{_summary(report)}\n")
        if backend == "tunnel" and not report.verdict.is_valid:
            self.invalid.append(name)
            raise LateError(f"{name}: {report.verdict.sentence}")
        return report

    def _report(self, run: NetsimRun, *, is_timed: bool) -> RunReport:
        inputs = prospect(run, self._folder).inputs if is_timed else " ".join(run.words)
        key = digest_of(f"{inputs} {self._product}".encode())
        if kept := kept_report(run, key, self._folder):
            sys.stderr.write("kept, ")
            return kept
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
    found: list[T] = []
    late: list[LateError] = []
    for seed in seeds:
        try:
            found.append(measure(seed))
        except LateError as each:
            late.append(each)
    if not found:
        raise late[-1]
    return found


def product_digest() -> Digest:
    """Digest of every line of Python that a run executes."""
    paths = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    listing = (f"{path.relative_to(ROOT)} {digest_of(path.read_bytes())}" for path in paths)
    return digest_of("\n".join(listing).encode())


def _summary(report: RunReport) -> str:
    seconds = report.rounds[-1].ended_ms / 1000 if report.rounds else 0.0
    doubt = "" if report.verdict.is_valid else " (INVALID)"
    there = report.to_target
    reached = "" if there is None else f", target after {there.at_ms / 1000:.1f} s"
    metric = "" if report.metric is None else f", {report.metric_name} {report.metric:.3f}"
    return f"{len(report.rounds)} rounds in {seconds:.1f} s{metric}{reached}{doubt}"
