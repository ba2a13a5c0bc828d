"""What a run of a world came to, whichever backend ran it."""

import statistics
from collections.abc import Sequence

import msgspec

from hypergpu.cli.show.progress import RoundLine
from hypergpu.units import Milliseconds
from netsim.measure.network import Verdict


class RoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """One closed round."""

    number: int
    """Counts from 1."""
    duration_ms: Milliseconds
    participants: int = 0
    """0: not told, in virtual time."""
    updates: int = 0


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a world."""

    world: str
    seed: int
    backend: str
    phase: str
    """The job's at the end."""
    reason: str
    rounds: tuple[RoundReport, ...]
    metric: float | None
    """Of the last model; a job that trains nothing has none."""
    verdict: Verdict
    journal: str = ""
    """Digest of a virtual job's journal: equal worlds give equal ones."""

    @property
    def is_good(self) -> bool:
        """Whether the job ended as it should over links that were as asked."""
        return self.phase == "finished" and self.verdict.is_valid


def round_reports(lines: Sequence[RoundLine]) -> tuple[RoundReport, ...]:
    """Rounds as a watcher saw them."""
    return tuple(
        RoundReport(
            number=line.number,
            duration_ms=Milliseconds(line.duration_ms),
            participants=line.participants,
            updates=line.updates,
        )
        for line in lines
    )


def summary_lines(report: RunReport) -> list[str]:
    """The report for people."""
    seconds = [each.duration_ms / 1000 for each in report.rounds]
    lines = ["", f"world      {report.world}, seed {report.seed}, over {report.backend}"]
    if seconds:
        middle = statistics.median(seconds)
        lines.append(
            f"rounds     {len(seconds)}; a round took {middle:.2f} s at the median,"
            f" {min(seconds):.2f} to {max(seconds):.2f} s, {sum(seconds):.1f} s in all"
        )
        updates = sum(each.updates for each in report.rounds)
        wanted = sum(each.participants for each in report.rounds)
        if wanted:
            lines.append(f"updates    {updates} of {wanted} were in before their round closed")
    if report.metric is not None:
        lines.append(f"metric     {report.metric:.4f} on held-out data")
    lines.append(f"job        {report.phase}" + (f": {report.reason}" if report.reason else ""))
    if report.journal:
        lines.append(f"journal    {report.journal}")
    lines.append(f"links      {report.verdict.sentence}")
    return lines
