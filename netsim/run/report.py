"""The report of a world's job, whichever backend ran it."""

import statistics
from collections.abc import Iterator

import msgspec

from hypergpu.units import several
from hypergpu.user.client.history import EvaluationPoint, Reached, RoundPoint
from hypergpu.user.terminal.output import say, say_json, size
from netsim.measure.lateness import LatenessVerdict

UNFINISHED_STATUS = 1
NOTHING_TRAINED = "virtual time trains nothing: there is no metric, and no target is reached"


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that `--dry-run` describes and does not start."""

    world: str
    seed: int
    backend: str
    nodes: int
    workload: str
    strategy: str
    rounds: int
    target: float
    """0: none."""
    metric_name: str
    inputs: str
    """Digest of everything that decides the run except this machine and the program versions."""


class BatchChange(msgspec.Struct, frozen=True):
    """A batch that a plan gave a node, other than the one before."""

    node: str
    round: int
    """Counts from 1."""
    batch_size: int
    micro_batch: int
    """Most of them in memory at once; 0: all."""
    reason: str
    """Reason of the node's whole part of the round."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a world."""

    world: str
    seed: int
    backend: str
    phase: str
    """The job's phase at the end."""
    reason: str
    rounds: tuple[RoundPoint, ...]
    metric: float | None
    """Metric of the last model; a job that trains nothing has none."""
    verdict: LatenessVerdict
    journal: str = ""
    """Digest of a virtual job's journal: equal worlds give equal ones."""
    strategy: str = ""
    metric_name: str = ""
    target: float = 0.0
    """0: none was set."""
    evaluations: tuple[EvaluationPoint, ...] = ()
    batches: tuple["BatchChange", ...] = ()
    """Batches of nodes that plans changed, in virtual time."""
    to_target: Reached | None = None
    """None: the target was not reached, or there is none."""
    note: str = ""
    """Limits of the figures above."""

    @property
    def is_good(self) -> bool:
        """Whether the job finished over links that kept their times."""
        return self.phase == "finished" and self.verdict.is_valid


def say_report(report: RunReport, *, is_json: bool) -> int:
    """Print a report and return the exit status: 1 when the job ended otherwise than it should."""
    if is_json:
        say_json(report)
    else:
        for line in summary_lines(report):
            say(line)
    return 0 if report.is_good else UNFINISHED_STATUS


def summary_lines(report: RunReport) -> list[str]:
    """Return the report as lines for people."""
    lines = ["", f"world      {report.world}, seed {report.seed}, over {report.backend}"]
    lines += _round_lines(report)
    for each in report.batches:
        lines.append(f"batch      round {each.round}, {each.node}: {each.reason}")
    if report.metric is not None:
        lines.append(f"metric     {report.metric:.4f} on held-out data")
    lines += _target_lines(report)
    lines.append(f"job        {report.phase}" + (f": {report.reason}" if report.reason else ""))
    if report.journal:
        lines.append(f"journal    {report.journal}")
    if report.note:
        lines.append(f"note       {report.note}")
    lines.append(f"links      {report.verdict.sentence}")
    return lines


def _round_lines(report: RunReport) -> Iterator[str]:
    seconds = [each.duration_ms / 1000 for each in report.rounds]
    if not seconds:
        return
    median_s = statistics.median(seconds)
    yield (
        f"rounds     {len(seconds)}; a round took {median_s:.2f} s at the median,"
        f" {min(seconds):.2f} to {max(seconds):.2f} s, {sum(seconds):.1f} s in all"
    )
    updates = sum(each.updates for each in report.rounds)
    expected_updates = sum(each.participants for each in report.rounds)
    if expected_updates:
        yield f"updates    {updates} of {expected_updates} were in before their round closed"
        up = sum(each.bytes_up for each in report.rounds)
        down = [each.bytes_down for each in report.rounds if each.bytes_down is not None]
        yield f"traffic    {size(up)} up" + (f", {size(sum(down))} down" if down else "")


def _target_lines(report: RunReport) -> Iterator[str]:
    if not report.target or report.note == NOTHING_TRAINED:
        return
    there = report.to_target
    if there is None:
        yield f"target     {report.target:g} was not reached"
        return
    yield (
        f"target     {report.target:g} after {there.at_ms / 1000:.1f} s,"
        f" {several(there.rounds, 'round')}, {there.samples} samples,"
        f" {size(there.bytes_up)} up, {size(there.bytes_down)} down"
    )
